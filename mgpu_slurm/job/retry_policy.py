"""Decides whether a failed attempt is retried, and on which nodes.

Failures of the cluster are retried; failures of the program only with `--retries`. Only consecutive attempts without
progress count: a run that saves a new checkpoint between two cluster failures may continue for weeks. A run is not
restarted after two attempts that reached the time limit without a new checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, Spec
from mgpu_slurm.run_folder import failures, records, states
from mgpu_slurm.run_folder.checkpoint_names import checkpoint_step, newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import UNRECORDED, Event, Failure

LIMIT = 3
"""Maximum consecutive automatic restarts without progress."""

MOST_HALVINGS = 12
"""Maximum consecutive restarts without progress in which fewer samples are computed at once."""

PAUSES = (0.0, 5.0, 30.0)
"""Seconds before the first, second and each later of these restarts: the problem may be temporary."""

LOOK_EVERY = 0.2
"""Seconds between two checks during a pause."""


@dataclass(frozen=True)
class Retry:
    """Another attempt at the same run."""

    why: str
    """Failure of the previous attempt, in one line."""
    node: str | None
    """Node of that failure, if known."""
    checkpoint: int | None
    """Step of the newest complete checkpoint; None if there is none."""
    number: int
    """Number of this retry among consecutive ones from the same checkpoint, from 1."""
    of: int
    """Maximum of `number`."""
    avoid: tuple[str, ...]
    """Nodes to avoid."""
    leaves_job: bool = False
    """Whether nothing more can be started in the previous attempt's job."""

    @property
    def pause(self) -> float:
        """Seconds to wait before it."""
        return PAUSES[min(self.number, len(PAUSES)) - 1]

    @property
    def words(self) -> str:
        return f"restarting ({self.number} of {self.of}): {self.why}"

    def write_down(self, folder: RunFolder, **facts: Any) -> Event:
        """Record it in the run's history and state; return the event."""
        facts |= {"why": self.why, "node": self.node, "checkpoint": self.checkpoint}
        facts |= {"avoid": list(self.avoid), "pause": self.pause}
        records.settle_event(folder, "retried", **facts)
        records.settle_state(folder, state=states.REQUEUED, reason=self.words)
        return Event.from_json({"event": "retried", **facts})

    def wait(self) -> Iterator[None]:
        """Wait for the pause, yielding at the start and at intervals so that the caller can check for a cancel."""
        yield
        end = time.monotonic() + self.pause
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_EVERY, left))
            yield


def due(folder: RunFolder, spec: Spec, code: int, earlier: Sequence[Event]) -> Retry | None:
    """Return a retry if the newest attempt has failed and another one makes sense.

    Args:
        code: Exit code of that attempt, which ended by itself; negative if a signal killed the process that ran it.
        earlier: The retries of this submission so far.
    """
    if code in (0, REQUEUE_EXIT_CODE):
        return None
    failure = records.read_failure(folder) or _unrecorded(code)
    if (retry := _in_smaller_parts(folder, spec, failure, earlier)) is not None:
        return retry
    cause = failures.cause_of(failure, records.said_last(folder, failure))
    if spec.kind != "run" and not cause.ends_job:
        # a sweep's worker only loses a trial, and restarts by itself
        return None
    if cause is failures.GPU and not spec.resources.gpus:
        # no GPUs were requested
        cause = failures.PROGRAM
    limit = spec.retries if spec.retries is not None else LIMIT if cause.is_cluster_fault else 0
    step = _newest_step(folder)
    in_vain = _trailing_retries(earlier, step)
    if len(in_vain) >= limit:
        return None
    node = failures.node_of(failure, cause)
    # two failures in a row on one node are that node's fault
    is_spoilt = cause.excludes_node or any(event.node == node for event in in_vain[-1:])
    avoid = [known for event in earlier[-1:] for known in event.avoid]
    if node is not None and is_spoilt and node not in avoid:
        avoid.append(node)
    return Retry(records.line_of(failure), node, step, len(in_vain) + 1, limit, tuple(avoid), cause.ends_job)


