"""A run's live state and its history on disk: `state.json` and `attempts.jsonl`.

`state.json` has one writer at a time: the submission, then the batch step or local supervisor, then rank 0 while the
ranks live, then the batch step or supervisor again. Whoever finds that all of them are gone may write the end. A run of
a group gets one when it starts; before that, its group's state applies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from mgpu_slurm.core import retry
from mgpu_slurm.core.files import append_jsonl, end_of, read_json, read_jsonl, write_json
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.core.hostlist import expand
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event, Failure, MemoryRecord, RunState

INHERITED = ("executor", "slurm_cluster", "nodes", "ranks", "submitted", "supervisor", "host")
"""The values that a run of a group inherits from the group."""

SUBMISSION_TAKES = timedelta(minutes=2)
"""How long sbatch may take to answer before other processes check whether the job exists."""

SUBMISSION_ENDS = timedelta(minutes=10)
"""Age at which a submission is over; one that waits for a controller that does not answer stops long before."""


def now() -> str:
    """Return the local time with its zone, to the millisecond, in ISO 8601."""
    return datetime.now(timezone.utc).astimezone().isoformat(timespec="milliseconds")


def read_state(folder: RunFolder, group: RunState | None = None) -> RunState:
    """Return the full state; one that cannot be read is UNKNOWN, which counts as alive.

    Args:
        group: the state of the run's group, if the caller has it.
    """
    try:
        recorded = read_json(folder.state)
    except ValueError:
        return RunState(run=folder.run, state="UNKNOWN", reason=f"{folder.state.name} cannot be read")
    return RunState.from_json({"run": folder.run} | recorded) if recorded else _first_state(folder, group)


def read_states(folder: RunFolder, without: Container[RunFolder] = ()) -> list[tuple[RunFolder, RunState]]:
    """Return the state of a run, or of each run of a group in order; lists the folder once to see which have one."""
    state = read_state(folder)
    if state.tasks is None:
        return [(folder, state)]
    begun = set(os.listdir(folder.tasks)) if folder.tasks.exists() else set()
    found = []
    for task in range(state.tasks):
        member = folder.of_task(task)
        if member not in without:
            has_own = str(task) in begun
            found.append((member, read_state(member, state) if has_own else _first_state(member, state)))
    return found


def _first_state(folder: RunFolder, group: RunState | None) -> RunState:
    """Return the state of a run that has none yet; for a run of a group, as far as the group's state provides it."""
    if folder.task is None:
        return RunState(run=folder.run)
    known = read_state(folder.group) if group is None else group
    inherited = {name: getattr(known, name) for name in INHERITED}
    return RunState(run=folder.run, kind="worker" if known.kind == "sweep" else "run", **inherited)


def update_state(folder: RunFolder, *, sync: bool = True, **changes: Any) -> RunState:
    """Write the state with these changes and return it.

    Raises:
        OSError: it cannot be written.
    """
    state = replace(read_state(folder), **changes)
    write_json(folder.state, state.to_json(), sync)
    return state


def update_state_if(folder: RunFolder, is_wanted: Callable[[], bool], **changes: Any) -> None:
    """Update the state of a run that may start again at any moment: `is_wanted` is called right before it is replaced.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder.state, replace(read_state(folder), **changes).to_json(), is_wanted=is_wanted)


def settle_state(folder: RunFolder, **changes: Any) -> None:
    """Update the state in a job, waiting for a full disk: nobody would write these values again."""
    retry.for_the_disk(lambda: update_state(folder, **changes), folder.state)


def cancel_unstarted(folder: RunFolder, reason: str) -> None:
    """End a run that was waiting, in the queue or for other runs, and never starts."""
    folder.create_task()
    update_state(folder, state=states.CANCELLED, reason=reason, ended=now())


def record_event(folder: RunFolder, event: str, **facts: Any) -> None:
    """Append `submitting`, `submitted`, `refused`, `started`, `ended`, `requeued`, `retried` or `resumed` to the run's
    history."""
    append_jsonl(folder.attempts, {"event": event, "time": now(), **facts})


def settle_event(folder: RunFolder, event: str, **facts: Any) -> None:
    """Record an event in a job, waiting for a full disk."""
    record = {"time": now(), **facts}
    retry.for_the_disk(lambda: record_event(folder, event, **record), folder.attempts)


def events(folder: RunFolder) -> list[Event]:
    return [Event.from_json(line) for line in read_jsonl(folder.attempts)]


def read_failure(folder: RunFolder) -> Failure | None:
    """Return why the newest attempt failed; None if it did not, or if that is unknown."""
    found = read_json(folder.failure)
    return Failure.from_json(found) if found else None


def read_memory(folder: RunFolder) -> MemoryRecord | None:
    """Return how many samples fit into memory at once; None if all of each batch do."""
    found = read_json(folder.memory)
    return MemoryRecord.from_json(found) if found else None


@dataclass(frozen=True)
class Submission:
    """One call of sbatch for a run, or for some runs of a group."""

    token: str
    begun: datetime
    confirmed: datetime | None
    """When the answer was recorded."""
    job_id: str | None
    """None if no answer was recorded."""
    first: int
    """The index in the group of task 0 of the array."""
    tasks: frozenset[int] | None
    """The indices in the group of the array's tasks; None for a single run."""
    refused: bool
    """Whether SLURM is known not to have it."""

    def job_of(self, task: int | None, job_id: str | None = None) -> str | None:
        """Return the id of a run's job, as scancel takes it.

        Args:
            job_id: the id of the whole job, if it was found later.
        """
        whole = job_id or self.job_id
        return whole if whole is None or task is None else f"{whole}_{task - self.first}"

    @property
    def is_unconfirmed(self) -> bool:
        """Return whether it was begun a while ago and SLURM's answer was not recorded."""
        return self.job_id is None and not self.refused and self._age > SUBMISSION_TAKES

    @property
    def is_over(self) -> bool:
        """Return whether it is too old for anybody to be still trying."""
        return self._age > SUBMISSION_ENDS

    @property
    def _age(self) -> timedelta:
        return datetime.now(timezone.utc) - self.begun


