"""Jobs as SLURM's controller lists them: squeue for many, and `scontrol show job` for one that squeue leaves out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgpu_slurm.core import states
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.hostlist import MAX_HOSTS, expand
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.slurm import commands

# the reason is last, since it may hold a bar
_FIELDS = ("JobArrayID", "State", "SubmitTime", "RestartCnt", "StartTime", "EndTime", "Name", "Reason")
_SHOWN = ("JobState", "SubmitTime", "Restarts", "StartTime", "EndTime", "JobName", "Reason")
"""The same fields in `scontrol show job`, after the id."""

_ID = re.compile(
    r"(?P<job>\d+)"
    r"(?:\+\d+)?"  # a component of a heterogeneous job
    r"(?:_(?:(?P<task>\d+)|\*|\[(?P<tasks>[^\[\]\s]*)\]))?"
    r"(?:%A?\d+)?"  # the limit at a time of what waits of an array, which may also follow inside the brackets
)
_LIMIT = re.compile(r"%A?\d+$")
_TASKS = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<step>\d+))?)?")

_told: set[str] = set()
"""The forms of lines that this process has reported."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, or one task of an array, that the controller still knows."""

    job_id: str
    """As scancel takes it: `42`, or `42_3` for a task of an array."""
    state: str
    """One of `states`."""
    reason: str
    """Why it waits or has ended; else SLURM's own word for its state where that says more."""
    start: str | None
    """Of a pending job the expected one; local time without a zone, as SLURM prints it."""
    end: str | None
    """Of a job that has not ended the latest one."""
    name: str = ""
    submit: str | None = None
    """When it was submitted, or last requeued."""
    restarts: int = 0


def ids_in(text: str) -> list[str]:
    """Return the jobs that one id of SLURM's names: `42_3` and `42_4` for `42_[3-4%2]`; none for another text."""
    found = _ID.fullmatch(text.strip())
    if found is None:
        return []
    if found["task"] is not None:
        return [f"{found['job']}_{found['task']}"]
    if found["tasks"] is None:
        return [found["job"]]
    return [f"{found['job']}_{task}" for task in _tasks(found["tasks"])]


def _tasks(text: str) -> list[int]:
    """Return the numbers in `3-4,8-16:4%2`; SLURM may cut a long list, which then ends with dots."""
    numbers: list[int] = []
    for part in _LIMIT.sub("", text).split(","):
        found = _TASKS.fullmatch(part)
        if found is not None:
            first = int(found["first"])
            last = min(int(found["last"] or first), first + MAX_HOSTS)
            numbers += range(first, last + 1, int(found["step"] or 1) or 1)
    return numbers


def squeue_command(job_ids: Sequence[str]) -> list[str]:
    """Asks for many jobs at once, arrays task by task, also for those that ended a few minutes ago."""
    assert job_ids
    # a size of 0 (nothing before the suffix) prints the field whole
    fields = ",".join(f"{field}:|" for field in _FIELDS)
    return ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", "-O", fields]


def parse_squeue(output: str) -> list[QueuedJob]:
    """All jobs; what a site's banners say between them is none."""
    return [job for line in output.splitlines() for job in _jobs_in(line)]


def _jobs_in(line: str) -> list[QueuedJob]:
    row = line.split("|", len(_FIELDS) - 1)
    return _queued_jobs(*row) if len(row) == len(_FIELDS) else []


def unread_lines(output: str) -> list[str]:
    """Return the lines that look like a job and are not read as one; a site's banners do not look so."""
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
        restarts=int(restarts) if restarts.strip().isdigit() else 0,
    )
    return [replace(facts, job_id=job_id) for job_id in ids_in(job_ids)]


def queued(job_ids: Sequence[str], note: Note = quiet) -> dict[str, QueuedJob] | None:
    """What squeue lists of these jobs, by id. One that is missing is not gone for that: see `shown`.

    None where the controller does not answer.

    Args:
        note: hears, once for each form, of lines that look like a job and cannot be read.
    """
    try:
        output = commands.run(squeue_command(job_ids), commands.SQUEUE_TAKES)
    except commands.JobNotFound:
        # squeue fails this way where a single job is asked for, and leaves unknown ones out where several are
        return {}
    except ClusterError:
        return None
    for line in unread_lines(output):
        form = re.sub(r"\d+", "0", line)
        if form not in _told and note is not quiet:
            _told.add(form)
            note(f"squeue printed a line that cannot be read: {line.strip()[:200]!r}")
    return {job.job_id: job for job in parse_squeue(output)}


def show_command(job_id: str) -> list[str]:
    """Asks for one job, or for all that is there of an array."""
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
    """Return what the controller itself knows of a job or array; nothing where it says that it does not know it.

    None where it does not answer, or says something else: then nobody knows.

    Args:
        job_id: of a whole job or array.
    """
    try:
        return parse_shown(commands.run(show_command(job_id), commands.SQUEUE_TAKES)) or None
    except commands.JobNotFound:
        return []
    except ClusterError:
        return None


def place_command(job_id: str) -> list[str]:
    return ["squeue", "--noheader", "--states=RUNNING", f"--jobs={job_id}", "-o", "%A|%N"]


def parse_place(output: str) -> tuple[str, list[str]] | None:
    """A running job's own id, also where it is a task of an array, and its nodes; None where there is none."""
    for line in output.splitlines():
        job_id, bar, nodes = line.strip().partition("|")
        if bar and job_id.isdigit() and nodes:
            return job_id, expand(nodes)
    return None


def place_of(job_id: str) -> tuple[str, list[str]]:
    """Asks for the place of a running job; see `parse_place`.

    srun takes the id of a task, `42_3`, since 23.02 only.

    Raises:
        ClusterError: it does not run, or the controller does not answer.
    """
    place = parse_place(commands.run(place_command(job_id), commands.SQUEUE_TAKES))
    if place is None:
        raise ClusterError(f"job {job_id} does not run, as SLURM says: try again in a moment")
    return place
