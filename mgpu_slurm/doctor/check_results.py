"""The result of a check: one line, and a fix if something is wrong."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "failed"]

_WIDTH = 9


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`."""

    level: Level
    check: str
    """Name of the check in one or two words; programs rely on it."""
    text: str
    fix: str = ""

    @staticmethod
    def from_plain(record: Mapping[str, Any]) -> Finding:
        return Finding(record["level"], record["check"], record["text"], record["fix"])

    @property
    def plain(self) -> dict[str, Any]:
        # `mend` is version 0.1's name for `fix`
        return dataclasses.asdict(self) | {"mend": self.fix}

    def lines(self, width: int = sys.maxsize) -> list[str]:
        """Return lines for people; the fix begins on a new line.

        Args:
            width: Width of the terminal; words are not split.
        """
        return wrapped(self.text, f"{self.level:<{_WIDTH}}", width) + wrapped(self.fix, f"{'':<{_WIDTH}}-> ", width)


def wrapped(text: str, before: str, width: int) -> list[str]:
    """Return the lines of a text; those after the first are indented."""
    after = " " * len(before)
    return textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    )


def span(seconds: float) -> str:
    """Return a measured time as text: `0.21 ms`, `31 ms`, `1.3 s`."""
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"


def ok(check: str, text: str) -> Finding:
    return Finding("ok", check, text)


def warning(check: str, text: str, fix: str) -> Finding:
    return Finding("warning", check, text, fix)


def failed(check: str, text: str, fix: str) -> Finding:
    return Finding("failed", check, text, fix)


def has_failed(found: Iterable[Finding]) -> bool:
    return any(finding.level == "failed" for finding in found)