def _in_smaller_parts(folder: RunFolder, spec: Spec, failure: Failure, earlier: Sequence[Event]) -> Retry | None:
    """Return a retry if the newest attempt ran out of memory, and the next one will compute fewer samples at once."""
    memory = records.read_memory(folder)
    is_of_this = memory is not None and memory.attempt == records.attempts_started(folder)
    if memory is None or not is_of_this or spec.kind != "run" or spec.retries == 0:
        return None
    step = _newest_step(folder)
    number = len(_trailing_retries(earlier, step)) + 1
    if number > MOST_HALVINGS:
        return None
    at_once = f"next with {counted(memory.first, 'sample')} at once"
    left = memory.first.bit_length() - 1
    return Retry(f"{records.line_of(failure)}; {at_once}", failure.node, step, number, number + left, ())


def _newest_step(folder: RunFolder) -> int | None:
    newest = newest_checkpoint(folder)
    return None if newest is None else checkpoint_step(newest)


def checkpoint_fact(folder: RunFolder) -> dict[str, str | None]:
    """Return the part of an event that names the newest checkpoint; empty if that cannot be read."""
    with suppress(OSError):
        newest = newest_checkpoint(folder)
        return {"newest": None if newest is None else newest.name}
    return {}


def requeue_event(folder: RunFolder, spec: Spec, is_at_limit: Callable[[], bool]) -> Event:
    """Return what a `requeued` event says about the newest attempt, which has requested a requeue.

    Args:
        is_at_limit: Returns whether the reason was the time limit, not a preemption or the job's own decision.

    Returns:
        `newest`, the name of the newest checkpoint; and `in_vain`, whether the attempt reached its time limit without
        a newer one. `in_vain` is None if it did not reach the limit.
    """
    begins = [event for event in records.events(folder) if event.event == "started"][-1:]
    newest = checkpoint_fact(folder).get("newest", UNRECORDED)
    # a command may save anywhere, and a sweep's worker saves in its trials
    shows_progress = spec.kind == "run" and (newest is not None or not spec.target.is_command)
    # version 0.1 did not record where an attempt begins
    is_stuck = newest != UNRECORDED and all(event.newest == newest for event in begins)
    if not (shows_progress and is_stuck):
        return Event(event="requeued", newest=newest, in_vain=False)
    return Event(event="requeued", newest=newest, in_vain=True if is_at_limit() else None)


def facts_of(asked: Event) -> dict[str, object]:
    """Return what to record of a requeue that `requeue_event` describes."""
    newest = {} if asked.newest == UNRECORDED else {"newest": asked.newest}
    return {**newest, "in_vain": asked.in_vain}


def why_no_requeue(spec: Spec, earlier: Sequence[Event], asked: Event) -> str:
    """Return why a run that requested a requeue is not requeued; empty if it is.

    Args:
        earlier: The `requeued` events of this submission so far.
        asked: See `requeue_event`.
    """
    if len(earlier) >= spec.max_requeues:
        return f"stopped to be requeued, but --max-requeues {spec.max_requeues} allows no more"
    before = [event for event in earlier if event.in_vain is not None][-1:]
    if not asked.in_vain or not any(event.in_vain and event.newest == asked.newest for event in before):
        return ""
    newest = f"a newer checkpoint than {asked.newest}" if asked.newest else "a checkpoint"
    return f"two attempts in a row reached the time limit without {newest}"


def _trailing_retries(earlier: Sequence[Event], step: int | None) -> list[Event]:
    """Return the newest consecutive retries that started from this checkpoint, as the next one would."""
    found: list[Event] = []
    for event in reversed(earlier):
        if event.checkpoint != step:
            break
        found.insert(0, event)
    return found


def _unrecorded(code: int) -> Failure:
    """Return the failure of an attempt whose own process died before it could record one."""
    if code < 0:
        return Failure(message=f"the supervisor was killed by {signal.Signals(-code).name}")
    return Failure()
