"""Find the cause of a failed attempt from its records: the program or the cluster, and how to fix it.

A failure of the program would happen again. One of the cluster (a rank killed by something unknown, a lost connection,
a broken disk or GPU) is worth another attempt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgpu_slurm.core.log_lines import PREFIX
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.record_types import Failure

STUCK = "Stuck"
"""The name of the error in the record of a rank that made no progress."""


@dataclass(frozen=True)
class Cause:
    """One kind of failure."""

    name: str
    words: str
    """The failure as a sentence, without the full stop."""
    fix: str
    """How to fix it."""
    is_cluster_fault: bool = False
    """Whether the cluster caused it, not the program, so that another attempt makes sense."""
    excludes_node: bool = False
    """Whether the next attempt on the same node would fail too."""
    ends_job: bool = False
    """Whether SLURM cannot start anything more in the same job."""


GPU_MEMORY = Cause(
    "gpu-memory",
    "a GPU ran out of memory",
    "compute the batch by `run.gradients`, in as few parts as fit, use `run.wrap(recompute=True)`, or lower the batch"
    " size, then `resume --code new`; or try `resume --precision bf16`",
)
GPU_LIBRARY = Cause(
    "gpu-library",
    "a GPU library (cuDNN, cuBLAS) could not start, usually because the GPU's memory is full",
    "lower the batch size; `nvidia-smi` on the node shows who else uses the GPU",
)
GPU_ASSERT = Cause(
    "gpu-assert",
    "GPU code asserted: a value is invalid, such as a class or an index out of range",
    "run once on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see the right line in the traceback; check labels and"
    " vocabulary sizes",
)
GPU = Cause(
    "gpu",
    "a GPU is broken or missing",
    "exclude the node (`--exclude NODE`) and tell your admins; `mgpu-slurm doctor --submit` checks the GPUs",
    is_cluster_fault=True,
    excludes_node=True,
)
TIME_OUT = Cause(
    "collective-timeout",
    "a collective timed out: some ranks never reached it",
    "look at what the missing rank was doing; `--stuck-after` below torch's time-out names it with its line",
    is_cluster_fault=True,
)
NO_PROGRESS = Cause(
    "stuck",
    "the training made no progress, so the attempt was stopped",
    "the stacks of all ranks are in their logs; raise `--stuck-after` if the step is just slow",
    is_cluster_fault=True,
)
CONNECTION = Cause(
    "connection",
    "the connection to another rank was lost, and no rank said why",
    "look for a killed rank or a lost node; if it happens again, check the network",
    is_cluster_fault=True,
)
RENDEZVOUS = Cause(
    "rendezvous",
    "the ranks did not find each other",
    "`mgpu-slurm doctor --submit` checks ports and names between two nodes",
    is_cluster_fault=True,
)
PORT = Cause(
    "port",
    "a port was in use already",
    "let the run choose the port: take MASTER_PORT from the environment, or bind port 0",
)
FORGERY = Cause(
    "forgery",
    "a process that is not a rank of the run wrote to its rendezvous",
    "find out who is logged in to the nodes and tell your admins; see docs/security.md",
)
SHARED_MEMORY = Cause(
    "shared-memory",
    "the node's shared memory (/dev/shm) was full, or a memory-mapped file was truncated",
    "use fewer or no loader workers (`num_workers=0`), or more shared memory on the node",
)
HOST_MEMORY = Cause(
    "host-memory",
    "a node ran out of RAM",
    "ask for more (`--mem`), or use less: fewer loader workers, a smaller batch, do not load the whole data set into"
    " memory",
)
DISK_FULL = Cause(
    "disk-full",
    "a disk, or a quota on it, is full",
    "`df -h` and `mgpu-slurm clean` show what can be deleted; then `resume`",
)
DISK = Cause(
    "disk",
    "an I/O error on a disk or network file system",
    "it may have recovered: try `resume`; if it happens again, tell your admins",
    is_cluster_fault=True,
)
IMPORT = Cause(
    "import",
    "a module could not be imported",
    "install it in the environment you submit from, or add it to the project's folder; then `resume --code new`",
)
TARGET = Cause(
    "target",
    "the job could not be called as it was submitted",
    "fix what the error names and submit again; `submit --dry-run --check` checks it beforehand",
)
NOT_A_NUMBER = Cause(
    "nan",
    "a value became NaN or infinite",
    "lower the learning rate, clip gradients (`run.update(clip=1.0)`), and look at the batch before that step",
)
KILLED = Cause(
    "killed",
    "a rank was killed (SIGKILL) by something unknown",
    "`resume` continues; probably the kernel's out-of-memory killer (check `dmesg` on the node), or another user",
    is_cluster_fault=True,
)
TERMINATED = Cause(
    "terminated", "it was terminated (SIGTERM)", "`resume` continues; the launch log or `sacct` may say who sent it"
)
SUPERVISOR = Cause(
    "supervisor",
    "the supervisor process is gone (killed, or the machine rebooted)",
    "`resume` continues",
)
LAUNCH = Cause(
    "launch",
    "SLURM could not start the ranks, or lost them",
    "try again; if it happens again, tell your admins which node",
    is_cluster_fault=True,
    excludes_node=True,
)
HELD_UP = Cause(
    "held-up",
    "SLURM allocated nodes but never started the ranks",
    "try again; if it happens again, tell your admins which nodes",
    is_cluster_fault=True,
    ends_job=True,
)
CRASH = Cause(
    "crash",
    "native code crashed",
    "the rank's log has its stack if Python could write it; for a command, set PYTHONFAULTHANDLER=1",
)
NO_COMMAND = Cause(
    "command",
    "the command could not be started",
    "give its path, or let `setup` in mgpu.yaml put it on PATH on the nodes",
)
DAMAGED = Cause(
    "damaged",
    "all checkpoints of the run are damaged",
    "`clean RUN --checkpoints` deletes them; `resume` then starts from the beginning",
)
AFTER_THE_END = Cause(
    "after-the-end",
    "the process crashed after the job function had returned",
    "its result is saved; destroy your own process groups and close your own loaders before you return",
)
PROGRAM = Cause(
    "program",
    "the program failed",
    "fix the error, then `resume --code new` to continue from the newest checkpoint, if there is one, or submit again"
    " to start over",
)
TRIALS = Cause(
    "trials",
    "the trials of the sweep fail alike",
    "fix the job, then `resume --code new`, or add trials if none is left (`sweep FILE trials=N --code new`); if the"
    " file is wrong, delete the study (`clean RUN`) and start again",
)
UNKNOWN = Cause("unknown", "it failed before any rank reported an error", "look at the end of the launch log")

TIME_LIMIT = Cause(
    "time-limit",
    "the time limit was reached and the run was not restarted",
    "`resume` continues from the newest checkpoint; raise `--time`, or save more often",
)
NO_CHECKPOINT_IN_TIME = Cause(
    "no-checkpoint-in-time",
    "the time limit was reached twice without a newer checkpoint",
    "raise `--time`, or pass a `run.loader` to `run.restore` (the run then saves at any batch, not only at the end of"
    " an epoch); `resume` continues",
)
PREEMPTED = Cause(
    "preempted",
    "SLURM took the nodes for a job of higher priority",
    "`resume` continues; or use a non-preemptible partition or QOS (usually a longer queue)",
)
NODE = Cause("node", "a node failed", "`resume` continues on other nodes")
DEPENDENCY = Cause(
    "dependency",
    "the run it waited for did not complete",
    "resume that run first, then this one; or submit again with `--after-any`",
)
DEPENDENCY_GONE = Cause(
    "dependency-gone", "the run it waited for is gone", "submit again without `--after` and `--after-any`"
)
CANCELLED = Cause("cancelled", "it was cancelled", "`resume` continues")

# errno numbers on Linux: EIO, ENOTCONN, ESHUTDOWN, EHOSTDOWN, ESTALE, EREMOTEIO
_DISK = r"\[Errno (?:5|107|108|112|116|121)\]"

# CUDA errors, as cudaGetErrorString and torch word them
_GPU = "|".join(
    [
        "uncorrectable ECC error",
        "uncorrectable NVLink error",
        "hardware stack error",
        "GPU is lost",
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "no CUDA-capable device is detected",
        "No CUDA GPUs are available",
        "CUDA driver initialization failed",
        "system not yet initialized",
        "CUDA unknown error",
    ]
)

_OF_AN_ERROR = (
    (r"CUDA out of memory|(?i:CUDA (?:error:|failure) '?out of memory)", GPU_MEMORY),
    (r"(?:CUDNN|CUBLAS)_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED)", GPU_LIBRARY),
    ("device-side assert triggered", GPU_ASSERT),
    (r"^(?:\w+\.)*MgpuError: checkpoint .* is damaged", DAMAGED),
    (_GPU, GPU),
    (r"^(?:\w+\.)*(?:ModuleNotFoundError|ImportError)\b", IMPORT),
    (r"^UserError: target .* fails on import: .*\b(?:ModuleNotFound|Import)Error\b", IMPORT),
    (r"^UserError: (?:target|config of|the annotation of) ", TARGET),
    (r"\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded", DISK_FULL),
    (_DISK, DISK),
    (r"[Cc]ollective operation timeout|Timed out waiting \d+ms for (?:recv|send)", TIME_OUT),
    (r"EADDRINUSE|[Aa]ddress already in use", PORT),
    (r"^(?:\w+\.)*ForgeryError\b", FORGERY),
    (r"^(?:\w+\.)*RendezvousError\b", RENDEZVOUS),
    (r"insufficient shared memory|\bBus error\b", SHARED_MEMORY),
    (r"^(?:\w+\.)*MemoryError\b|can't allocate memory|std::bad_alloc|Cannot allocate memory", HOST_MEMORY),
    (r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)", HOST_MEMORY),
    (r"returned nan values|^(?:\w+\.)*FloatingPointError\b", NOT_A_NUMBER),
    (r"NCCL error.*(?:invalid usage|invalid argument)|Duplicate GPU detected", PROGRAM),
    # torch's store raises this one, with "Broken pipe" and other messages
    (r"^(?:\w+\.)*DistNetworkError\b|Connection (?:closed|reset) by peer", CONNECTION),
    (r"gloo/\S+ .*Broken pipe|NCCL error", CONNECTION),
    # last: what the trials failed of may be in its message
    (r"^(?:\w+\.)*SweepFailed\b", TRIALS),
)
"""Causes by an error's name and message."""

