"""Call user code in a rank, so that an error is printed and recorded first, and the rank then ends in limited time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.core.files import write_json
from mgpu_slurm.core.record_types import Failure
from mgpu_slurm.job.stacks import place_of
from mgpu_slurm.rank import crash
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.rank.signals import (
    PART_OF_LEAD,
    StopFlag,
    leave_from_here,
    request_requeue,
)
from mgpu_slurm.request.spec import (
    REQUEUE_EXIT_CODE,
)


def guarded(rank: Rank, stop: StopFlag, action: Callable[[], None]) -> int:
    """Call user code, and return the exit code. An error is printed and recorded, so that the first cause is known."""
    stop.listen()
    leave_after = None if rank.spec.lead is None else PART_OF_LEAD * rank.spec.lead
    stop.watch_signals(leave_after, lambda: _leave_at_last(rank))
    try:
        with telling_first(rank):
            action()
        return 0
    except RunStopped as stopped:
        return stopped.exit_code
    except BaseException as error:
        return crash.exit_code(error)


@contextmanager
def telling_first(rank: Rank, saved: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Print and record an error of the block before it propagates, and limit the time until this rank ends: it may be
    in the middle of a collective, and its cleanup could wait for the other ranks forever.

    Args:
        saved: waits, for a limited time, for what this rank is still saving.
    """
    try:
        yield
    except RunStopped:
        raise
    except BaseException as error:
        if error not in rank.told:
            _tell(rank, error, saved)
        raise


def _tell(rank: Rank, error: BaseException, saved: Callable[[], None]) -> None:
    shown = crash.own_traceback(error)
    sys.stdout.flush()
    print(shown, end="", file=sys.stderr, flush=True)
    code = crash.exit_code(error)
    # later errors during cleanup are not the cause
    if code and not rank.told:
        record_failure(rank, crash.record(error, shown, rank.facts))
        crash.leave_soon(code, saved)
    rank.told.append(error)


def record_failure(rank: Rank, record: Failure) -> None:
    """Record why this rank failed; the log contains it too."""
    with suppress(OSError):
        write_json(rank.folder.rank_failure(rank.attempt, rank.facts.rank), record.to_json())


def _leave_at_last(rank: Rank) -> None:
    """End a rank that has reached no boundary, so that the run is requeued from its newest checkpoint. Record where the
    rank is blocked."""
    from mgpu_slurm.checkpoints import folder as checkpoints

    if rank.spec.kind == "run" and not checkpoints.any_whole(rank.folder):
        # it would start from scratch, again and again
        return
    code = REQUEUE_EXIT_CODE if rank.spec.nodes_are_simulated else 0
    place = place_of(threading.main_thread())
    said = f"rank {rank.facts.rank} on {rank.facts.node_name} left before the time limit; it could not save at {place}"
    leave_from_here(code, lambda: request_requeue(rank.folder, rank.attempt, said))
