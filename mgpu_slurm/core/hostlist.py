"""Parse SLURM's short forms: host lists such as `rack[1-2]n[01-03,7],gpu5` and counts such as `2(x3),1`.

Needed in containers, which have no `scontrol show hostnames`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import cut

MAX_HOSTS = 65536
"""SLURM's own limit on a host list; a longer one is a mistake, and would use up the memory."""

_HOST = re.compile(r"(?:[^\s\[\](),]+|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[(?P<ranges>.*?)\]|(?P<literal>[^\[]+)")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")
_NUMBERED = re.compile(r"(?P<prefix>[^\s\[\](),]*?)(?P<number>[0-9]{1,17})")
_COUNT = re.compile(r"(?P<count>[0-9]{1,18})(?:\(x(?P<times>[0-9]{1,18})\))?")


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
            raise _too_many(text)
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
    numbers: list[str] = []
    for part in piece["ranges"].split(","):
        numbers += _numbers(part, text)
        if len(numbers) > MAX_HOSTS:
            raise _too_many(text)
    return numbers


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
    where = f"cannot be read at {_shown(place)}; expected a form such as n[01-03,7],gpu5"
    return UserError(f"host list {_shown(text)}: {where}")


def _too_many(text: str) -> UserError:
    return UserError(f"host list {_shown(text)}: more than {MAX_HOSTS} hosts")


def _shown(text: str) -> str:
    return repr(cut(text, 200))


def expand_counts(text: str) -> list[int]:
    """Return `2(x3),1`, the form of SLURM_TASKS_PER_NODE, as [2, 2, 2, 1].

    Raises:
        UserError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or len(counts) + int(match["times"] or 1) > MAX_HOSTS:
            where = f"cannot be read at {_shown(part)}; expected a form such as 2(x3),1"
            raise UserError(f"counts {_shown(text)}: {where}")
        counts += [int(match["count"])] * int(match["times"] or 1)
    return counts


def compress(names: Sequence[str]) -> str:
    """Return `a,local[1-3]` for names of which some share a prefix and count up by one; `expand` reads it back."""
    parts: list[list[str]] = []
    for name in names:
        if parts and name == _successor(parts[-1][-1]):
            parts[-1].append(name)
        else:
            parts.append([name])
    return ",".join(_as_range(part) for part in parts)


def _successor(name: str) -> str | None:
    """Return the name that counts up by one with the same padding; None for a name without a number."""
    match = _NUMBERED.fullmatch(name)
    return match and f"{match['prefix']}{int(match['number']) + 1:0{len(match['number'])}}"


def _as_range(names: Sequence[str]) -> str:
    first, last = _NUMBERED.fullmatch(names[0]), _NUMBERED.fullmatch(names[-1])
    if len(names) == 1 or first is None or last is None:
        return names[0]
    return f"{first['prefix']}[{first['number']}-{last['number']}]"


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-4,7`, the form of array tasks, for ascending numbers; in brackets, `expand` reads it back."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