_OF_AN_END = (
    # as the local executor and srun word it
    (r"^ranks? \S+ on \S+: Out Of Memory$", HOST_MEMORY),
    (r"^(?:[\w\- ]+ on \S+|[\w ]+) was (?:ended|killed) by SIGKILL|^ranks? \S+ on \S+: Killed$", KILLED),
    (r"^[\w\- ]+ (?:on \S+ )?was (?:ended|killed) by SIGBUS|^ranks? \S+ on \S+: Bus error", SHARED_MEMORY),
    (r"was (?:ended|killed) by SIGTERM|^ranks? \S+ on \S+: Terminated$|, asked to end$", TERMINATED),
    (rf": {PREFIX}command '.*' (?:is not|may not|does not) |: slurmstepd\S*: error: execve\(\): ", NO_COMMAND),
    (
        r"was (?:ended|killed) by SIG(?:SEGV|ABRT|ILL|FPE)|: (?:Segmentation fault|Aborted|Illegal instruction)",
        CRASH,
    ),
    ("^the batch step could not serve the rendezvous", RENDEZVOUS),
    (r"^srun waited for \d+ s, and SLURM did not start the ranks' step", HELD_UP),
    (r"(?i)^srun: (?:error|fatal): .*(?:launch|node failure|communication|timed out)", LAUNCH),
    # a controller or step manager that does not answer, or not yet
    (r"(?i)^srun: (?:error|fatal): .*(?:confirm allocation|contact slurm|zero bytes|unexpected message)", LAUNCH),
)
"""Causes by the end of a process that reported no error."""

