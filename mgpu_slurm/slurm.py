"""SLURM's commands: pure functions build them and read their output, one function runs them.

Only named fields are asked for (`-o`, `-O`, `-P`): the forms of `--json` change between versions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from mgpu_slurm import states
from mgpu_slurm.errors import ClusterError, UserError
from mgpu_slurm.hostlist import expand

SQUEUE_TAKES = 10.0
"""Seconds, SLURM's own limit for one answer by default; squeue would go on trying for as many again."""

FORESEEABLE = timedelta(days=300)
"""A start that SLURM expects later than that is behind jobs without a time limit, which it takes for a year long."""

TAKEN_WITHIN = timedelta(seconds=60)
"""After nodes were taken, for the job that they were taken for to begin."""

THREADS_VARIABLE = "MGPU_THREADS"
"""Has the value of `OMP_NUM_THREADS` where that is no wish of the user's but this package's."""

_OF_ANOTHER_JOB = re.compile(
    r"(SLURM|SBATCH|SRUN|PMIX|PMI|OMPI|TORCHELASTIC|MGPU)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
)
_KEPT = ("SLURM_CONF", "MGPU_RUNS")
_DEFAULTS_OF_QUERIES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
_UNCUT = {"SLURM_BITSTR_LEN": "0"}
_QUEUE_FIELDS = ("JobArrayID", "State", "StartTime", "EndTime", "Reason")
_ACCOUNTING_FIELDS = ("JobID", "State", "Submit", "Start", "End")
_OWNER_FIELDS = ("JobID", "User", "Partition", "Start")
_NODES = re.compile(r"(?P<partition>[^|*]+)(?P<default>\*?)\|(?P<nodes>\d+)\|(?P<gres>[^|]*)")
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Where it is unless `SLURM_CONF` names another; a site that has it elsewhere is asked."""

_CLUSTER_NAME = re.compile(r"""^\s*ClusterName\s*=\s*["']?([^\s#"']+)""", re.IGNORECASE | re.MULTILINE)
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


class Unanswered(ClusterError):
    """SLURM did not answer, or had no time: it may later."""

    def __init__(self, message: str, request: str = LOST) -> None:
        super().__init__(message)
        self.request = request
        """What became of it."""


class Forgotten(ClusterError):
    """The controller does not know the one job that it was asked for, or not any more."""


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


@dataclass(frozen=True)
class AccountedStart:
    """One start of a job in SLURM's accounting; a requeued job has several."""

    job_id: str
    state: str
    end: str | None


@dataclass(frozen=True)
class Taker:
    """A job that has got nodes which others had."""

    job_id: str
    user: str
    partition: str


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one partition that have the same GPUs."""

    is_default: bool
    gpus_per_node: int


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
        Unanswered: SLURM does not answer at the moment.
        Forgotten: it does not know the job.
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
        raise Unanswered(f"{name} did not answer within {timeout:g} s: try again later") from None
    except OSError as error:
        raise ClusterError(f"{name} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        said = done.stderr or done.stdout
        message = f"{name} failed (exit code {done.returncode}): {error_line(said)}"
        if "Invalid job id specified" in said:
            raise Forgotten(message)
        request = passing(said)
        raise ClusterError(message) if request is None else Unanswered(message, request)
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


def squeue_command(job_ids: Sequence[str]) -> list[str]:
    """Asks for many jobs at once, arrays task by task, also for those that ended a few minutes ago."""
    assert job_ids
    # a size of 0 (nothing before the suffix) prints the field whole
    fields = ",".join(f"{field}:|" for field in _QUEUE_FIELDS)
    return ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", "-O", fields]


def parse_squeue(output: str) -> list[QueuedJob]:
    """All jobs; what a site's banners say between them is none."""
    rows = [line.split("|", len(_QUEUE_FIELDS) - 1) for line in output.splitlines()]
    return [_queued_job(row) for row in rows if len(row) == len(_QUEUE_FIELDS) and _is_job_id(row[0])]


def _is_job_id(text: str) -> bool:
    return re.fullmatch(r"\d+(_\S+|\+\d+)?", text.strip()) is not None


def _whole_id(text: str) -> str:
    """`42` of `42+1`, a part of a heterogeneous job."""
    return text.strip().partition("+")[0]


def _queued_job(row: list[str]) -> QueuedJob:
    job_id, word, start, end, reason = row
    state = states.from_slurm(word)
    return QueuedJob(
        job_id=_whole_id(job_id),
        state=state,
        reason=_text(reason.removesuffix("|")) or (word.strip() if word.strip() != state else ""),
        start=_text(start),
        end=_text(end),
    )


def queued(job_ids: Sequence[str]) -> dict[str, QueuedJob] | None:
    """What the controller still knows of these jobs, by id; those that it has forgotten are missing.

    None where it does not answer: then nothing is known, and no job may be called lost.
    """
    try:
        jobs = parse_squeue(run(squeue_command(job_ids), SQUEUE_TAKES))
    except Forgotten:
        # squeue fails this way where a single job is asked for, and leaves unknown ones out where several are
        return {}
    except ClusterError:
        return None
    return {job.job_id: job for job in jobs}


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
    place = parse_place(run(place_command(job_id), SQUEUE_TAKES))
    if place is None:
        raise ClusterError(f"job {job_id} does not run, as SLURM says: try again in a moment")
    return place


def sacct_command(job_ids: Sequence[str]) -> list[str]:
    """Asks for every start of the jobs, requeued ones included, without their steps."""
    assert job_ids
    fields = ",".join(_ACCOUNTING_FIELDS)
    return ["sacct", "--noheader", "-P", "-X", "-D", "-o", fields, "-j", ",".join(job_ids)]


def accounted(job_ids: Sequence[str]) -> list[AccountedStart] | None:
    """Every start of the jobs that accounting knows, oldest first; nothing where the site has none.

    None where it does not answer.
    """
    try:
        return parse_sacct(run(sacct_command(job_ids)))
    except ClusterError as error:
        is_there_none = "accounting storage is disabled" in str(error) or "no sacct on PATH" in str(error)
        return [] if is_there_none else None


def parse_sacct(output: str) -> list[AccountedStart]:
    """All starts, oldest first: the last one of a job says how it ended."""
    rows = [line.split("|") for line in output.splitlines()]
    rows = [row for row in rows if len(row) == len(_ACCOUNTING_FIELDS) and _is_job_id(row[0])]
    rows.sort(key=lambda row: (row[2], row[3]))
    return [start for row in rows for start in _accounted_starts(row)]


def began_command(nodes: Sequence[str], since: datetime, until: datetime) -> list[str]:
    """Asks for whose jobs were on any of the nodes meanwhile."""
    span = ["-S", since.isoformat(timespec="seconds"), "-E", until.isoformat(timespec="seconds")]
    return ["sacct", "--noheader", "-P", "-X", "-a", "-o", ",".join(_OWNER_FIELDS), "-N", ",".join(nodes), *span]


def began_on(nodes: Sequence[str], after: str) -> list[Taker]:
    """The jobs that began on these nodes at a time or soon after it, as far as accounting shows those of others.

    Args:
        after: as accounting writes it, in this machine's zone.
    """
    begin = datetime.fromisoformat(after)
    try:
        output = run(began_command(nodes, begin, begin + TAKEN_WITHIN))
    except ClusterError:
        return []
    return parse_began(output, begin)


def parse_began(output: str, after: datetime) -> list[Taker]:
    """Those that began neither before nor long after, in the order of their ids."""
    rows = [line.split("|") for line in output.splitlines()]
    found = []
    for row in rows:
        if len(row) == len(_OWNER_FIELDS) and _is_job_id(row[0]) and _text(row[3]) is not None:
            begun = datetime.fromisoformat(row[3])
            if after <= begun <= after + TAKEN_WITHIN:
                found.append(Taker(*row[:3]))
    return found


def _accounted_starts(row: list[str]) -> list[AccountedStart]:
    job_ids, state, _, _, end = row
    return [AccountedStart(job_id, states.from_slurm(state), _text(end)) for job_id in _array_tasks(_whole_id(job_ids))]


def _array_tasks(job_id: str) -> list[str]:
    """`42_3` and `42_4` of `42_[3-4%2]`, the form of tasks that never started."""
    try:
        return expand(re.sub(r"%\d+\]$", "]", job_id))
    except UserError:
        return [job_id]


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


def sinfo_command(partition: str | None) -> list[str]:
    """Asks for the GPUs of the nodes of a partition (or several, by commas); without one, of all."""
    # sinfo refuses the two together; a partition that is named is shown also where it is hidden
    chosen = "--all" if partition is None else f"--partition={partition}"
    return ["sinfo", "--noheader", chosen, "-o", "%P|%D|%G"]


def parse_sinfo(output: str) -> list[NodeGroup]:
    found = [_NODES.fullmatch(line.strip()) for line in output.splitlines()]
    return [NodeGroup(line["default"] == "*", gpus_in(line["gres"])) for line in found if line is not None]


def gpus_in(gres: str) -> int:
    """GPUs in a node's generic resources, such as `gpu:a100:4(S:0-1),nvme:1`."""
    # what stands in parentheses may hold commas, and `(null)` is nothing
    parts = [part.split(":") for part in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return sum(int(part[-1]) if part[-1].isdigit() else 1 for part in parts if part[0] == "gpu")


def gpus_of(groups: Sequence[NodeGroup], partition: str | None) -> int:
    """What a job can ask for on every GPU node of a partition: the least that one of them has; 0 without GPUs.

    Args:
        groups: the answer for the partition, or for all where the job goes to the default one.
        partition: as the job names it; None for the cluster's default.
    """
    counts = [group.gpus_per_node for group in groups if partition is not None or group.is_default]
    return min((count for count in counts if count > 0), default=0)


def gpus_per_node(partition: str | None) -> int:
    """Asks the cluster once; see `gpus_of`.

    Raises:
        ClusterError: where it does not answer, or has no such partition.
    """
    groups = parse_sinfo(run(sinfo_command(partition)))
    if partition is not None and not groups:
        raise ClusterError(f"--partition {partition}: the cluster has none of that name; `sinfo` lists them")
    return gpus_of(groups, partition)


def config_command() -> list[str]:
    return ["scontrol", "show", "config"]


def parse_config(output: str) -> dict[str, str]:
    """SLURM's own settings by name, such as `MaxArraySize`."""
    pairs = (line.partition("=") for line in output.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def cluster_name() -> str | None:
    """The cluster that SLURM's commands speak to here; None where that is not to be found out.

    By its configuration file, where there is one: this is asked at each look at runs.
    """
    named = os.environ.get("SLURM_CONF")
    try:
        return _cluster_name((named,) if named else _CONFIGURATIONS)
    except ClusterError:
        return None


@functools.cache
def _cluster_name(configurations: Sequence[str]) -> str | None:
    """Where nothing answers, the next call asks again."""
    for path in configurations:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if found := _CLUSTER_NAME.search(file.read()):
                # as SLURM itself reads it
                return found[1].lower()
    return parse_config(run(config_command(), SQUEUE_TAKES)).get("ClusterName")


def max_array_size() -> int:
    """Task numbers of an array are below it.

    Raises:
        ClusterError: where the controller does not answer.
    """
    return int(parse_config(run(config_command()))["MaxArraySize"])


def parse_ports(text: str) -> range | None:
    """The ports of a SrunPortRange; None for `0-0`, which is none."""
    low, _, high = text.partition("-")
    return range(int(low), int(high) + 1) if low.isdigit() and high.isdigit() and int(low) else None


def srun_ports() -> range | None:
    """The ports on which the site's nodes reach the machine where srun runs; None where it names none.

    Raises:
        ClusterError: where the controller does not answer.
    """
    return parse_ports(parse_config(run(config_command())).get("SrunPortRange", ""))


def _text(field: str) -> str | None:
    """The field, or None where SLURM says in one of its ways that there is nothing."""
    field = field.strip()
    return None if field in _NOTHING else field
