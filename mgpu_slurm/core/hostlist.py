"""Parse SLURM's short forms: host lists such as `rack[1-2]n[01-03,7],gpu5` and counts such as `2(x3),1`.

Needed in containers, which have no `scontrol show hostnames`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from mgpu_slurm.core.errors import UserError

MAX_HOSTS = 65536
"""SLURM's own limit on a host list; a longer one is a mistake, and would use up the memory."""

_HOST = re.compile(r"(?:[^\s\[\](),]+|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[(?P<ranges>.*?)\]|(?P<literal>[^\[]+)")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")
_COUNT = re.compile(r"(?P<count>[0-9]+)(?:\(x(?P<times>[0-9]+)\))?")


def expand(text: str) -> list[str]:
    """Return the names of a host list in order, with their zero padding; none for an empty list.

    Raises:
        UserError: the text is not a host list, or has more than `MAX_HOSTS` names.
    """
    if not text:
        return []
    names: list[str] = []
    for host in _split(text):
        alternatives = [_alternatives(piece, text) for piece in _PIECE.finditer(host)]
        if len(names) + math.prod(map(len, alternatives)) > MAX_HOSTS:
            raise UserError(f"host list {text!r}: more than {MAX_HOSTS} hosts")
        names.extend("".join(parts) for parts in itertools.product(*alternatives))
    return names


def _split(text: str) -> Iterator[str]:
    """Yield the parts between the commas outside brackets."""
    position = 0
    while True:
        match = _HOST.match(text, position)
        if match is None:
            raise _broken(text, text[position:] or "its end")
        yield match[0]
        position = match.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise _broken(text, text[position:])
        position += 1


def _alternatives(piece: re.Match[str], text: str) -> list[str]:
    if piece["ranges"] is None:
        return [piece["literal"]]
    return [number for part in piece["ranges"].split(",") for number in _numbers(part, text)]


def _numbers(part: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise _broken(text, part or "[]")
    low = match["low"]
    if match["high"] is None:
        return [low]
    first, last = int(low), int(match["high"])
    if not first <= last < first + MAX_HOSTS:
        raise _broken(text, part)
    return [f"{number:0{len(low)}}" for number in range(first, last + 1)]


def _broken(text: str, place: str) -> UserError:
    return UserError(f"host list {text!r}: cannot be read at {place!r}; expected a form such as n[01-03,7],gpu5")


def expand_counts(text: str) -> list[int]:
    """Return `2(x3),1`, the form of SLURM_TASKS_PER_NODE, as [2, 2, 2, 1].

    Raises:
        UserError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or int(match["times"] or 1) > MAX_HOSTS:
            raise UserError(f"counts {text!r}: cannot be read at {part!r}; expected a form such as 2(x3),1")
        counts += [int(match["count"])] * int(match["times"] or 1)
    return counts


def compress(names: Sequence[str]) -> str:
    """Return `local[1-3]` for names that share a prefix and count up by one, else the names joined by commas."""
    first = re.fullmatch(r"(?P<prefix>.*?)(?P<number>[0-9]+)", names[0])
    if first is not None and len(names) > 1:
        short = f"{first['prefix']}[{first['number']}-{int(first['number']) + len(names) - 1}]"
        if expand(short) == names:
            return short
    return ",".join(names)


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-4,7`, the form of array tasks, for ascending numbers; in brackets, `expand` reads it back."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