_OF_A_STATE = {
    states.TIMEOUT: TIME_LIMIT,
    states.PREEMPTED: PREEMPTED,
    states.NODE_FAIL: NODE,
    states.CANCELLED: CANCELLED,
    states.OUT_OF_MEMORY: HOST_MEMORY,
}

_OF_A_REASON = (
    (r"its supervisor process (?:is gone|was killed)", SUPERVISOR),
    # the first wording of each is that of version 0.1
    (r"^two attempts in a row (?:ended by|reached) the time limit", NO_CHECKPOINT_IN_TIME),
    ("^what it waited for is not to be found |^the run it waited for no longer exists ", DEPENDENCY_GONE),
    (r"^waited for run .*, which is |^the run it waited for ", DEPENDENCY),
)

LAST_LINES = 20
"""Number of lines at the end of a log that are searched for its last error."""

CRASHED = "Fatal Python error: "
"""What faulthandler writes before the stacks of a process that crashes in native code."""

_STACK = re.compile(
    r"(?:Current t|T)hread 0x|File \"[^\"]+\", line \d+ in |<no Python frame>|Garbage-collecting|Extension modules: "
)
"""Lines of the stacks that faulthandler writes: no errors, and often more than `LAST_LINES`."""

_RANK = re.compile(r"^\[rank\d+\]: ?")
_AN_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b")
_NODE = re.compile(r"ranks? \S+ on (?P<ranks>[\w.-]+)(?:: | )|srun: error: .*(?:failed )?on node (?P<launch>[\w.-]+)")


