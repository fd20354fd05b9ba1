"""What ranks found wrong around them at their start, for those who look at another rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.core.hostlist import compress, ranges
from mgpu_slurm.core.layout import RunFolder


@dataclass(frozen=True)
class Warned:
    """One warning of one rank."""

    attempt: int
    rank: int
    node: str
    text: str


def warnings(folder: RunFolder) -> list[Warned]:
    """All of a run, in no order."""
    found = []
    for path in folder.logs.glob("*.warnings.jsonl"):
        attempt = int(path.name.partition("-")[0])
        found += [Warned(attempt, line["rank"], line["node"], line["text"]) for line in read_jsonl(path)]
    return found


def told(found: Iterable[Warned]) -> list[str]:
    """`rank 3 on n2: ...`, one line for all ranks that say the same."""
    by_text: dict[str, list[Warned]] = {}
    for warned in sorted(found, key=lambda warned: (warned.attempt, warned.rank)):
        by_text.setdefault(warned.text, []).append(warned)
    return [f"{_who(same)}: {text}" for text, same in by_text.items()]


def _who(same: list[Warned]) -> str:
    ranks = sorted({warned.rank for warned in same})
    nodes = list(dict.fromkeys(warned.node for warned in same))
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} on {compress(nodes)}"
