"""How each attempt of a run except the newest ended, and what restarted the run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.executors.selection import is_queued
from mgpu_slurm.run_folder import failures, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event, RunState
from mgpu_slurm.slurm import accounting, job_identity, site
from mgpu_slurm.slurm.accounting import AccountedStart

MOST_PREEMPTORS = 3
"""Maximum number of preempting jobs that are named."""


@dataclass(frozen=True)
class Before:
    """An attempt that was followed by another one."""

    attempt: int
    ended: str
    """Why it ended, in words."""
    then: str
    """What restarted the run, in words."""


def before(folder: RunFolder, waits: bool = False, asks: bool = True) -> list[Before]:
    """Return the earlier attempts, oldest first.

    Args:
        asks: whether accounting is asked about restarts by SLURM itself.
        waits: whether the run waits to restart, so that the newest attempt is an earlier one, too.
    """
    events = records.events(folder)
    starts = {event.attempt: index for index, event in enumerate(events) if event.event == "started"}
    places = [*starts.values(), *([len(events)] if waits and starts else [])]
    after: list[Event | None] = [*events, None]
    spans = [(events[start], events[start + 1 : end], after[end]) for start, end in itertools.pairwise(places)]
    requeued = [start for start, between, after in spans if asks and _was_requeued(start, between, after)]
    by_slurm = _by_slurm(folder, requeued)
    found = [
        Before(start.attempt, *(by_slurm.get(start.attempt) or _told(start.attempt, between)))
        for start, between, _ in spans
    ]
    return [*found[:-1], replace(found[-1], then="waiting to restart")] if waits and found else found


def _was_requeued(start: Event, between: Sequence[Event], after: Event | None) -> bool:
    """Return whether SLURM has restarted the same job, or will, without a request."""
    is_same = after is None or (start.job_id == after.job_id and after.restarts > start.restarts)
    return is_same and not any(event.event in ("resumed", "retried", "requeued") for event in between)


def _by_slurm(folder: RunFolder, started: Sequence[Event]) -> dict[int, tuple[str, str]]:
    """Return the known ends of these attempts from accounting, which has a line for each start of a job."""
    accounted = _accounted(folder, records.read_state(folder), started)
    found = {}
    for event in started:
        starts = [each for each in accounted if each.job_id == event.job_id]
        number = event.restarts
        state = starts[number].state if number < len(starts) else None
        cause = failures.cause_of_state(state) if state is not None else None
        if state == states.REQUEUED:
            found[event.attempt] = ("it was requeued with scontrol", "restarted")
        elif cause is not None:
            preemptors = preemptors_of(event, starts[number]) if cause is failures.PREEMPTED else ""
            found[event.attempt] = (cause.words + (f" ({preemptors})" if preemptors else ""), "SLURM restarted it")
    return found


def last_said(folder: RunFolder) -> str:
    """Return the recorded message on the newest attempt's end; empty if there is none."""
    ends = [event for event in records.events(folder) if event.event == "ended"]
    return first_line(ends[-1].message or "") if ends else ""


def said_of(folder: RunFolder, attempt: int) -> str:
    """Return the recorded message on an attempt's end; empty if there is none."""
    ends = [event for event in records.events(folder) if event.event == "ended" and event.attempt == attempt]
    return first_line(ends[-1].message or "") if ends else ""


def last_preemptors(folder: RunFolder, state: RunState) -> str:
    """Return `preemptors_of` of a preempted run's newest attempt."""
    started = [event for event in records.events(folder) if event.event == "started"][-1:]
    accounted = _accounted(folder, state, started)
    return preemptors_of(started[0], accounted[-1]) if accounted else ""


def _accounted(folder: RunFolder, state: RunState, started: Sequence[Event]) -> list[AccountedStart]:
    """Return accounting's records of the jobs of these attempts."""
    # on another cluster the ids belong to other jobs, or to none
    if not started or not is_queued(state) or state.slurm_cluster not in (None, site.cluster_name()):
        return []
    job_ids = dict.fromkeys(event.job_id for event in started if event.job_id is not None)
    found = accounting.accounted(list(job_ids)) or []
    return [each for each in found if job_identity.belongs_to(folder, each)]


def preemptors_of(started: Event, accounted: AccountedStart) -> str:
    """Return which jobs got the nodes of a preempted attempt.

    SLURM does not report for whom it preempted a job, only which jobs started on the nodes next.

    Args:
        started: the attempt's event.
        accounted: accounting's record of it.
    """
    if accounted.end is None:
        return ""
    preemptors = [each for each in accounting.began_on(started.nodes, accounted.end) if each.job_id != started.job_id]
    return ", ".join(
        f"job {each.job_id} of {each.user} in partition {each.partition}" for each in preemptors[:MOST_PREEMPTORS]
    )


def _told(attempt: int, between: Sequence[Event]) -> tuple[str, str]:
    """Return an attempt's end from the run's own events between two starts, the first of which is on the end."""
    ended = next((event for event in between if event.event == "ended" and event.attempt == attempt), Event())
    said = first_line(ended.message or "")
    for event in between:
        if event.event == "resumed":
            # that a cancelled run was cancelled says less than at which step it stopped
            reason = event.reason if event.reason.upper() != event.state else said
            return ": ".join(filter(None, [event.state, reason])), "resumed"
        if event.event == "retried":
            return event.why, "restarted"
        if event.event == "requeued":
            return said or "it stopped before its time limit to be requeued", "restarted"
    return said or "its end was not recorded", "restarted"
