"""Which runs `status` shows, and in which order: `--filter` and `--sort`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TypeVar

from mgpu_slurm.core.errors import UserError, nearest, suggestion
from mgpu_slurm.core.formatting import time_of
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

R = TypeVar("R", bound=RunState)
Value = float | str | None

_CONDITION = re.compile(r"(?P<key>[^\s<>=!:]+)(?P<sign><=|>=|!=|<|>|=|:)(?P<value>\S+)")
_ALIASES = {"attempt": "attempts", "name": "run", "job": "job_id"}
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

    @property
    def flags(self) -> str:
        """Return the options as they were given."""
        given = [("--filter", each) for each in self.filters] + ([("--sort", self.sort)] if self.sort else [])
        return "".join(f" {option} {shlex.quote(value)}" for option, value in given)

    def check(self, entries: Sequence[RunState]) -> None:
        """Check that the conditions and the order name something that some run has.

        Args:
            entries: all runs; if none has reported yet, a name may be that of a metric.

        Raises:
            UserError: no run has a value that a condition or the order names.
        """
        conditions = [(word, _CONDITION.fullmatch(word)) for word in self._words]
        keys = [(f"--filter {word!r}", match["key"]) for word, match in conditions if match is not None]
        keys += [] if self.sort is None else [(f"--sort {self.sort!r}", self.sort.removeprefix("-"))]
        for word, match in conditions:
            if match is not None and match["sign"] in ("<", "<=", ">", ">=") and _number(match["value"]) is None:
                raise UserError(f"--filter {word!r}: expected a number after {match['sign']}, or a time such as 1h30m")
            if match is not None and _column(match["key"]) == "state":
                _check_state(word, match["sign"], match["value"], entries)
        for given, key in keys if any(entry.metrics for entry in entries) else ():
            if not self._is_known(entries, key):
                columns = ", ".join(each for each in _COLUMNS if each not in _ALIASES.values())
                metrics = list(dict.fromkeys(name for entry in entries for name in entry.metrics))
                meant = suggestion(key, [*_COLUMNS, *metrics])
                raise UserError(
                    f"{given}: no run has a column, metric or config value {key!r}{meant}; columns: {columns};"
                    f" metrics: {', '.join(metrics[:10])}"
                )

    def of(self, entries: Sequence[R]) -> list[R]:
        """Return the runs to show."""
        chosen = list(entries)
        for word in self._words:
            match = _CONDITION.fullmatch(word)
            if match is None:
                chosen = [entry for entry in chosen if word.lower() in f"{entry.run} {entry.reason}".lower()]
                continue
            pairs = zip(chosen, self._values(chosen, match["key"]), strict=True)
            chosen = [entry for entry, value in pairs if _holds(value, match["sign"], match["value"])]
        return chosen if self.sort is None else self._sorted(chosen, self.sort)

    def _is_known(self, entries: Sequence[RunState], key: str) -> bool:
        """Return whether it is a column, or some run has such a metric or config value, which takes reading a file."""
        return (
            _column(key) in _COLUMNS
            or any(entry.metrics.get(key) is not None for entry in entries)
            or any(self._config_value(entry, key) is not None for entry in entries)
        )

    @property
    def _words(self) -> list[str]:
        return " ".join(self.filters).split()

    def _sorted(self, entries: list[R], by: str) -> list[R]:
        key = by.removeprefix("-")
        found = list(zip(entries, self._values(entries, key), strict=True))
        known = [pair for pair in found if pair[1] is not None]
        numbers = [(number, entry) for entry, value in known if (number := _number(value)) is not None]
        texts = [(str(value), entry) for entry, value in known if _number(value) is None]
        numbers.sort(key=lambda pair: pair[0], reverse=key != by)
        texts.sort(key=lambda pair: pair[0], reverse=key != by)
        # what has no value comes last in both orders
        unknown = [entry for entry, value in found if value is None]
        return [entry for _, entry in numbers] + [entry for _, entry in texts] + unknown

    def _values(self, entries: Sequence[RunState], key: str) -> list[Value]:
        """Return a column, metric or config value of each run; None for runs that have none."""
        name = _column(key)
        if name in _TIMES:
            now = datetime.now(timezone.utc)
            return [_TIMES[name](entry, now) for entry in entries]
        if name in _FIELDS:
            return [_plain(getattr(entry, name)) for entry in entries]
        values = [_plain(entry.metrics.get(key)) for entry in entries]
        return values if values != [None] * len(entries) else [self._config_value(entry, key) for entry in entries]

    def _config_value(self, entry: RunState, name: str) -> Value:
        value: object = None
        if entry.run in self.folders:
            # one that was edited shows no value
            with suppress(UserError):
                value = read_spec(self.folders[entry.run]).config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return _plain(value)


def _check_state(word: str, sign: str, wanted: str, entries: Sequence[RunState]) -> None:
    """Check that there is a state such as the one that a condition names."""
    known = {*states.ALL, *(entry.state for entry in entries)}
    if not any(_holds(each, ":" if sign == ":" else "=", wanted) for each in known):
        raise UserError(f"--filter {word!r}: there is no such state{nearest(wanted.upper(), sorted(known))}")


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


_COLUMNS = (*_ALIASES, *_FIELDS, *_TIMES)


def _column(key: str) -> str:
    """Return the name of a column, which `status` writes in capitals."""
    name = key.lower()
    return _ALIASES.get(name, name)


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


_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def _number(value: Value) -> float | None:
    """Return a value as a number: of a time such as `1h30m` its seconds, of a group's mean and spread the mean. None if
    it is none, or NaN."""
    time = _TIME.fullmatch(value) if isinstance(value, str) and value else None
    if time is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in time.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    with suppress(ValueError):
        number = float(str(value).partition("±")[0])
        return None if math.isnan(number) else number
    return None
