"""Checks of a line of a study's journal: it must be a record that Optuna can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import TrialState

from mgpu_slurm.core.formatting import first_line

CREATE_STUDY, CREATE_TRIAL = 0, 4

Content: TypeAlias = dict[str, object]
"""A record as Optuna writes it: `op_code`, `worker_id`, and keys of Optuna's that depend on the operation."""

_BEFORE: list[Content] = [
    {"op_code": CREATE_STUDY, "worker_id": "", "study_name": "", "directions": [1]},
    {"op_code": CREATE_TRIAL, "worker_id": "", "study_id": 0, "datetime_start": None, "state": TrialState.WAITING},
]
"""A study with a trial, to which a record is applied as a test."""


@dataclass(frozen=True)
class Record:
    """A record, with those of its keys that a repair needs."""

    content: Content
    operation: int | None
    study: int | None
    trial: int | None
    begun: str | None
    """When the trial began, in ISO 8601."""

    @staticmethod
    def from_json(content: dict[str, Any]) -> Record:
        names = ("op_code", "study_id", "trial_id", "datetime_start")
        return Record(content, *map(content.get, names))


def _joined(pairs: list[tuple[str, object]]) -> Content:
    made = dict(pairs)
    # a duplicate key means two joined records; only an attribute may have keys 1 and "1", which are the same in JSON
    if len(made) < len(pairs) and "op_code" in made:
        raise ValueError("it has a key twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_joined)


def content_of(line: bytes) -> Content:
    """Return the record of a line as Optuna reads it, without checking that Optuna can read it, which takes longer.

    Raises:
        ValueError: the line is not a JSON object, or is joined from two; the message states why.
    """
    return _object(_DECODER.decode(line.decode()))


def records_of(line: bytes) -> list[Record]:
    """Return the records of a line: one, or more if line breaks were lost.

    Raises:
        ValueError: the line has other content, or a record that Optuna cannot read; the message states why.
    """
    found: list[Record] = []
    at, text = 0, line.decode().removesuffix("\n")
    while not found or at < len(text):
        read, at = _DECODER.raw_decode(text, at)
        content = _object(read)
        _check(content)
        found.append(Record.from_json(content))
    return found


def _object(found: object) -> Content:
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _check(record: Content) -> None:
    if "worker_id" not in record:
        # Optuna reads it only in some cases
        raise ValueError("it has no 'worker_id'")
    ids = record.keys() & {"study_id", "trial_id"}
    for name in ids:
        if not isinstance(record[name], int):
            raise ValueError(f"its {name!r} is not a number")
    try:
        JournalStorage(_Records([*_BEFORE, record | dict.fromkeys(ids, 0)]))
    except Exception as error:
        raise ValueError(f"Optuna cannot read it: {type(error).__name__}: {first_line(str(error))}") from None


class _Records(BaseJournalBackend):
    def __init__(self, records: Sequence[Content]) -> None:
        self._records = records

    def read_logs(self, log_number_from: int) -> Sequence[Content]:
        return self._records[log_number_from:]

    def append_logs(self, logs: list[Content]) -> None:
        raise NotImplementedError
