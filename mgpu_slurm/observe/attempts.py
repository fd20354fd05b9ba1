"""What ended each attempt of a run but the newest, and who started the run again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mgpu_slurm import causes, records, slurm
from mgpu_slurm.observe.times import time_of
from mgpu_slurm.paths import RunFolder

Event = dict[str, Any]

CLOCKS = timedelta(seconds=5)
"""By which a node's clock may be off the controller's."""


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
    untold = []
    found: dict[int, Before] = {}
    for start, following in itertools.pairwise(starts):
        attempt = events[start]["attempt"]
        told = _told(events[start + 1 : following])
        if told is None:
            untold.append(events[start])
        else:
            found[attempt] = Before(attempt, *told)
    found |= {each.attempt: each for each in _by_slurm(untold)}
    return [found[attempt] for attempt in sorted(found)]


def _told(events: Sequence[Event]) -> tuple[str, str] | None:
    """By what the run itself has written down between two starts; None where it has not."""
    named = {event["event"]: event for event in events}
    if "resumed" in named:
        state, reason = named["resumed"]["state"], named["resumed"]["reason"]
        return (f"{state}: {reason}" if reason else state), "it was resumed"
    if "retried" in named:
        return named["retried"]["why"], "it started again"
    if "requeued" in named:
        return "it asked to be started again, as it does before its time limit", "it started again"
    return None


def _by_slurm(started: Sequence[Event]) -> list[Before]:
    """Of attempts after which SLURM has put the run back into the queue."""
    jobs = slurm.whole_jobs(event["job_id"] for event in started)
    accounted = slurm.accounted(jobs) if jobs else None
    return [
        Before(event["attempt"], _by_accounting(event, accounted or []), "SLURM started it again") for event in started
    ]


def _by_accounting(started: Event, accounted: Sequence[slurm.AccountedStart]) -> str:
    at = time_of(started["time"])
    assert at is not None
    # as SLURM prints its times
    began = at.astimezone().replace(tzinfo=None)
    own = [each for each in accounted if each.job_id == started["job_id"] and _is_in(each, began)]
    cause = causes.cause_of_state(own[-1].state) if own else None
    return cause.words if cause is not None else "its end was not recorded"


def _is_in(start: slurm.AccountedStart, at: datetime) -> bool:
    begun, ended = time_of(start.start), time_of(start.end)
    return begun is not None and begun - CLOCKS <= at and (ended is None or at <= ended + CLOCKS)
