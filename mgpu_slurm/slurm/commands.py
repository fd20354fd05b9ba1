"""SLURM's commands: pure functions build them and read their output, one function runs them.

Only named fields are asked for (`-o`, `-O`, `-P`): the forms of `--json` change between versions.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from mgpu_slurm.core.errors import ClusterError

SQUEUE_TAKES = 10.0
"""Seconds, SLURM's own limit for one answer by default; squeue would go on trying for as many again."""

FORESEEABLE = timedelta(days=300)
"""A start that SLURM expects later than that is behind jobs without a time limit, which it takes for a year long."""

THREADS_VARIABLE = "MGPU_THREADS"
"""Has the value of `OMP_NUM_THREADS` where that is no wish of the user's but this package's."""

_OF_ANOTHER_JOB = re.compile(
    r"(SLURM|SBATCH|SRUN|PMIX|PMI|OMPI|TORCHELASTIC|MGPU)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
)
_KEPT = ("SLURM_CONF", "MGPU_RUNS")
_DEFAULTS_OF_QUERIES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
_UNCUT = {"SLURM_BITSTR_LEN": "0"}

# a value may hold `=` and blanks: the next pair begins with a capital letter
_PAIR = re.compile(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|$)")
_NOTHING = ("", "N/A", "NONE", "None", "Unknown", "(null)", "None assigned")

LOST, UNREACHED, BUSY = "lost", "unreached", "busy"
"""What became of a request that got no answer: nobody knows, it never arrived, or it was sent away for now."""

_PASSING = {
    "unable to contact slurm controller (connect failure)": UNREACHED,
    "unable to contact slurm controller": LOST,
    "communication connection failure": UNREACHED,
    "communication shutdown failure": LOST,
    "message send failure": LOST,
    "message receive failure": LOST,
    "failed to send entire message": LOST,
    "received zero length message": LOST,
    "header lengths are longer than data received": LOST,
    "zero bytes were transmitted or received": LOST,
    "socket timed out": LOST,
    "connection timed out": LOST,
    "connection reset by peer": LOST,
    "transport endpoint is not connected": LOST,
    "broken pipe": LOST,
    "connection refused": UNREACHED,
    "no route to host": UNREACHED,
    "network is unreachable": UNREACHED,
    "backup controller in standby mode": UNREACHED,
    "rate limit exceeded": BUSY,
    "slurm temporarily unable to accept job": BUSY,
    "slurm job queue full": BUSY,
    "unable to create job record, try again": BUSY,
    "job creation temporarily disabled": BUSY,
    # of the controller, which sends the job away, or of this machine, and then nobody knows
    "resource temporarily unavailable": LOST,
}
"""What SLURM's commands say (slurm_errno.c, sbatch.c, and errno) where the same call may succeed later; of several
phrases the first counts."""


class SlurmUnavailable(ClusterError):
    """SLURM did not answer, or had no time: it may later."""

    def __init__(self, message: str, request: str = LOST) -> None:
        super().__init__(message)
        self.request = request
        """What became of it."""


class JobNotFound(ClusterError):
    """The controller does not know the one job that it was asked for, or not any more."""


DEFAULTS_OF_SBATCH = {
    f"SBATCH_{name.upper()}": name for name in ("account", "constraint", "partition", "qos", "reservation")
}
"""What a user's profile sets for all submissions, and the flag that it stands for (sbatch(1), INPUT ENVIRONMENT
VARIABLES). They are read as defaults: sbatch itself would let them win over the script."""


def flags_of_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """The flags that these variables give."""
    return {flag: environ[name] for name, flag in DEFAULTS_OF_SBATCH.items() if environ.get(name)}


def scrubbed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a surrounding job or launcher set, for commands that start another job.

    Inherited, `SLURM_CPU_BIND` pins the new ranks, `SLURM_CPUS_PER_TASK` kills srun, and a stale rank is believed.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or not _OF_ANOTHER_JOB.fullmatch(name)}
    if kept.get("OMP_NUM_THREADS") == environ.get(THREADS_VARIABLE):
        kept.pop("OMP_NUM_THREADS", None)
    return kept


def run(command: list[str], timeout: float = 30) -> str:
    """The standard output of a SLURM command.

    Args:
        timeout: seconds; the command is ended after that.

    Raises:
        SlurmUnavailable: SLURM does not answer at the moment.
        JobNotFound: it does not know the job.
        ClusterError: the command is not there, or fails.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=_query_environment(os.environ),
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError(f"no {name} on PATH: call this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{name} did not answer within {timeout:g} s: try again later") from None
    except OSError as error:
        raise ClusterError(f"{name} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        said = done.stderr or done.stdout
        message = f"{name} failed (exit code {done.returncode}): {error_line(said)}"
        if "Invalid job id specified" in said:
            raise JobNotFound(message)
        request = passing(said)
        raise ClusterError(message) if request is None else SlurmUnavailable(message, request)
    return done.stdout


def passing(text: str) -> str | None:
    """Of what a failed command said: what became of the request; None where SLURM refused it.

    The last word counts: a command may have tried several times by itself.
    """
    lines = [line.lower() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "fatal:" in line] or lines
    last = errors[-1] if errors else ""
    return next((request for phrase, request in _PASSING.items() if phrase in last), None)


def _query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the user's own filters and formats, and with lists of array tasks that are not cut."""
    scrubbed = scrubbed_environment(environ).items()
    return {name: value for name, value in scrubbed if not name.startswith(_DEFAULTS_OF_QUERIES)} | _UNCUT


