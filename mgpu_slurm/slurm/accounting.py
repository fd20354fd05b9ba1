"""Query SLURM's accounting: how each start of a job ended, and which jobs got its nodes afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.run_folder import states
from mgpu_slurm.slurm import commands
from mgpu_slurm.slurm.jobs import ids_in

TAKEN_WITHIN = timedelta(seconds=60)
"""Time within which a job starts on nodes that were preempted for it."""

# the name is last, since it may contain a bar
_FIELDS = ("JobID", "State", "Submit", "Start", "End", "JobName")
_OWNER_FIELDS = ("JobID", "User", "Partition", "Start")


@dataclass(frozen=True)
class AccountedStart:
    """One start of a job in SLURM's accounting; a requeued job has several."""

    job_id: str
    state: str
    end: str | None
    name: str = ""
    submit: str | None = None
    """Time at which it was submitted, or requeued for this start."""
    is_by_user: bool = False
    """Whether a user cancelled it."""


@dataclass(frozen=True)
class Preemptor:
    """A job that got nodes which another job had before."""

    job_id: str
    user: str
    partition: str


def sacct_command(job_ids: Sequence[str]) -> list[str]:
    """Return the command that lists every start of the jobs, also requeued ones, without steps."""
    assert job_ids
    return ["sacct", "--noheader", "-P", "-X", "-D", "-o", ",".join(_FIELDS), "-j", ",".join(job_ids)]


def accounted(job_ids: Sequence[str]) -> list[AccountedStart] | None:
    """Return every start of the jobs in accounting, oldest first.

    Empty if the site has no accounting, None if it does not answer.
    """
    try:
        return parse_sacct(commands.run(sacct_command(job_ids)))
    except ClusterError as error:
        is_there_none = "accounting storage is disabled" in str(error) or "no sacct on PATH" in str(error)
        return [] if is_there_none else None


def named_command(name: str, since: datetime) -> list[str]:
    """Return the command that lists this user's jobs of a name that were submitted since a time."""
    start = since.astimezone().replace(tzinfo=None).isoformat(timespec="seconds")
    return ["sacct", "--noheader", "-P", "-X", "-D", "-o", ",".join(_FIELDS), "--name", name, "-S", start]


def named(name: str, since: datetime) -> list[AccountedStart] | None:
    """Return every start of these jobs; None if there is no accounting, or it does not answer."""
    try:
        return parse_sacct(commands.run(named_command(name, since)))
    except ClusterError:
        return None


def parse_sacct(output: str) -> list[AccountedStart]:
    """Return all starts, oldest first; the last one of a job states how it ended."""
    rows = [line.split("|", len(_FIELDS) - 1) for line in output.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS)]
    rows.sort(key=lambda row: (row[2], row[3]))
    return [start for row in rows for start in _accounted_starts(row)]


def _accounted_starts(row: list[str]) -> list[AccountedStart]:
    job_ids, word, submit, _, end, name = row
    state, times = states.from_slurm(word), [commands.time_of(end), commands.time_of(submit)]
    is_by_user = " by " in word  # as in `CANCELLED by 1000`
    return [AccountedStart(job_id, state, times[0], name, times[1], is_by_user) for job_id in ids_in(job_ids)]


def began_command(nodes: Sequence[str], since: datetime, until: datetime) -> list[str]:
    """Return the command that lists the jobs on any of the nodes in a period, and their users."""
    span = ["-S", since.isoformat(timespec="seconds"), "-E", until.isoformat(timespec="seconds")]
    return ["sacct", "--noheader", "-P", "-X", "-a", "-o", ",".join(_OWNER_FIELDS), "-N", ",".join(nodes), *span]


def began_on(nodes: Sequence[str], after: str) -> list[Preemptor]:
    """Return the jobs that started on these nodes at a time or soon after, if accounting shows other users' jobs.

    Args:
        after: the time as accounting prints it, in this machine's zone.
    """
    begin = datetime.fromisoformat(after)
    try:
        output = commands.run(began_command(nodes, begin, begin + TAKEN_WITHIN))
    except ClusterError:
        return []
    return parse_began(output, begin)


def parse_began(output: str, after: datetime) -> list[Preemptor]:
    """Return the jobs that started between `after` and `TAKEN_WITHIN` later, in the order of the output."""
    rows = [line.split("|") for line in output.splitlines()]
    found = []
    for row in rows:
        start = commands.time_of(row[3]) if len(row) == len(_OWNER_FIELDS) and ids_in(row[0]) else None
        if start is not None and after <= datetime.fromisoformat(start) <= after + TAKEN_WITHIN:
            found.append(Preemptor(*row[:3]))
    return found
