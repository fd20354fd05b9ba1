"""What torch's flight recorders have left of an attempt: by each rank's collectives it is told which one did not come.

They are pickles, of which nothing but numbers, texts and collections of them is read.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from mgpu_slurm.core.layout import RunFolder

Collective = dict[str, Any]

_RANK = re.compile(r"-flight-(\d+)(.*)")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in what a flight recorder has left")


def lagging(folder: RunFolder, attempt: int) -> str | None:
    """Which ranks have begun fewer collectives than others of their group, in words; None where nothing tells of it."""
    # by group, the newest collective of each rank
    newest: dict[tuple[str, str], dict[int, Collective]] = defaultdict(dict)
    for path in sorted(folder.logs.glob(f"{folder.flight_prefix(attempt).name}*")):
        match = _RANK.search(path.name)
        for each in _collectives(path) if match else []:
            if not each["is_p2p"]:
                # one group may have collectives of gloo and of NCCL, each with numbers of their own
                newest[match[2], each["process_group"][0]][int(match[1])] = each  # type: ignore[index]
    found = [_behind(of_ranks) for _, of_ranks in sorted(newest.items())]
    return next((words for words in found if words is not None), None)


def _collectives(path: Path) -> list[Collective]:
    """The oldest first; none where the file is no such record."""
    try:
        with open(path, "rb") as file:
            entries = _PlainUnpickler(file).load()["entries"]
        return [each for each in entries if {"is_p2p", "process_group", "collective_seq_id"} <= each.keys()]
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        return []


def _behind(of_ranks: dict[int, Collective]) -> str | None:
    """
    Args:
        of_ranks: the newest collective of each.
    """
    counts = {rank: int(each["collective_seq_id"]) for rank, each in of_ranks.items()}
    most = max(counts.values())
    late = [rank for rank, count in sorted(counts.items()) if count < most]
    if not late:
        return None
    first = next(rank for rank, count in sorted(counts.items()) if count == most)
    ranks = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
    what = of_ranks[first].get("profiling_name", "a collective")
    return f"{ranks} had not come to {what}, number {most} of its group, where rank {first} was"
