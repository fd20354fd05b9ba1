"""Format sizes, times, counts and commands for the screen, and parse sizes that users write."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from mgpu_slurm.core.errors import UserError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
}
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?P<unit>[A-Za-z]*)\s*")


def program() -> str:
    """Return `mgpu-slurm`, or `python -m mgpu_slurm` with the interpreter as the user typed it."""
    return f"{_python()} -m mgpu_slurm" if _is_module_call() else "mgpu-slurm"


def short_path(path: Path) -> str:
    """Return a path for pasting: relative to the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: `1 run`, `2 runs`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def short_value(value: object) -> str:
    """Return a value of a parameter or metric for people: a fraction with four digits, a count with all of them."""
    if not isinstance(value, float):
        return str(value)
    is_count = value.is_integer() and abs(value) < 10**9
    return f"{value:.0f}" if is_count or 10**4 <= abs(value) < 10**6 else f"{value:.4g}"


def without_empty_columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return a table without the columns that have nothing but a header, which is the first row."""
    filled = [any(column) for column in zip(*rows[1:], strict=True)]
    return [list(itertools.compress(row, filled)) for row in rows]


def cut(line: str, columns: int) -> str:
    """Return a line that fits into so many columns."""
    return line if len(line) <= columns else f"{line[: columns - 3]}..."


def cut_middle(text: str, columns: int, end: int) -> str:
    """Return a text that fits into so many columns: its beginning, and so many characters of its end."""
    return text if len(text) <= columns else f"{text[: columns - 3 - end]}...{text[-end:]}"


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters with which a name could command a terminal, look like another one, or break its line."""


def printable(text: str) -> str:
    """Return a text of others, such as a job's name, for a terminal: controls but lines and tabs are replaced."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


def first_line(text: str) -> str:
    """Return the first line of a text; an empty string if it has none."""
    return (text.splitlines() or [""])[0]


def parse_size(text: str) -> int:
    """Return the bytes of `100MB` (decimal), `1.5 GiB` (binary) or a bare number of bytes; case does not matter.

    Raises:
        UserError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise UserError(f"size {text!r}: expected a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 100MB")
    return int(Decimal(match["number"]) * factor)


def human_size(size: int) -> str:
    """Return a size such as `999 B`, `1.5 MB`, `120 MB`, with decimal units and at most three digits."""
    value = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        shown = _three_digits(value) if unit != "B" else str(size)
        # a value that rounds to 1000 is shown in the next unit
        if float(shown) < 1000:
            return f"{shown} {unit}"
        value /= 1000
    return f"{_three_digits(value)} PB"


def binary_size(size: int) -> str:
    """Return a size such as `999 B`, `1.5 MiB`, `79.6 GiB`, as torch and nvidia-smi show memory."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        shown = f"{value:.1f}" if unit != "B" else str(size)
        # a value that rounds to 1024 is shown in the next unit
        if float(shown) < 1024:
            return f"{shown} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def time_of(text: str | None) -> datetime | None:
    """Return the time of a text in ISO 8601; None without a text."""
    return datetime.fromisoformat(text) if text else None


def earliest(times: Iterable[str | None]) -> str | None:
    """Return the first of some times in ISO 8601, which may have different zones; None without any."""
    return min(filter(None, times), key=datetime.fromisoformat, default=None)


def latest(times: Iterable[str | None]) -> str | None:
    """Return the last of some times in ISO 8601, which may have different zones; None without any."""
    return max(filter(None, times), key=datetime.fromisoformat, default=None)


def duration(seconds: float) -> str:
    """Return a length of time in one or two units: `0.4s`, `42s`, `3m10s`, `5h02m`, `3d04h`."""
    if 0.05 <= seconds < 0.95:
        return f"{seconds:.1f}s"
    seconds = 1 if 0.95 <= seconds < 1 else int(max(0, seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


def in_words(seconds: float) -> str:
    """Return a length of time for use in a sentence: `90 s`, `30 min`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _is_module_call() -> bool:
    return Path(sys.argv[0]).name == "__main__.py"


def _python() -> str:
    return sys.orig_argv[0]


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
