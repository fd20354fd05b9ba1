"""What ended each attempt of a run but the newest, and who started the run again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_slurm import causes, records, slurm
from mgpu_slurm.paths import RunFolder

Event = dict[str, Any]


@dataclass(frozen=True)
class Before:
    """One attempt that another one followed."""

    attempt: int
    ended: str
    """Of what, in words."""
    then: str
    """Who started the run again."""


def before(folder: RunFolder) -> list[Before]:
    """The oldest first. Of what SLURM did by itself its accounting is asked."""
    events = records.events(folder)
    starts = [index for index, event in enumerate(events) if event["event"] == "started"]
    told = {events[start]["attempt"]: _told(events[start + 1 : end]) for start, end in itertools.pairwise(starts)}
    untold = [events[start] for start in starts[:-1] if told[events[start]["attempt"]] is None]
    by_others = _by_others(folder, untold)
    return [Before(attempt, *(known or by_others[attempt])) for attempt, known in told.items()]


def _told(events: Sequence[Event]) -> tuple[str, str] | None:
    """By what the run itself has written down between two starts; None where it has not."""
    named = {event["event"]: event for event in events}
    if "resumed" in named:
        state, reason = named["resumed"]["state"], named["resumed"]["reason"]
        return (f"{state}: {reason}" if reason else state), "it was resumed"
    if "retried" in named:
        return named["retried"]["why"], "it started again"
    if "requeued" in named:
        said = named.get("ended", {}).get("message")
        return said or "it asked to be started again, as it does before its time limit", "it started again"
    return None


def _by_others(folder: RunFolder, started: Sequence[Event]) -> dict[int, tuple[str, str]]:
    """Of attempts after which others have started the run again: SLURM, or who has ranks go on in their place."""
    ends = {event["attempt"]: event.get("message") for event in records.events(folder) if event["event"] == "ended"}
    # elsewhere the ids are of other jobs, or of none
    is_slurms = bool(started) and records.read_state(folder)["executor"] == "slurm"
    accounted = slurm.accounted(slurm.whole_jobs(event["job_id"] for event in started)) if is_slurms else None
    found = {}
    for event in started:
        cause = _cause(event, accounted or [])
        said = ends.get(event["attempt"]) or "its end was not recorded"
        found[event["attempt"]] = (
            (said, "it started again") if cause is None else (cause.words, "SLURM started it again")
        )
    return found


def _cause(started: Event, accounted: Sequence[slurm.AccountedStart]) -> causes.Cause | None:
    """By accounting, which has a line for each start of a job."""
    starts = [each for each in accounted if each.job_id == started["job_id"]]
    number = started.get("restarts", 0)
    return causes.cause_of_state(starts[number].state) if number < len(starts) else None
