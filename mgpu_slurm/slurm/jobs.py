"""Query jobs from SLURM's controller: squeue for many, `scontrol show job` for one that squeue omits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.hostlist import MAX_HOSTS
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.run_folder import states
from mgpu_slurm.slurm import commands

# the reason is last, since it may contain a bar
_FIELDS = ("JobArrayID", "State", "SubmitTime", "RestartCnt", "StartTime", "EndTime", "Name", "Reason")
_SHOWN = ("JobState", "SubmitTime", "Restarts", "StartTime", "EndTime", "JobName", "Reason")
"""The same fields in `scontrol show job`, after the id."""

_ID = re.compile(
    r"(?P<job>\d{1,18})"
    r"(?:\+\d+)?"  # a component of a heterogeneous job
    r"(?:_(?:(?P<task>\d{1,18})|\*|\[(?P<tasks>[^\[\]\s]*)\]))?"
    r"(?:%A?\d+)?",  # the limit on an array's simultaneous tasks, which may also be inside the brackets
    re.ASCII,
)
_LIMIT = re.compile(r"%A?\d+$")
_TASKS = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18})(?::(?P<step>\d{1,18}))?)?", re.ASCII)

_told: set[str] = set()
"""Unreadable lines that this process has reported, with all numbers replaced by 0."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, or one task of an array, that the controller still knows."""

    job_id: str
    """`42`, or `42_3` for a task of an array, as scancel takes it."""
    state: str
    """One of `states`."""
    reason: str
    """Why it waits or has ended; else SLURM's own word for its state if that is more specific."""
    start: str | None
    """Start, or expected start of a pending job; local time without a zone, as SLURM prints it."""
    end: str | None
    """End, or latest possible end of a job that has not ended."""
    name: str = ""
    submit: str | None = None
    """Time at which it was submitted, or last requeued."""
    restarts: int = 0


def ids_in(text: str) -> list[str]:
    """Return the jobs that an id of SLURM's stands for: `42_3` and `42_4` for `42_[3-4%2]`; none for other text."""
    found = _ID.fullmatch(text.strip())
    if found is None:
        return []
    if found["task"] is not None:
        return [f"{found['job']}_{found['task']}"]
    if found["tasks"] is None:
        return [found["job"]]
    return [f"{found['job']}_{task}" for task in _tasks(found["tasks"])]


def _tasks(text: str) -> list[int]:
    """Return the numbers in `3-4,8-16:4%2`; SLURM may truncate a long list, which then ends with dots."""
    numbers: list[int] = []
    for part in _LIMIT.sub("", text).split(","):
        found = _TASKS.fullmatch(part)
        if found is not None:
            first = int(found["first"])
            last = min(int(found["last"] or first), first + MAX_HOSTS)
            numbers += range(first, last + 1, int(found["step"] or 1) or 1)
        if len(numbers) > MAX_HOSTS:
            break
    return numbers


def squeue_command(job_ids: Sequence[str]) -> list[str]:
    """Return the command that lists many jobs, arrays by task, including jobs that ended a few minutes ago."""
    assert job_ids
    # a size of 0 (nothing before the suffix) prints the field untruncated
    fields = ",".join(f"{field}:|" for field in _FIELDS)
    return ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", "-O", fields]


def parse_squeue(output: str) -> list[QueuedJob]:
    """Return all jobs, skipping a site's banners."""
    return [job for line in output.splitlines() for job in _jobs_in(line)]


def _jobs_in(line: str) -> list[QueuedJob]:
    row = line.split("|", len(_FIELDS) - 1)
    return _queued_jobs(*row) if len(row) == len(_FIELDS) else []


def unread_lines(output: str) -> list[str]:
    """Return the lines that look like a job but cannot be parsed, unlike a site's banners."""
    rows = [line for line in output.splitlines() if re.match(r"\s*\d[^|\s]*\s*\|", line)]
    return [line for line in rows if not _jobs_in(line)]


def _queued_jobs(
    job_ids: str, word: str, submit: str, restarts: str, start: str, end: str, name: str, reason: str
) -> list[QueuedJob]:
    state = states.from_slurm(word)
    why = commands.value_of(reason.removesuffix("|")) or (word.strip() if word.strip() != state else "")
    facts = QueuedJob(
        job_id="",
        state=state,
        reason=why,
        start=commands.time_of(start),
        end=commands.time_of(end),
        name=name.strip(),
        submit=commands.time_of(submit),
        restarts=commands.number_of(restarts) or 0,
    )
    return [replace(facts, job_id=job_id) for job_id in ids_in(job_ids)]


