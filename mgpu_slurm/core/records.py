"""A run's live state and its history on disk: `state.json` and `attempts.jsonl`.

`state.json` has one writer at a time: the submission, then the batch step or local supervisor, then rank 0 while the
ranks live, then the batch step or supervisor again. A run of a group has one once it has started; before that it
stands as its group does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from mgpu_slurm.core import retry, states
from mgpu_slurm.core.files import append_jsonl, end_of, read_json, read_jsonl, write_json
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.core.hostlist import expand
from mgpu_slurm.core.layout import RunFolder

FIRST_STATE: dict[str, Any] = {
    "run": "",
    "kind": "run",
    "state": "PENDING",
    "job_id": None,
    "attempts": 0,
    "nodes": 1,
    "ranks": 1,
    "step": 0,
    "progress": 0,
    "metrics": {},
    "submitted": None,
    "started": None,
    "ended": None,
    "reason": "",
    "executor": "",
    "slurm_cluster": None,
    "tasks": None,
}
"""Every name of a state, as it stands before anything has happened; `tasks` is how many runs a group has, and
`slurm_cluster` the name of the cluster whose SLURM has its job, where that is known."""


INHERITED = ("executor", "slurm_cluster", "nodes", "ranks", "submitted", "supervisor", "host")
"""What a run of a group has from the group."""

SUBMISSION_TAKES = timedelta(minutes=2)
"""How long sbatch may take to answer before somebody else looks whether the job is there."""

SUBMISSION_ENDS = timedelta(minutes=10)
"""A submission waits out a controller that does not answer, and has given up long before that."""


def now() -> str:
    """Local time with its zone, to the millisecond, in ISO 8601."""
    return datetime.now(timezone.utc).astimezone().isoformat(timespec="milliseconds")


def read_state(folder: RunFolder, group: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state, whole; one that cannot be read is UNKNOWN, which counts as alive.

    Args:
        group: the state of the run's group, where the caller has it.
    """
    try:
        state = read_json(folder.state) or _first_state(folder, group)
    except ValueError:
        state = {"state": "UNKNOWN", "reason": f"{folder.state.name} cannot be read"}
    return _whole(folder, state)


def read_states(folder: RunFolder, without: Container[RunFolder] = ()) -> list[tuple[RunFolder, dict[str, Any]]]:
    """The state of a run, or of each run of a group in their order; one look at the folder tells which have any."""
    state = read_state(folder)
    if state["tasks"] is None:
        return [(folder, state)]
    begun = set(os.listdir(folder.tasks)) if folder.tasks.exists() else set()
    found = []
    for task in range(state["tasks"]):
        member = folder.of_task(task)
        if member not in without:
            own = read_state(member, state) if str(task) in begun else _whole(member, _first_state(member, state))
            found.append((member, own))
    return found


def _whole(folder: RunFolder, state: dict[str, Any]) -> dict[str, Any]:
    return FIRST_STATE | {"run": folder.run} | state


def _first_state(folder: RunFolder, group: dict[str, Any] | None) -> dict[str, Any]:
    """Of a run of a group that has not started: as much as the group knows."""
    if folder.task is None:
        return {}
    known = read_state(folder.group) if group is None else group
    inherited = {name: known[name] for name in INHERITED if name in known}
    return inherited | ({"kind": "worker"} if known["kind"] == "sweep" else {})


def update_state(folder: RunFolder, *, sync: bool = True, **changes: Any) -> dict[str, Any]:
    """Writes the state with these names changed and returns it.

    Raises:
        OSError: it cannot be written.
    """
    state = read_state(folder) | changes
    write_json(folder.state, state, sync)
    return state


def settle_state(folder: RunFolder, **changes: Any) -> None:
    """Like `update_state`, in a job, of what nobody would write again: a disk that is full is waited for."""
    retry.for_the_disk(lambda: update_state(folder, **changes), folder.state)


def cancel_unstarted(folder: RunFolder, reason: str) -> None:
    """Ends a run that waited, for its turn or for others, and never starts."""
    folder.create_task()
    update_state(folder, state=states.CANCELLED, reason=reason, ended=now())


def record_event(folder: RunFolder, event: str, **facts: Any) -> None:
    """Appends `submitting`, `submitted`, `refused`, `started`, `ended`, `requeued`, `retried`, `resumed`: the run's
    history."""
    append_jsonl(folder.attempts, {"event": event, "time": now(), **facts})


def settle_event(folder: RunFolder, event: str, **facts: Any) -> None:
    """Like `record_event`, in a job: a disk that is full is waited for."""
    record = {"time": now(), **facts}
    retry.for_the_disk(lambda: record_event(folder, event, **record), folder.attempts)


def events(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_jsonl(folder.attempts))


