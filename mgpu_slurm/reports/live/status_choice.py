"""Which runs `status` shows, and in which order: `--filter` and `--sort`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TypeVar

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import time_of
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

R = TypeVar("R", bound=RunState)
Value = float | str | None

_CONDITION = re.compile(r"(?P<key>[^\s<>=!:]+)(?P<sign><=|>=|!=|<|>|=|:)(?P<value>\S+)")
_COLUMNS = {"attempt": "attempts", "name": "run", "job": "job_id"}
"""Columns of `status` that the state has under another name."""
_FIELDS = ("run", "state", "attempts", "nodes", "ranks", "step", "progress", "total", "reason", "job_id", "kind")


@dataclass(frozen=True)
class Choice:
    """Conditions that all shown runs fulfil, and what they are sorted by."""

    filters: Sequence[str] = ()
    """Words, each of which is a condition such as `state:running` or `loss<0.1`, or a part of a name."""
    sort: str | None = None
    """A column, metric or config value; with `-` before it, the largest come first."""
    folders: Mapping[str, RunFolder] = field(default_factory=dict)
    """The folder of each run or group by its name, for config values."""

    def of(self, entries: Sequence[R]) -> list[R]:
        """Return the runs to show.

        Raises:
            UserError: no run has a value that a condition or the order names.
        """
        chosen = list(entries)
        for word in " ".join(self.filters).split():
            match = _CONDITION.fullmatch(word)
            if match is None:
                chosen = [entry for entry in chosen if word.lower() in f"{entry.run} {entry.reason}".lower()]
                continue
            values = self._values(chosen, match["key"], f"--filter {word!r}")
            pairs = zip(chosen, values, strict=True)
            chosen = [entry for entry, value in pairs if _holds(value, match["sign"], match["value"])]
        return chosen if self.sort is None else self._sorted(chosen, self.sort)

    def _sorted(self, entries: list[R], by: str) -> list[R]:
        key = by.removeprefix("-")
        found = list(zip(entries, self._values(entries, key, f"--sort {by!r}"), strict=True))
        known = [pair for pair in found if pair[1] is not None]
        numbers = [(number, entry) for entry, value in known if (number := _number(value)) is not None]
        texts = [(str(value), entry) for entry, value in known if _number(value) is None]
        numbers.sort(key=lambda pair: pair[0], reverse=key != by)
        texts.sort(key=lambda pair: pair[0], reverse=key != by)
        # what has no value comes last in both orders
        unknown = [entry for entry, value in found if value is None]
        return [entry for _, entry in numbers] + [entry for _, entry in texts] + unknown

    def _values(self, entries: Sequence[RunState], key: str, given: str) -> list[Value]:
        """Return a column, metric or config value of each run."""
        name = _COLUMNS.get(key, key)
        if name in _TIMES:
            now = datetime.now(timezone.utc)
            return [_TIMES[name](entry, now) for entry in entries]
        if name in _FIELDS:
            return [_plain(getattr(entry, name)) for entry in entries]
        values = [_plain(entry.metrics.get(name)) for entry in entries]
        if entries and values == [None] * len(entries):
            values = [self._config_value(entry, name) for entry in entries]
            if values == [None] * len(entries):
                raise UserError(f"{given}: no run has a column, metric or config value {key!r}")
        return values

    def _config_value(self, entry: RunState, name: str) -> Value:
        value: object = None
        if entry.run in self.folders:
            # one that was edited shows no value
            with suppress(UserError):
                value = read_spec(self.folders[entry.run]).config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return _plain(value)


def _age(entry: RunState, now: datetime) -> float | None:
    submitted = time_of(entry.submitted)
    return None if submitted is None else (now - submitted).total_seconds()


def _time(entry: RunState, now: datetime) -> float | None:
    started = time_of(entry.started)
    return None if started is None else ((time_of(entry.ended) or now) - started).total_seconds()


_TIMES: dict[str, Callable[[RunState, datetime], float | None]] = {
    "left": lambda entry, now: entry.seconds_left(now),
    "age": _age,
    "time": _time,
}


def _plain(value: object) -> Value:
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _holds(value: Value, sign: str, wanted: str) -> bool:
    if value is None:
        return False
    if sign == ":":
        return wanted.lower() in str(value).lower()
    number, limit = _number(value), _number(wanted)
    if number is None or limit is None:
        same = str(value).lower() == wanted.lower()
        return same if sign == "=" else not same if sign == "!=" else False
    return {
        "<": number < limit,
        "<=": number <= limit,
        ">": number > limit,
        ">=": number >= limit,
        "=": number == limit,
        "!=": number != limit,
    }[sign]


def _number(value: Value) -> float | None:
    """Return a value as a number; of a group's mean and spread, the mean. None if it is none, or NaN."""
    with suppress(ValueError):
        number = float(str(value).partition("±")[0])
        return None if math.isnan(number) else number
    return None
