"""How each attempt of a run except the newest ended, and what restarted the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.executors.selection import is_queued
from mgpu_slurm.run_folder import failures, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event, RunState
from mgpu_slurm.slurm import accounting, job_identity, site
from mgpu_slurm.slurm.accounting import AccountedStart

FEW_JOBS = 20
"""Number of restarted jobs up to which accounting is asked for whom each was preempted."""

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


@dataclass(frozen=True)
class _Span:
    """From the start of an attempt to that of the next one."""

    start: Event
    between: Sequence[Event]
    after: Event | None
    """The next start; None if the run waits for it."""

    @property
    def was_requeued(self) -> bool:
        """Whether SLURM has restarted the same job, or will, without a request."""
        is_same = self.after is None or (
            self.start.job_id == self.after.job_id and self.after.restarts > self.start.restarts
        )
        return is_same and not any(event.event in ("resumed", "retried", "requeued") for event in self.between)


def before(folder: RunFolder, waits: bool = False, accounted: AccountedRestarts | None = None) -> list[Before]:
    """Return the earlier attempts, oldest first.

    Args:
        waits: whether the run waits to restart, so that the newest attempt is an earlier one, too.
        accounted: what accounting says of this run, among others; None to ask for it.
    """
    spans = _spans(folder, waits)
    requeued = [each.start for each in spans if each.was_requeued]
    if accounted is None:
        accounted = _ask({folder: _jobs_here(records.read_state(folder), requeued)})
    by_slurm = _by_slurm(requeued, accounted.of(folder), accounted.are_few)
    found = [
        Before(each.start.attempt, *(by_slurm.get(each.start.attempt) or _told(each.start.attempt, each.between)))
        for each in spans
    ]
    return [*found[:-1], replace(found[-1], then="waiting to restart")] if waits and found else found


def _spans(folder: RunFolder, waits: bool) -> list[_Span]:
    events = records.events(folder)
    starts = {event.attempt: index for index, event in enumerate(events) if event.event == "started"}
    places = [*starts.values(), *([len(events)] if waits and starts else [])]
    after: list[Event | None] = [*events, None]
    return [_Span(events[start], events[start + 1 : end], after[end]) for start, end in itertools.pairwise(places)]


@dataclass(frozen=True)
class AccountedRestarts:
    """Accounting's records of the jobs that SLURM itself has restarted, of one or several runs."""

    starts: Mapping[str, Sequence[AccountedStart]]
    """By job."""
    jobs: Mapping[RunFolder, Sequence[str]]

    @property
    def are_few(self) -> bool:
        """Whether accounting can be asked about each of them again."""
        return len(self.starts) <= FEW_JOBS

    def of(self, folder: RunFolder) -> list[AccountedStart]:
        """Return the records of a run's jobs."""
        found = [start for job_id in self.jobs.get(folder, ()) for start in self.starts.get(job_id, ())]
        return [each for each in found if job_identity.belongs_to(folder, each)]


def accounted_restarts(folders: Iterable[RunFolder]) -> AccountedRestarts:
    """Ask accounting, once, about the jobs of these runs that SLURM itself has restarted."""
    jobs = {}
    for folder in folders:
        # a run that cannot be read is named by who reads all of it
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            if started := [each.start for each in _spans(folder, waits=False) if each.was_requeued]:
                jobs[folder] = _jobs_here(records.read_state(folder), started)
    return _ask(jobs)


def _ask(jobs: Mapping[RunFolder, Sequence[str]]) -> AccountedRestarts:
    """Ask accounting, once, about these jobs of runs."""
    found: dict[str, list[AccountedStart]] = {}
    ids = list(dict.fromkeys(job_id for own in jobs.values() for job_id in own))
    for each in (accounting.accounted(ids) or []) if ids else []:
        found.setdefault(each.job_id, []).append(each)
    return AccountedRestarts(found, jobs)


def _by_slurm(
    started: Sequence[Event], accounted: Sequence[AccountedStart], names_preemptors: bool
) -> dict[int, tuple[str, str]]:
    """Return the known ends of these attempts from accounting, which has a line for each start of a job."""
    found = {}
    for event in started:
        starts = [each for each in accounted if each.job_id == event.job_id]
        number = event.restarts
        state = starts[number].state if number < len(starts) else None
        cause = failures.cause_of_state(state) if state is not None else None
        if state == states.REQUEUED:
            found[event.attempt] = ("it was requeued with scontrol", "restarted")
        elif cause is not None:
            is_preempted = names_preemptors and cause is failures.PREEMPTED
            preemptors = preemptors_of(event, starts[number]) if is_preempted else ""
            found[event.attempt] = (cause.words + (f" ({preemptors})" if preemptors else ""), "SLURM restarted it")
    return found


def said_of(folder: RunFolder, attempt: int | None = None) -> str:
    """Return the recorded message on an attempt's end; empty if there is none.

    Args:
        attempt: None for the newest one whose end was recorded.
    """
    ends = [event for event in records.events(folder) if event.event == "ended" and attempt in (None, event.attempt)]
    return first_line(ends[-1].message or "") if ends else ""


def last_preemptors(folder: RunFolder, state: RunState) -> str:
    """Return `preemptors_of` of a preempted run's newest attempt."""
    started = [event for event in records.events(folder) if event.event == "started"][-1:]
    accounted = _ask({folder: _jobs_here(state, started)}).of(folder)
    return preemptors_of(started[0], accounted[-1]) if accounted else ""


def _jobs_here(state: RunState, started: Sequence[Event]) -> list[str]:
    """Return the ids of the jobs of these attempts, if this cluster has them."""
    # on another cluster the ids belong to other jobs, or to none
    if not started or not is_queued(state) or state.slurm_cluster not in (None, site.cluster_name()):
        return []
    return list(dict.fromkeys(event.job_id for event in started if event.job_id is not None))


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