@dataclass(frozen=True)
class Submission:
    """One call of sbatch for a run, or for some runs of a group."""

    token: str
    begun: datetime
    confirmed: datetime | None
    """When its answer was written down."""
    job_id: str | None
    """None where no answer was written down."""
    first: int
    """Of a group's array: the index in the group of the array's task 0."""
    tasks: frozenset[int] | None
    """Of a group's array: the indices in the group; None for a run of its own."""
    refused: bool
    """Whether it is known that SLURM does not have it."""

    def job_of(self, task: int | None, job_id: str | None = None) -> str | None:
        """The id of a run's job, in the form that scancel takes.

        Args:
            job_id: of the whole, where it was found out later.
        """
        whole = job_id or self.job_id
        return whole if whole is None or task is None else f"{whole}_{task - self.first}"

    @property
    def is_unconfirmed(self) -> bool:
        """Whether it was begun a while ago and no answer of SLURM was written down."""
        return self.job_id is None and not self.refused and self._age > SUBMISSION_TAKES

    @property
    def is_over(self) -> bool:
        """Whether nobody can still be trying."""
        return self._age > SUBMISSION_ENDS

    @property
    def _age(self) -> timedelta:
        return datetime.now(timezone.utc) - self.begun


def submissions(folder: RunFolder) -> list[Submission]:
    """All of a run or group, oldest first; those of a group are written down with the group."""
    history = events(folder)
    answers = {event["token"]: event for event in history if event["event"] == "submitted"}
    refused = {event["token"] for event in history if event["event"] == "refused"}
    return [
        Submission(
            token=event["token"],
            begun=datetime.fromisoformat(event["time"]),
            confirmed=datetime.fromisoformat(answers[event["token"]]["time"]) if event["token"] in answers else None,
            job_id=answers.get(event["token"], {}).get("job_id"),
            first=event.get("first", 0),
            tasks=frozenset(map(int, expand(f"[{event['tasks']}]"))) if "tasks" in event else None,
            refused=event["token"] in refused,
        )
        for event in history
        if event["event"] == "submitting"
    ]


def submissions_of(run: RunFolder) -> list[Submission]:
    """Those of one run, oldest first: its own, and those of its group that it was a part of."""
    found = submissions(run)
    if run.task is not None:
        found += [each for each in submissions(run.group) if each.tasks is not None and run.task in each.tasks]
        found.sort(key=lambda submission: submission.begun)
    return found


def spans(folder: RunFolder) -> list[tuple[datetime, datetime | None]]:
    """When each attempt began and ended; None for one that goes on."""
    found: list[tuple[datetime, datetime | None]] = []
    for event in events(folder):
        time = datetime.fromisoformat(event["time"])
        if event["event"] == "started":
            if found and found[-1][1] is None:
                # nobody saw it end, but it had by then
                found[-1] = (found[-1][0], time)
            found.append((time, None))
        elif event["event"] == "ended" and found:
            found[-1] = (found[-1][0], time)
    if found and found[-1][1] is None and (ended := read_state(folder)["ended"]):
        # nobody was there to write it down
        found[-1] = (found[-1][0], datetime.fromisoformat(ended))
    return found


def last_sign_of_life(folder: RunFolder) -> str:
    """When a run that ended unseen has last said anything; now, where it never started."""
    if not attempts_started(folder):
        return now()
    files = [folder.state, *folder.logs.glob("*")]
    last = max(path.stat().st_mtime for path in files if path.exists())
    return datetime.fromtimestamp(last, timezone.utc).isoformat(timespec="seconds")


def note_unseen_end(folder: RunFolder, write: Callable[..., None] = record_event) -> None:
    """Writes down the end of an attempt that nobody was there to write down, before the run starts again.

    Args:
        write: `settle_event` in a job.
    """
    last = [event for event in events(folder) if event["event"] in ("started", "ended")][-1:]
    if last and last[0]["event"] == "started":
        # SLURM starts a run whose node is lost again before anybody has noted that it ended
        ended = read_state(folder)["ended"] or last_sign_of_life(folder)
        write(folder, "ended", attempt=last[0]["attempt"], time=ended)


def hours(folder: RunFolder) -> float:
    """For how long all attempts together have had their nodes."""
    now = datetime.now(timezone.utc)
    return sum(((ended or now) - begun).total_seconds() for begun, ended in spans(folder)) / 3600


def attempts_started(folder: RunFolder) -> int:
    # not how many there are: a network file system may have kept what it called lost, and what was then written again
    return max((event["attempt"] for event in events(folder) if event["event"] == "started"), default=0)


def failure_line(folder: RunFolder) -> str:
    """The first cause of a failed run in one line, for `status`."""
    return line_of(read_json(folder.failure) or {})


def said_last(folder: RunFolder, failure: dict[str, Any]) -> str:
    """The end of the log of the rank that failed first, where that is known."""
    rank = str(failure.get("who", "")).removeprefix("rank ")
    return end_of(folder.rank_log(failure["attempt"], int(rank))) if rank.isdigit() else ""


def line_of(failure: dict[str, Any]) -> str:
    """What a `failure.json` says, in one line."""
    message = first_line(str(failure.get("message", "")))
    if "error" not in failure:
        return message or "failed before any rank reported an error; see the launch log"
    return f"rank {failure['rank']} on {failure['node']}: {failure['error']}: {message}"
