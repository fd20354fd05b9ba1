"""Which lines of the logs of a run's ranks are shown, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import lookup
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder

BLOCK = 1 << 16
"""Bytes, or letters, of a log that are read at once."""

_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class LogView:
    """A choice of ranks and of lines."""

    ranks: Sequence[int] = (0,)
    tail: int | None = None
    """Number of newest lines of each rank; None for all."""
    pattern: re.Pattern[str] | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether text is shown as it is, also a line that is not complete yet."""
        return len(self.ranks) == 1 and self.pattern is None

    @property
    def is_complete(self) -> bool:
        """Return whether each line of these ranks is shown."""
        return self.pattern is None and self.tail is None

    def lines(self, rank: int) -> LineFilter:
        width = len(str(max(self.ranks)))
        return LineFilter(f"{rank:>{width}}: " if len(self.ranks) > 1 else "", self.pattern)


class LineFilter:
    """Turns the text of a rank, as it appears, into the lines to show."""

    def __init__(self, prefix: str, pattern: re.Pattern[str] | None) -> None:
        self._prefix = prefix
        self._pattern = pattern
        self._begun = ""
        """The beginning of a line whose end has not appeared yet."""

    def add(self, text: str) -> Iterator[str]:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            yield from self.line(line)

    def end(self) -> Iterator[str]:
        """Yield a last line that has no end."""
        if self._begun:
            yield from self.line(self._begun)
            self._begun = ""

    def line(self, line: str) -> Iterator[str]:
        """Yield a whole line as it is shown, or nothing if it does not match."""
        # of a progress bar, which is drawn over and over, the last state
        line = line.rstrip("\r").rpartition("\r")[2]
        if self._pattern is None or self._pattern.search(line):
            yield f"{self._prefix}{line}\n"


def shown(folder: RunFolder, view: LogView) -> Iterator[str]:
    """Yield what ranks have printed so far over all attempts, rank by rank, in pieces of text."""
    attempts = range(1, records.attempts_started(folder) + 1)
    for rank in view.ranks:
        yield from of_files(lookup.logs_of_rank(folder, rank, attempts), view, rank)


def of_files(paths: Sequence[Path], view: LogView, rank: int = 0) -> Iterator[str]:
    """Yield what these logs of a rank hold."""
    if view.tail is not None:
        yield from last_lines([(path, path.stat().st_size) for path in paths], view, rank)
        return
    lines = view.lines(rank)
    for path in paths:
        # only a line feed ends a line: progress bars write thousands of carriage returns
        with open(path, errors="replace", newline="\n") as file:
            while text := file.read(BLOCK):
                yield from [text] if view.is_whole else lines.add(text)
        yield from lines.end()


def last_lines(parts: Sequence[tuple[Path, int]], view: LogView, rank: int) -> Iterator[str]:
    """Yield the last lines of a rank's logs, of which no more is read than necessary.

    Args:
        parts: logs, oldest first, each with the number of bytes from its beginning that count.
    """
    lines = view.lines(rank)
    found: list[str] = []
    backwards = (line for path, end in reversed(parts) for line in _without_empty_end(_backwards(path, end)))
    while len(found) < (view.tail or 0) and (line := next(backwards, None)) is not None:
        found += lines.line(line.decode(errors="replace"))
    yield from reversed(found)


def end_of_lines(path: Path) -> int:
    """Return how many bytes of a log are whole lines."""
    size = path.stat().st_size
    return size - len(next(_backwards(path, size), b""))


def _without_empty_end(backwards: Iterator[bytes]) -> Iterator[bytes]:
    """Yield these lines without the first one if that is empty, because a line feed ends the last line."""
    begun = next(backwards, b"")
    yield from [begun] if begun else []
    yield from backwards


def _backwards(path: Path, end: int) -> Iterator[bytes]:
    """Yield what follows the last line feed, which may be empty, and then the lines before it, the last one first.

    Args:
        end: number of bytes of the file that count.
    """
    parts: list[bytes] = []
    with open(path, "rb") as file:
        while end > 0:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            first, *others = file.read(end - begin).split(b"\n")
            end = begin
            if others:
                yield others.pop() + b"".join(reversed(parts))
                yield from reversed(others)
                parts = []
            parts.append(first)
    if parts:
        yield b"".join(reversed(parts))


def ranks_of(text: str, folder: RunFolder) -> list[int]:
    """Return the ranks of `all`, `3` or `0,4-7`.

    Raises:
        UserError: it is something else, or the run has no such rank.
    """
    # those of a trial are the ranks of its worker
    now = records.read_state(folder.group if folder.is_trial else folder).ranks
    if text == "all":
        # a resumed run may have had more
        return sorted({*range(now), *_ranks_with_logs(folder)})
    parts = [_RANKS.fullmatch(part) for part in text.split(",")]
    ends = [(int(part[1]), int(part[2] or part[1])) for part in parts if part is not None]
    if len(ends) < len(parts) or any(last < first for first, last in ends):
        raise UserError(f"--rank {text!r}: expected a rank, several such as 0,4-7, or all")
    known = {*range(now), *_ranks_with_logs(folder)}
    if any(last > max(known) for _, last in ends) or not (found := _between(ends)) <= known:
        kind = "trial" if folder.is_trial else "run"
        raise UserError(f"--rank {text}: {kind} {folder.run} has ranks 0 to {now - 1}")
    return sorted(found)


def _between(ends: Sequence[tuple[int, int]]) -> set[int]:
    return {rank for first, last in ends for rank in range(first, last + 1)}


def _ranks_with_logs(folder: RunFolder) -> set[int]:
    names = (re.fullmatch(r"\d+-(\d+)\.log", path.name) for path in folder.logs.glob("*.log"))
    return {int(name[1]) for name in names if name is not None}


def pattern_of(text: str) -> re.Pattern[str]:
    """Return the compiled regular expression.

    Raises:
        UserError: it is not one.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(f"--grep {text!r}: not a regular expression: {error}") from None
