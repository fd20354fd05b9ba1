"""The problems that ranks found in their environment at their start, for users who follow another rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.core.hostlist import compress, ranges
from mgpu_slurm.run_folder.layout import RunFolder


@dataclass(frozen=True)
class RankWarning:
    """A problem that one rank found."""

    attempt: int
    rank: int
    node: str
    text: str


def of_run(folder: RunFolder) -> list[RankWarning]:
    """Return the warnings of all ranks and attempts of a run, in no particular order."""
    found = []
    for path in folder.logs.glob("*.warnings.jsonl"):
        attempt = int(path.name.partition("-")[0])
        found += [RankWarning(attempt, line["rank"], line["node"], line["text"]) for line in read_jsonl(path)]
    return found


def of_attempt(folder: RunFolder, attempt: int) -> list[RankWarning]:
    """Return the warnings of one attempt: another one with other resources may have none."""
    return [warned for warned in of_run(folder) if warned.attempt == attempt]


def lines(found: Iterable[RankWarning]) -> list[str]:
    """Return lines such as `rank 3 on n2: ...`, one line for all ranks with the same warning."""
    by_text: dict[str, list[RankWarning]] = {}
    for warned in sorted(found, key=lambda warned: (warned.attempt, warned.rank)):
        by_text.setdefault(warned.text, []).append(warned)
    return [f"{_who(same)}: {text}" for text, same in by_text.items()]


def _who(same: list[RankWarning]) -> str:
    ranks = sorted({warned.rank for warned in same})
    nodes = list(dict.fromkeys(warned.node for warned in same))
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} on {compress(nodes)}"
