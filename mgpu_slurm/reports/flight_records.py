"""Read the dumps of torch's flight recorders: which ranks did not come to a collective."""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any, TypeAlias

from mgpu_slurm.run_folder.layout import RunFolder

_RANK = re.compile(r"-flight-(\d+)(.*)")

Collective: TypeAlias = dict[str, Any]
"""An entry in the dump of a flight recorder."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump of a flight recorder")


def lagging(folder: RunFolder, attempt: int) -> str | None:
    """Return which ranks began fewer collectives than others of their group, in words; None if unknown."""
    newest: dict[tuple[str, str], dict[int, Collective]] = defaultdict(dict)
    waiting = set()
    for path in sorted(folder.logs.glob(f"{folder.flight_prefix(attempt).name}*")):
        if match := _RANK.search(path.name):
            for each in _collectives(path):
                # by group, which may have collectives of gloo and of NCCL, each with separate numbers
                newest[match[2], each["process_group"][0]][int(match[1])] = each
                if not each.get("retired", True):
                    waiting.add(int(match[1]))
    groups = [of_ranks for _, of_ranks in sorted(newest.items())]
    # a rank that waits in one group is late in others because of that
    found = [_behind(of_ranks, excused) for excused in (waiting, set[int]()) for of_ranks in groups]
    return next((words for words in found if words is not None), None)


def _collectives(path: Path) -> list[Collective]:
    """Return the collectives in a dump, oldest first; none if the file is not a dump."""
    try:
        with open(path, "rb") as file:
            entries = _PlainUnpickler(file).load()["entries"]
        keys = {"process_group", "collective_seq_id"}
        return [each for each in entries if keys <= each.keys() and each.get("is_p2p") is False]
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        return []


def _behind(of_ranks: dict[int, Collective], excused: Set[int]) -> str | None:
    """
    Args:
        of_ranks: the newest collective of each rank.
        excused: ranks that are not named.
    """
    counts = {rank: int(each["collective_seq_id"]) for rank, each in of_ranks.items()}
    most = max(counts.values())
    late = [rank for rank, count in sorted(counts.items()) if count < most and rank not in excused]
    if not late:
        return None
    first = next(rank for rank, count in sorted(counts.items()) if count == most)
    ranks = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
    what = of_ranks[first].get("profiling_name", "a collective")
    return f"{ranks} never reached {what} (#{most} of its group), in which rank {first} was"
