"""The messages between ranks: which call a rank makes, and what it requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from mgpu_slurm.core.errors import CollectiveMismatch, MgpuError, UserError
from mgpu_slurm.rank.signals import Stop


class Call(IntEnum):
    """The calls that every rank makes."""

    STEP = 0
    REPORT = 1
    MEAN = 2
    RESTORE = 3
    EPOCH = 4
    SAVE = 5
    SHARD = 6
    FINISH = 7
    TRIAL = 8
    PASS = 9
    END = 10

    @property
    def words(self) -> str:
        return {
            Call.STEP: "the next batch of a loader",
            Call.REPORT: "run.report()",
            Call.MEAN: "run.mean()",
            Call.RESTORE: "run.restore()",
            Call.EPOCH: "the end of an epoch",
            Call.SAVE: "writing a checkpoint",
            Call.SHARD: "the start of a pass over run.shard()",
            Call.FINISH: "the end of the job function",
            Call.TRIAL: "the next trial",
            Call.PASS: "the start of a pass over a stream or a sampler",
            Call.END: "the end of a stream",
        }[self]


@dataclass(frozen=True)
class Agreed:
    """The common decision of the ranks: the strongest request of any of them."""

    stop: Stop = Stop.NO
    save: bool = False
    failed: bool = False
    """Whether any rank could not do its part of the previous call."""


def different_calls(made: Iterable[tuple[int, Call]]) -> MgpuError:
    """Return the error for ranks that make different calls: a UserError if a stream has ended on some ranks only.

    Args:
        made: ranks and their calls; of many ranks at the same call, the first and the last are enough.
    """
    error: type[MgpuError]
    ranks_at: dict[Call, list[int]] = defaultdict(list)
    for rank, call in made:
        ranks_at[call].append(rank)
    parts = [
        f"{_ranks(ranks)} at {call.words}" for call, ranks in sorted(ranks_at.items(), key=lambda each: min(each[1]))
    ]
    error, every = CollectiveMismatch, "Every"
    if Call.END in ranks_at:
        error, every = UserError, "A stream must yield all of its samples in the same order on each rank, and every"
    return error(
        f"the ranks make different calls: {', '.join(parts)}. {every} rank must make these calls: "
        "move them out of `if run.is_main:`"
    )


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words; several ranks as the first and the last."""
    low, high = min(ranks), max(ranks)
    return f"rank {low}" if low == high else f"ranks {low} to {high}"