def cause_of(failure: Failure, said: str = "") -> Cause:
    """Return the cause of a `failure.json`.

    Args:
        failure: with `consequence` if no rank had an error of its own, but some saw another rank end.
        said: the end of the log of the rank that failed first, if it left no record of an error.
    """
    if failure.error == STUCK or failure.is_silent:
        return NO_PROGRESS
    message = failure.message
    if failure.error is not None:
        fallback = CONNECTION if failure.consequence else PROGRAM
        return _found(_OF_AN_ERROR, f"{failure.error}: {message}") or fallback
    if not message:
        return UNKNOWN
    return _told(said) or _found(_OF_AN_END, message) or PROGRAM


def _told(said: str) -> Cause | None:
    """Return the cause of the last error in a log; lines after it may come from the process's shutdown."""
    # this package's own lines are warnings that do not end a run
    own = [line.strip() for line in said.splitlines() if not line.startswith(PREFIX)]
    lines = [_RANK.sub("", line) for line in own if line and not _STACK.match(line)]
    for line in reversed(lines[-LAST_LINES:]):
        cause = _found(_OF_AN_ERROR, line)
        if cause is not None or _AN_ERROR.match(line):
            return cause
    return None


def cause_of_state(state: str) -> Cause | None:
    """Return the cause of a SLURM state in which a run ended; None if the state does not tell."""
    return _OF_A_STATE.get(state)


def cause_of_reason(reason: str) -> Cause | None:
    """Return the cause that the reason of a run's state names, unless that is a failure of its ranks."""
    return _found(_OF_A_REASON, reason)


def _found(table: Sequence[tuple[str, Cause]], text: str) -> Cause | None:
    # compiled here, and kept by `re`: commands that only name a cause do not need the patterns
    return next((cause for pattern, cause in table if re.search(pattern, text)), None)


def node_of(failure: Failure, cause: Cause) -> str | None:
    """Return the node of a failure, if it is one node and known; None if the reporting rank only saw a consequence."""
    if cause in (CONNECTION, TIME_OUT, RENDEZVOUS) or failure.consequence:
        return None
    named = _NODE.match(failure.message)
    node: str | None = failure.node or (named and (named["ranks"] or named["launch"]))
    return node


def first_stuck(records: Sequence[Failure], world_size: int) -> Failure | None:
    """Return the record of the rank that holds up the others, if some recorded that they are stuck.

    A rank that left no record gets a substitute.

    Args:
        records: the records of the ranks of an attempt that have left one.
    """
    stuck = sorted((each for each in records if each.error == STUCK), key=lambda each: each.rank or 0)
    if not stuck or any(each.error != STUCK and not each.consequence for each in records):
        # a rank's own error takes precedence
        return None
    silent = sorted(set(range(world_size)) - {each.rank for each in records})
    if not silent or not all(each.consequence for each in stuck):
        # of the waiting ranks, the one that is furthest behind
        first = min(stuck, key=lambda each: (each.consequence, each.collectives))
        other = next((each for each in stuck if each.doing != first.doing), None)
        if not first.consequence or other is None:
            return first
        # they may wait for each other
        return replace(first, message=f"{first.message}, and rank {other.rank} {other.doing}")
    ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    waits = stuck[0]
    message = f"{ranks} stopped responding, and rank {waits.rank} made {waits.message}"
    return Failure(rank=silent[0], time=waits.time, is_silent=True, message=message)
