"""Build SLURM's commands and parse their output (pure functions), run them, and wait for a controller that is away.

Only named fields are requested (`-o`, `-O`, `-P`), because the format of `--json` changes between versions.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.formatting import printable
from mgpu_slurm.core.hostlist import expand
from mgpu_slurm.core.retry import Note, quiet

SQUEUE_TAKES = 10.0
"""Seconds; SLURM's default limit for one answer. squeue itself would keep trying for as long again."""

FORESEEABLE = timedelta(days=300)
"""An expected start later than this is behind jobs without a time limit, which SLURM assumes to last a year."""

THREADS_VARIABLE = "MGPU_THREADS"
"""Holds the value of `OMP_NUM_THREADS` if this package has set it, not the user."""

_OF_ANOTHER_JOB = re.compile(
    r"(SLURM|SBATCH|SRUN|PMIX|PMI|OMPI|TORCHELASTIC|MGPU)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
)
_KEPT = ("SLURM_CONF", "MGPU_RUNS")
_DEFAULTS_OF_QUERIES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
_UNCUT = {"SLURM_BITSTR_LEN": "0"}

# a value may contain `=` and blanks: the next pair begins with a capital letter
_PAIR = re.compile(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|$)")
_NUMBER = re.compile(r"[0-9]{1,18}")
_TIME_LEFT = re.compile(
    r"(?:(?P<days>[0-9]{1,9})-)?(?:(?P<hours>[0-9]{1,9}):)?(?P<minutes>[0-9]{1,9}):(?P<seconds>[0-9]{1,9})"
)
# of years for which each zone has a time
_TIME = re.compile(r"(?:19|[2-8][0-9])[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?")
_NOTHING = ("", "N/A", "NONE", "None", "Unknown", "(null)", "None assigned")

LOST, UNREACHED, BUSY = "lost", "unreached", "busy"
"""Outcomes of a request without an answer: unknown, never arrived, or refused for now."""

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
    # from the controller, which refuses the job for now, or from this machine, and then the outcome is unknown
    "resource temporarily unavailable": LOST,
}
"""Messages of SLURM's commands (slurm_errno.c, sbatch.c, and errno) for which the same call may succeed later; the
first matching phrase counts."""


class SlurmUnavailable(ClusterError):
    """SLURM did not answer, or was busy; a later call may succeed."""

    def __init__(self, message: str, request: str = LOST) -> None:
        super().__init__(message)
        self.request = request
        """The outcome of the request: `LOST`, `UNREACHED` or `BUSY`."""


class JobNotFound(ClusterError):
    """The controller does not know the requested job, or no longer does."""


DEFAULTS_OF_SBATCH = {
    f"SBATCH_{name.upper()}": name for name in ("account", "constraint", "partition", "qos", "reservation")
}
"""Variables that a user's profile sets for all submissions, and their flags (sbatch(1), INPUT ENVIRONMENT VARIABLES).
They are read as defaults, although sbatch itself would let them override the script."""


def flags_of_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the flags that these variables set."""
    return {flag: environ[name] for name, flag in DEFAULTS_OF_SBATCH.items() if environ.get(name)}


def scrubbed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a surrounding job or launcher, for starting another job.

    If inherited, `SLURM_CPU_BIND` pins the new ranks, `SLURM_CPUS_PER_TASK` makes srun fail, and a stale rank is used.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or not _OF_ANOTHER_JOB.fullmatch(name)}
    if kept.get("OMP_NUM_THREADS") == environ.get(THREADS_VARIABLE):
        kept.pop("OMP_NUM_THREADS", None)
    return kept


def run(command: list[str], timeout: float = 30) -> str:
    """Run a SLURM command and return its standard output.

    Args:
        timeout: seconds after which the command is killed.

    Raises:
        SlurmUnavailable: SLURM does not answer at the moment.
        JobNotFound: it does not know the job.
        ClusterError: the command does not exist, or fails.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_query_environment(os.environ),
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError(f"no {name} on PATH: run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{name} did not answer within {timeout:g} s: try again later") from None
    except OSError as error:
        raise ClusterError(f"{name} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        said = _text(done.stderr or done.stdout)
        message = f"{name} failed (exit code {done.returncode}): {error_line(said)}"
        if "Invalid job id specified" in said:
            raise JobNotFound(message)
        request = passing(said)
        raise ClusterError(message) if request is None else SlurmUnavailable(message, request)
    return _text(done.stdout)


def _text(output: bytes) -> str:
    """Return output in which each line is one of SLURM's: names may contain other characters that end lines."""
    return printable(output.decode(errors="replace"))


def passing(text: str) -> str | None:
    """Return the outcome of a failed command's request, from its output; None if SLURM refused it.

    The last error counts: a command may have retried by itself.
    """
    lines = [line.lower() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "fatal:" in line] or lines
    last = errors[-1] if errors else ""
    return next((request for phrase, request in _PASSING.items() if phrase in last), None)


def _query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the user's filters and formats, and with untruncated lists of array tasks."""
    scrubbed = scrubbed_environment(environ).items()
    return {name: value for name, value in scrubbed if not name.startswith(_DEFAULTS_OF_QUERIES)} | _UNCUT


def error_line(text: str) -> str:
    """Return the first line that is an error, or at least SLURM's, skipping a site's banners; else the first line."""
    lines = [line.strip() for line in printable(text).splitlines() if line.strip()]
    for form in (r"s\w+: (error|fatal): ", r".*error:", r"s\w+: "):
        if found := next((line for line in lines if re.match(form, line)), None):
            return found
    return lines[0] if lines else "no message"


def marked_command() -> list[str]:
    """Return the command that lists the comments of this user's jobs, which contain the tokens of submissions."""
    return ["squeue", "--me", "--noheader", "--states=all", "-o", "%F|%k"]


def parse_marked(output: str, token: str) -> str | None:
    """Return the id of the job whose comment contains the token, or None."""
    for line in output.splitlines():
        job_id, _, comment = line.partition("|")
        if token in comment.split():
            return job_id.strip()
    return None


def job_marked(token: str) -> str | None:
    """Return the id of the job that was submitted with the token, or None; only then may a submission be retried.

    Raises:
        ClusterError: the controller does not answer.
    """
    return parse_marked(run(marked_command()), token)


def whole_jobs(job_ids: Iterable[str]) -> list[str]:
    """Return the ids with arrays in place of their tasks, without duplicates."""
    return list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))


