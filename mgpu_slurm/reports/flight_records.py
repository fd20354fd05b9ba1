"""Read the dumps of torch's flight recorders: each rank's collectives show which rank did not reach one.

The dumps are pickles, of which only numbers, texts and collections of them are loaded.
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
    """Return which ranks began fewer collectives than others of their group, in words; None if unknown."""
    # the newest collective of each rank, by group
    newest: dict[tuple[str, str], dict[int, Collective]] = defaultdict(dict)
    for path in sorted(folder.logs.glob(f"{folder.flight_prefix(attempt).name}*")):
        match = _RANK.search(path.name)
        for each in _collectives(path) if match else []:
            if not each["is_p2p"]:
                # one group may have collectives of gloo and of NCCL, each with separate numbers
                newest[match[2], each["process_group"][0]][int(match[1])] = each  # type: ignore[index]
    found = [_behind(of_ranks) for _, of_ranks in sorted(newest.items())]
    return next((words for words in found if words is not None), None)


def _collectives(path: Path) -> list[Collective]:
    """Return the collectives in a dump, oldest first; none if the file is not a dump."""
    try:
        with open(path, "rb") as file:
            entries = _PlainUnpickler(file).load()["entries"]
        return [each for each in entries if {"is_p2p", "process_group", "collective_seq_id"} <= each.keys()]
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        return []


def _behind(of_ranks: dict[int, Collective]) -> str | None:
    """
    Args:
        of_ranks: the newest collective of each rank.
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
