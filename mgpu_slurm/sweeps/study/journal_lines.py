"""What a line of a study's journal has to be: a record that Optuna can read."""

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
"""A study with a trial, on which a record is tried."""


def _joined(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    # the beginning of one record and the end of another; an attribute may have 1 and "1", which JSON cannot tell apart
    if len(made) < len(pairs) and "op_code" in made:
        raise ValueError("a name is in it twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_joined)


def record_of(line: bytes) -> dict[str, Any]:
    """Return what is read of a line, without asking whether Optuna can read it, which takes longer.

    Raises:
        ValueError: it is no JSON object, or one that is made of two, and why.
    """
    return _object(_DECODER.decode(line.decode()))


def records_of(line: bytes) -> list[dict[str, Any]]:
    """Return the records of a line: one, or more if line breaks were lost.

    Raises:
        ValueError: anything else is there, or what Optuna cannot read, and why.
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
        # Optuna asks for it only at times
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