def scancel_waiting_command(job_ids: Sequence[str]) -> list[str]:
    """Return the command that cancels those of these jobs and array tasks that have not started."""
    return ["scancel", "--quiet", "--state=PENDING", *job_ids]


def scancel_command(job_ids: Sequence[str]) -> list[str]:
    assert job_ids
    return ["scancel", *job_ids]


def dependencies_command() -> list[str]:
    """Return the command that lists the dependencies of this user's jobs."""
    return ["squeue", "--me", "--noheader", "--states=PENDING", "-o", "%F|%E"]


def parse_dependants(output: str, job_id: str, successor: str) -> dict[str, str]:
    """Return the jobs that wait for a job to complete or end, with their dependencies extended by its successor.

    Args:
        job_id: may be a task's; jobs that wait for its whole array are included.
        successor: the job that continues its work. The dependency on the job itself is kept.
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
    """Return the seconds left; None if a job has no limit."""
    match = _TIME_LEFT.fullmatch(output.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def seconds_left(job_id: str) -> int | None:
    """Return the seconds until a job's time limit; None if it has none.

    Raises:
        ClusterError: SLURM does not answer.
    """
    return parse_time_left(run(time_left_command(job_id)))


def exclude_command(job_id: str, nodes: str) -> list[str]:
    return ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}"]


def requeue_command(job_id: str) -> list[str]:
    return ["scontrol", "requeue", job_id]


MEGABYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
"""SLURM's units of memory; without one, a number is in megabytes."""


def value_of(field: str) -> str | None:
    """Return the field, or None if it is one of SLURM's words for an empty value."""
    field = field.strip()
    return None if field in _NOTHING else field


def time_of(field: str) -> str | None:
    """Return a time as SLURM prints it, or None if the field is not a time."""
    field = field.strip()
    if not _TIME.fullmatch(field):
        return None
    try:
        datetime.fromisoformat(field)
    except ValueError:
        return None
    return field


def number_of(field: str) -> int | None:
    """Return a number as SLURM prints it, or None if the field is not one, or longer than any of SLURM's."""
    return int(field) if _NUMBER.fullmatch(field.strip()) else None


def nodes_in(text: str) -> list[str]:
    """Return the names in a list of nodes as SLURM prints it.

    Raises:
        ClusterError: it cannot be read.
    """
    try:
        return expand(value_of(text) or "")
    except UserError as error:
        raise ClusterError(f"cannot read what SLURM shows: {error}") from None


def pairs_in(line: str) -> dict[str, str]:
    """Return the values in a line of `scontrol show --oneliner`, by name."""
    return {name: value.strip() for name, value in _PAIR.findall(line.strip())}


# -- waiting for a controller that does not answer, which is reported once


OUTAGE_SECONDS = 300.0
"""Seconds for which a login node waits."""

OUTAGE_PAUSES = (3.0, 3.0, 5.0, 10.0, 15.0)
"""Seconds between requests; the last applies to all later ones. A controller may still work on a request that nobody
waits for any more, and it serves thousands of clients."""

Answer = TypeVar("Answer")


class Patience:
    """The time left for SLURM to answer."""

    def __init__(self, note: Note = quiet, seconds: float | None = None) -> None:
        self._note = note
        self._seconds = OUTAGE_SECONDS if seconds is None else seconds
        self._give_up = time.monotonic() + self._seconds
        self._told = False
        self._pauses = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._give_up

    def tell(self, problem: SlurmUnavailable) -> None:
        """Report the problem, the first time only."""
        if self._told:
            return
        self._told = True
        what = "accepts no jobs at the moment" if problem.request == BUSY else "does not answer"
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._give_up - time.monotonic()))
        self._note(f"SLURM's controller {what}; trying again until {until}; Ctrl-C stops waiting")

    def pause(self) -> None:
        time.sleep(OUTAGE_PAUSES[min(self._pauses, len(OUTAGE_PAUSES) - 1)])
        self._pauses += 1


def wait_out(ask: Callable[[], Answer], note: Note = quiet) -> Answer:
    """Call `ask` until SLURM answers, and return the answer.

    Raises:
        ClusterError: SLURM refuses, or has not answered for too long.
    """
    patience = Patience(note)
    while True:
        try:
            return ask()
        except SlurmUnavailable as problem:
            if patience.is_over:
                raise
            patience.tell(problem)
        patience.pause()
