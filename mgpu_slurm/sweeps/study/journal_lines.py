"""Checks of a line of a study's journal: it must be a record that Optuna can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import TrialState

from mgpu_slurm.core.formatting import first_line

CREATE_STUDY, CREATE_TRIAL = 0, 4

_BEFORE: list[dict[str, Any]] = [
    {"op_code": CREATE_STUDY, "worker_id": "", "study_name": "", "directions": [1]},
    {"op_code": CREATE_TRIAL, "worker_id": "", "study_id": 0, "datetime_start": None, "state": TrialState.WAITING},
]
"""A study with a trial, to which a record is applied as a test."""


def _joined(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    # a duplicate key means two joined records; only an attribute may have keys 1 and "1", which are the same in JSON
    if len(made) < len(pairs) and "op_code" in made:
        raise ValueError("a name is in it twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_joined)


def record_of(line: bytes) -> dict[str, Any]:
    """Return the record of a line, without checking that Optuna can read it, which takes longer.

    Raises:
        ValueError: the line is not a JSON object, or is joined from two; the message states why.
    """
    return _object(_DECODER.decode(line.decode()))


def records_of(line: bytes) -> list[dict[str, Any]]:
    """Return the records of a line: one, or more if line breaks were lost.

    Raises:
        ValueError: the line has other content, or a record that Optuna cannot read; the message states why.
    """
    found: list[dict[str, Any]] = []
    at, text = 0, line.decode().removesuffix("\n")
    while not found or at < len(text):
        record, at = _DECODER.raw_decode(text, at)
        _check(_object(record))
        found.append(record)
    return found


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _check(record: dict[str, Any]) -> None:
    if "worker_id" not in record:
        # Optuna reads it only in some cases
        raise ValueError("it has no 'worker_id'")
    ids = record.keys() & {"study_id", "trial_id"}
    for name in ids:
        if not isinstance(record[name], int):
            raise ValueError(f"its {name!r} is no number")
    try:
        JournalStorage(_Records([*_BEFORE, record | dict.fromkeys(ids, 0)]))
    except Exception as error:
        raise ValueError(f"Optuna cannot read it: {type(error).__name__}: {first_line(str(error))}") from None


class _Records(BaseJournalBackend):
    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self._records = records

    def read_logs(self, log_number_from: int) -> Sequence[dict[str, Any]]:
        return self._records[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        raise NotImplementedError