def queued(job_ids: Sequence[str], note: Note = quiet) -> dict[str, QueuedJob] | None:
    """Return those of these jobs that squeue lists, by id; None if the controller does not answer.

    A job that is not listed may still exist: see `shown`.

    Args:
        note: is called, once for each form, with lines that look like a job and cannot be parsed.
    """
    try:
        output = commands.run(squeue_command(job_ids), commands.SQUEUE_TAKES)
    except commands.JobNotFound:
        # squeue fails this way if a single job is requested; of several it omits unknown ones
        return {}
    except ClusterError:
        return None
    for line in unread_lines(output):
        form = re.sub(r"\d+", "0", line)
        if form not in _told and note is not quiet:
            _told.add(form)
            note(f"cannot parse a line of squeue: {line.strip()[:200]!r}")
    return {job.job_id: job for job in parse_squeue(output)}


def show_command(job_id: str) -> list[str]:
    """Return the command that shows a job, or all existing tasks of an array."""
    return ["scontrol", "show", "job", "--oneliner", job_id]


def parse_shown(output: str) -> list[QueuedJob]:
    found = []
    for line in output.splitlines():
        values = commands.pairs_in(line)
        if "ArrayTaskId" in values:
            job_id = f"{values.get('ArrayJobId', '')}_[{values['ArrayTaskId']}]"
        else:
            job_id = values.get("JobId", "")
        found += _queued_jobs(job_id, *(values.get(name, "") for name in _SHOWN))
    return found


def shown(job_id: str) -> list[QueuedJob] | None:
    """Return the controller's entries for a job or array; empty if it reports that it does not know the job.

    None if it does not answer, or answers something else: then nothing is known.

    Args:
        job_id: of a whole job or array.
    """
    try:
        return parse_shown(commands.run(show_command(job_id), commands.SQUEUE_TAKES)) or None
    except commands.JobNotFound:
        return []
    except ClusterError:
        return None


@dataclass(frozen=True)
class RunningJob:
    """A running job of a user, as far as limits count it."""

    job_id: str
    qos: str
    account: str
    left: str
    """Time left, as SLURM prints it."""
    name: str

    @property
    def words(self) -> str:
        return f"{self.name} (job {self.job_id}, {self.left} left)"


def running_command(user: str) -> list[str]:
    """Return the command that lists the running jobs of a user."""
    fields = ",".join(f"{field}:|" for field in ("JobArrayID", "QOS", "Account", "TimeLeft", "Name"))
    return ["squeue", "--noheader", "--states=RUNNING", f"--user={user}", "-O", fields]


def parse_running(output: str) -> list[RunningJob]:
    """Return the jobs, skipping a site's banners."""
    rows = [line.split("|", 4) for line in output.splitlines()]
    return [
        RunningJob(job_id, qos, account, left, name.removesuffix("|"))
        for job_id, qos, account, left, name in (row for row in rows if len(row) == 5)
        if ids_in(job_id)
    ]


def place_command(job_id: str) -> list[str]:
    return ["squeue", "--noheader", "--states=RUNNING", f"--jobs={job_id}", "-o", "%A|%N"]


def parse_place(output: str) -> tuple[str, list[str]] | None:
    """Return a running job's own id, even if it is a task of an array, and its nodes; None if no job is running."""
    for line in output.splitlines():
        job_id, bar, nodes = line.strip().partition("|")
        if bar and commands.number_of(job_id) is not None and nodes:
            return job_id, commands.nodes_in(nodes)
    return None


def place_of(job_id: str) -> tuple[str, list[str]]:
    """Return a running job's own id and nodes; see `parse_place`.

    srun accepts the id of a task, `42_3`, only since 23.02.

    Raises:
        ClusterError: the job is not running, or the controller does not answer.
    """
    place = parse_place(commands.run(place_command(job_id), commands.SQUEUE_TAKES))
    if place is None:
        raise ClusterError(f"job {job_id} is not running according to SLURM: try again in a moment")
    return place
