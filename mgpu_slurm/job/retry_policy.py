"""Whether an attempt that has failed is worth another one, and where.

What the cluster did is tried again, and what the program did is not, unless `--retries` says so. Attempts count as long
as they come no further: a run that saves something new between two failures of its cluster may go on for weeks. Nor is
an attempt due after two that the time limit has ended before they came to a new checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.core import checkpoint_names as checkpoints
from mgpu_slurm.core import failures, records, states
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, Spec

LIMIT = 3
"""How often in a row a run starts again by itself that comes no further."""

PAUSES = (0.0, 5.0, 30.0)
"""Seconds before the first, second and each later start of those: what is wrong may pass."""

LOOK_EVERY = 0.2
"""Seconds."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Retry:
    """Another attempt at the same run."""

    why: str
    """What the attempt before failed of, in one line."""
    node: str | None
    """Where, if that is known."""
    checkpoint: int | None
    """The step of the newest checkpoint that has its name; None where there is none."""
    number: int
    """How many in a row it makes that start there."""
    of: int
    avoid: tuple[str, ...]
    """Nodes that had better not be among its own."""
    leaves_job: bool = False
    """Whether nothing can be started any more where the attempt before was."""

    @property
    def pause(self) -> float:
        """Seconds before it."""
        return PAUSES[min(self.number, len(PAUSES)) - 1]

    @property
    def words(self) -> str:
        return f"starts again ({self.number} of {self.of}): {self.why}"

    def write_down(self, folder: RunFolder, **facts: Any) -> Event:
        """Into the run's history and its state; the event."""
        event: Event = {"why": self.why, "node": self.node, "checkpoint": self.checkpoint, "avoid": list(self.avoid)}
        event |= {"pause": self.pause, **facts}
        records.settle_event(folder, "retried", **event)
        records.settle_state(folder, state=states.REQUEUED, reason=self.words)
        return event

    def wait(self) -> Iterator[None]:
        """Yields at first, and now and then during its pause: for who may have been asked meanwhile to stop."""
        yield
        end = time.monotonic() + self.pause
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_EVERY, left))
            yield


def due(folder: RunFolder, spec: Spec, code: int, earlier: Sequence[Event]) -> Retry | None:
    """Another attempt, where the newest one has failed and that makes sense.

    Args:
        code: with which it has ended, of its own accord; negative where a signal ended what ran it.
        earlier: the retries of this submission so far.
    """
    if code in (0, REQUEUE_EXIT_CODE):
        return None
    failure = read_json(folder.failure) or _unrecorded(code)
    cause = failures.cause_of(failure, records.said_last(folder, failure))
    if spec.kind != "run" and not cause.spoils_job:
        # a sweep's workers have their own way: what is lost there is a trial
        return None
    if cause is failures.GPU and not spec.resources.gpus:
        # none was asked for
        cause = failures.PROGRAM
    limit = spec.retries if spec.retries is not None else LIMIT if cause.is_clusters else 0
    newest = checkpoints.newest(folder)
    step = None if newest is None else checkpoints.step_of(newest)
    in_vain = _last_that(earlier, step)
    if len(in_vain) >= limit:
        return None
    node = failures.node_of(failure, cause)
    # what happens twice in a row on one node is that node's
    is_spoilt = cause.spoils_node or any(event["node"] == node for event in in_vain[-1:])
    avoid = [known for event in earlier[-1:] for known in event["avoid"]]
    if node is not None and is_spoilt and node not in avoid:
        avoid.append(node)
    return Retry(records.line_of(failure), node, step, len(in_vain) + 1, limit, tuple(avoid), cause.spoils_job)


def beginning_facts(folder: RunFolder) -> Event:
    """Return what a `started` event tells of where its attempt begins."""
    with suppress(OSError):
        return {"newest": _name_of_newest(folder)}
    return {}


def limit_facts(folder: RunFolder, spec: Spec, is_at_limit: Callable[[], bool]) -> Event:
    """Return what a `requeued` event tells of the newest attempt, which has asked to be started again.

    Args:
        is_at_limit: whether it did so for the time limit, and not for a preemption or of its own accord.

    Returns:
        `newest`, the name of the newest checkpoint; and `in_vain`, whether the attempt came to its time limit without
        one that is newer. None for one that did not come to its limit.
    """
    begins = [event for event in records.events(folder) if event["event"] == "started"][-1:]
    facts = beginning_facts(folder)
    newest = facts.get("newest")
    # a command may save where nobody sees it, and a sweep's worker saves in its trials
    shows_progress = spec.kind == "run" and (newest is not None or not spec.target.is_command)
    # version 0.1 has not written down where an attempt begins
    is_stuck = bool(facts) and all(event.get("newest", "unknown") == newest for event in begins)
    if not (shows_progress and is_stuck):
        return {**facts, "in_vain": False}
    return {**facts, "in_vain": True if is_at_limit() else None}


def _name_of_newest(folder: RunFolder) -> str | None:
    newest = checkpoints.newest(folder)
    return None if newest is None else newest.name


def why_no_requeue(spec: Spec, earlier: Sequence[Event], facts: Event) -> str:
    """Return why a run that asks to be started again is not; empty if it is.

    Args:
        earlier: the `requeued` events of this submission so far.
        facts: see `limit_facts`.
    """
    if len(earlier) >= spec.max_requeues:
        return f"asked to be started again, and all of --max-requeues {spec.max_requeues} are used"
    before = [event for event in earlier if event.get("in_vain") is not None][-1:]
    if not facts["in_vain"] or not any(event["in_vain"] and event["newest"] == facts["newest"] for event in before):
        return ""
    newest = f"a newer checkpoint than {facts['newest']}" if facts["newest"] else "a checkpoint"
    return f"two attempts in a row ended by the time limit without {newest}"


def _last_that(earlier: Sequence[Event], step: int | None) -> list[Event]:
    """The newest of them, as far back as they started where the next one would."""
    found: list[Event] = []
    for event in reversed(earlier):
        if event["checkpoint"] != step:
            break
        found.insert(0, event)
    return found


def _unrecorded(code: int) -> dict[str, Any]:
    """Of an attempt whose own process has died over it."""
    if code < 0:
        return {"message": f"the supervisor was killed by {signal.Signals(-code).name}"}
    return {}