def submissions(folder: RunFolder) -> list[Submission]:
    """Return all submissions recorded with a run or group, oldest first; a group's are recorded with the group."""
    history = events(folder)
    answers = {event.token: event for event in history if event.event == "submitted"}
    refused = {event.token for event in history if event.event == "refused"}
    return [
        Submission(
            token=event.token,
            begun=datetime.fromisoformat(event.time),
            confirmed=datetime.fromisoformat(answers[event.token].time) if event.token in answers else None,
            job_id=answers[event.token].job_id if event.token in answers else None,
            first=event.first,
            tasks=None if event.tasks is None else frozenset(map(int, expand(f"[{event.tasks}]"))),
            refused=event.token in refused,
        )
        for event in history
        if event.event == "submitting"
    ]


def submissions_of(run: RunFolder) -> list[Submission]:
    """Return the submissions of one run, oldest first: its own, and those of its group that include it."""
    found = submissions(run)
    if run.task is not None:
        found += [each for each in submissions(run.group) if each.tasks is not None and run.task in each.tasks]
        found.sort(key=lambda submission: submission.begun)
    return found


def spans(folder: RunFolder) -> list[tuple[datetime, datetime | None]]:
    """Return when each attempt began and ended, with None for the end of one that continues."""
    found: list[tuple[datetime, datetime | None]] = []
    for event in events(folder):
        time = datetime.fromisoformat(event.time)
        if event.event == "started":
            if found and found[-1][1] is None:
                # its end was not recorded, but it is over by then
                found[-1] = (found[-1][0], time)
            found.append((time, None))
        elif event.event == "ended" and found:
            found[-1] = (found[-1][0], time)
    if found and found[-1][1] is None and (ended := read_state(folder).ended):
        # the end was not recorded in the history
        found[-1] = (found[-1][0], datetime.fromisoformat(ended))
    return found


def last_sign_of_life(folder: RunFolder) -> str:
    """Return when a run whose end was not recorded last wrote its state or a log; now, if it never started."""
    if not attempts_started(folder):
        return now()
    files = [folder.state, *folder.logs.glob("*")]
    last = max(path.stat().st_mtime for path in files if path.exists())
    return datetime.fromtimestamp(last, timezone.utc).astimezone().isoformat(timespec="seconds")


def note_unseen_end(folder: RunFolder, write: Callable[..., None] = record_event) -> None:
    """Record the end of an attempt if nobody has, before the run restarts.

    Args:
        write: `settle_event` in a job.
    """
    last = [event for event in events(folder) if event.event in ("started", "ended")][-1:]
    if last and last[0].event == "started":
        # SLURM restarts a run whose node was lost before anybody has recorded its end
        ended = read_state(folder).ended or last_sign_of_life(folder)
        write(folder, "ended", attempt=last[0].attempt, time=ended)


def hours(folder: RunFolder) -> float:
    """Return the hours for which all attempts together have held their nodes."""
    now = datetime.now(timezone.utc)
    return sum(((ended or now) - begun).total_seconds() for begun, ended in spans(folder)) / 3600


def attempts_started(folder: RunFolder) -> int:
    # not their count: a network file system may have kept a record that it reported lost, and that was written again
    return max((event.attempt for event in events(folder) if event.event == "started"), default=0)


def failure_line(folder: RunFolder) -> str:
    """Return the first cause of a failed run in one line, for `status`."""
    return line_of(read_failure(folder) or Failure())


def said_last(folder: RunFolder, failure: Failure) -> str:
    """Return the end of the log of the rank that failed first; empty if that is not known."""
    rank = failure.who.removeprefix("rank ")
    return end_of(folder.rank_log(failure.attempt, int(rank))) if rank.isdigit() else ""


def line_of(failure: Failure) -> str:
    """Return a failure in one line."""
    message = first_line(failure.message)
    if failure.error is None:
        return message or "failed before any rank reported an error; see the launch log"
    return f"rank {failure.rank} on {failure.node}: {failure.error}: {message}"