def error_line(text: str) -> str:
    """The first line that calls itself an error, or at least one of SLURM's, past the banners of a site; else the
    first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for form in (r"s\w+: (error|fatal): ", r".*error:", r"s\w+: "):
        if found := next((line for line in lines if re.match(form, line)), None):
            return found
    return lines[0] if lines else "it said nothing"


def marked_command() -> list[str]:
    """Lists the comments of this user's jobs, among them the tokens of submissions."""
    return ["squeue", "--me", "--noheader", "--states=all", "-o", "%F|%k"]


def parse_marked(output: str, token: str) -> str | None:
    """The id of the job whose comment holds the token, or None."""
    for line in output.splitlines():
        job_id, _, comment = line.partition("|")
        if token in comment.split():
            return job_id.strip()
    return None


def job_marked(token: str) -> str | None:
    """The id of the job that was submitted with the token, or None: only then may a submission be tried again.

    Raises:
        ClusterError: where the controller does not answer.
    """
    return parse_marked(run(marked_command()), token)


def whole_jobs(job_ids: Iterable[str]) -> list[str]:
    """Arrays in the place of their tasks."""
    return list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))


def scancel_waiting_command(job_ids: Sequence[str]) -> list[str]:
    """Only what has not started of these jobs and arrays."""
    return ["scancel", "--quiet", "--state=PENDING", *job_ids]


def scancel_command(job_ids: Sequence[str]) -> list[str]:
    assert job_ids
    return ["scancel", *job_ids]


def dependencies_command() -> list[str]:
    """Lists what this user's jobs wait for."""
    return ["squeue", "--me", "--noheader", "--states=PENDING", "-o", "%F|%E"]


def parse_dependants(output: str, job_id: str, successor: str) -> dict[str, str]:
    """The jobs that wait for a job to complete or to end, and what they have to wait for where another one goes on.

    Args:
        job_id: may be a task's; those that wait for its whole array are meant too.
        successor: goes on. The job's own end is waited for as before.
    """
    whole, _, task = job_id.partition("_")
    its_names = {job_id, f"{whole}_*"} if task else {job_id}
    found = {}
    for line in output.splitlines():
        dependant, _, dependency = line.strip().partition("|")
        # `afterok:42_*(unfulfilled),afterany:43(unfulfilled)`
        clauses = re.sub(r"\(\w+\)", "", dependency).split(",")
        kinds = {kind for kind, _, name in (clause.partition(":") for clause in clauses) if name in its_names}
        also = [f"{kind}:{successor}" for kind in ("afterok", "afterany") if kind in kinds]
        if also and dependant != successor.partition("_")[0]:
            found[dependant] = ",".join([*clauses, *also]).replace("_*", "")
    return found


def dependency_command(job_id: str, dependency: str) -> list[str]:
    return ["scontrol", "update", f"JobId={job_id}", f"Dependency={dependency}"]


def time_left_command(job_id: str) -> list[str]:
    return ["squeue", "--noheader", f"--jobs={job_id}", "-o", "%L"]


def parse_time_left(output: str) -> int | None:
    """Seconds; None where a job has no limit."""
    form = r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)"
    match = re.fullmatch(form, output.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def seconds_left(job_id: str) -> int | None:
    """Until a job's time limit; None where it has none.

    Raises:
        ClusterError: SLURM does not answer.
    """
    return parse_time_left(run(time_left_command(job_id)))


def exclude_command(job_id: str, nodes: str) -> list[str]:
    return ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}"]


def requeue_command(job_id: str) -> list[str]:
    return ["scontrol", "requeue", job_id]


def value_of(field: str) -> str | None:
    """The field, or None where SLURM says in one of its ways that there is nothing."""
    field = field.strip()
    return None if field in _NOTHING else field


def time_of(field: str) -> str | None:
    """Return a time as SLURM prints it, or None if the field holds no time."""
    try:
        datetime.fromisoformat(field.strip())
    except ValueError:
        return None
    return field.strip()


def pairs_in(line: str) -> dict[str, str]:
    """Return what a line of `scontrol show --oneliner` tells, by its names."""
    return {name: value.strip() for name, value in _PAIR.findall(line.strip())}
