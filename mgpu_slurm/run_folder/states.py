"""Every job state of SLURM, and its name in this package."""

from __future__ import annotations

from collections.abc import Sequence

PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETED = "COMPLETED"
FAILED = "FAILED"
CANCELLED = "CANCELLED"
TIMEOUT = "TIMEOUT"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
NODE_FAIL = "NODE_FAIL"
PREEMPTED = "PREEMPTED"
REQUEUED = "REQUEUED"
UNKNOWN = "UNKNOWN"

MAY_RUN = frozenset({RUNNING, UNKNOWN})
"""States in which processes may be running."""

TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED, TIMEOUT, OUT_OF_MEMORY, NODE_FAIL, PREEMPTED})

ALL = TERMINAL | {PENDING, RUNNING, REQUEUED, UNKNOWN}

FAILURES = TERMINAL - {COMPLETED, CANCELLED}

# squeue(1), JOB STATE CODES, and the flags that newer versions show instead
_STATES = {
    ("BOOT_FAIL", "BF"): NODE_FAIL,
    ("CANCELLED", "CA"): CANCELLED,
    ("COMPLETED", "CD"): COMPLETED,
    # allocated, but its nodes are still booting
    ("CONFIGURING", "CF"): PENDING,
    # processes may still write, and a requeue may still follow
    ("COMPLETING", "CG"): RUNNING,
    ("DEADLINE", "DL"): TIMEOUT,
    ("EXPEDITING",): REQUEUED,
    ("FAILED", "F"): FAILED,
    ("LAUNCH_FAILED",): REQUEUED,
    ("NODE_FAIL", "NF"): NODE_FAIL,
    ("OUT_OF_MEMORY", "OOM"): OUT_OF_MEMORY,
    ("PENDING", "PD"): PENDING,
    ("POWER_UP_NODE",): PENDING,
    ("PREEMPTED", "PR"): PREEMPTED,
    ("RECONFIG_FAIL",): REQUEUED,
    ("REQUEUED", "RQ"): REQUEUED,
    ("REQUEUE_FED", "RF"): REQUEUED,
    ("REQUEUE_HOLD", "RH"): REQUEUED,
    ("RESIZING", "RS"): RUNNING,
    ("RESV_DEL_HOLD", "RD"): PENDING,
    # another cluster of the federation took the job: it continues there
    ("REVOKED", "RV"): UNKNOWN,
    ("RUNNING", "R"): RUNNING,
    ("SIGNALING", "SI"): RUNNING,
    # requeued and held, by an exit code that the site chose
    ("SPECIAL_EXIT", "SE"): REQUEUED,
    ("STAGE_OUT", "SO"): RUNNING,
    ("STOPPED", "ST"): RUNNING,
    ("SUSPENDED", "S"): RUNNING,
    ("TIMEOUT", "TO"): TIMEOUT,
}
_BY_NAME = {name: state for names, state in _STATES.items() for name in names}


def from_slurm(text: str) -> str:
    """Return the state for SLURM's long or short name, also `CANCELLED by 1000` or a cut `CANCELLED+`; else UNKNOWN."""
    words = text.split()
    return _BY_NAME.get(words[0].rstrip("+").upper(), UNKNOWN) if words else UNKNOWN


def is_alive(state: str) -> bool:
    """Return whether a job in this state may still be active; an UNKNOWN one may."""
    return state not in TERMINAL


def overall(found: Sequence[str]) -> str:
    """Return one state for several runs: of one that is alive, else of one that did not complete, else COMPLETED."""
    # prefer a running one to a waiting one
    alive = sorted((state for state in found if is_alive(state)), key=lambda state: state != RUNNING)
    ended_badly = [state for state in found if state != COMPLETED]
    return next(iter(alive or ended_badly), COMPLETED)
