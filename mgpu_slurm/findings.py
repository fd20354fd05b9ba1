"""What a check has found: one line in plain words, and the mend where there is something to mend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "failed"]

_WIDTH = 9


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`."""

    level: Level
    check: str
    """What was looked at, in one or two words: programs rely on it."""
    text: str
    mend: str = ""

    @property
    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For people; the mend on a line of its own."""
        shown = [f"{self.level:<{_WIDTH}}{self.text}"]
        return [*shown, f"{'':<{_WIDTH}}-> {self.mend}"] if self.mend else shown


def span(seconds: float) -> str:
    """A time that was measured: `0.21 ms`, `31 ms`, `1.3 s`."""
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"


def ok(check: str, text: str) -> Finding:
    return Finding("ok", check, text)


def warning(check: str, text: str, mend: str) -> Finding:
    return Finding("warning", check, text, mend)


def failed(check: str, text: str, mend: str) -> Finding:
    return Finding("failed", check, text, mend)


def has_failed(found: Iterable[Finding]) -> bool:
    return any(finding.level == "failed" for finding in found)
