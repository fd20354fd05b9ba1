"""Find how a job ended that did not record it and that SLURM has forgotten, from SLURM's messages in its launch log."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from mgpu_slurm.core import records, states
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.record_types import StateChange

# from slurmstepd's source, req.c; SLURM writes it on the batch step's node before it sends the first signal
_NOTICE = re.compile(
    r"^slurmstepd.*: error: \*\*\* JOB \S+ ON \S+ CANCELLED AT (?P<at>\S+)(?: DUE (?:TO|to) (?P<why>.+))? \*\*\*$",
    re.MULTILINE,
)
_WHY = {
    "TIME LIMIT": states.TIMEOUT,
    "PREEMPTION": states.PREEMPTED,
    "NODE FAILURE": states.NODE_FAIL,
    "TASK FAILURE": states.FAILED,
}
_SCRIPT = r"^\S*/slurm_script: "
_REQUEUED = "JOB REQUEUE"
_TO_THE_SECOND = timedelta(seconds=1)


def ending(folder: RunFolder, job_id: str) -> StateChange | None:
    """Return state, reason and time of a job's end; None if its log does not report one."""
    log = folder.launch_log(job_id)
    notices = list(_NOTICE.finditer(log.read_text(errors="replace"))) if log.exists() else []
    if not notices:
        return None
    at, why = datetime.fromisoformat(notices[-1]["at"]).astimezone(), notices[-1]["why"] or ""
    # all starts of a job write to one log
    if why == _REQUEUED or is_before_last_start(folder, at):
        return None
    state = next((state for words, state in _WHY.items() if why.startswith(words)), states.CANCELLED)
    reason = "cancelled" if state == states.CANCELLED else why.lower()
    return StateChange(state, reason, at.isoformat())


def is_before_last_start(folder: RunFolder, at: datetime) -> bool:
    """Return whether a run has started an attempt after a time."""
    starts = [event.time for event in records.events(folder) if event.event == "started"]
    return bool(starts) and at.astimezone() + _TO_THE_SECOND < datetime.fromisoformat(starts[-1])


def before_the_ranks(folder: RunFolder, job_id: str) -> str | None:
    """Return why a job failed before its ranks started, as far as its log shows; None if they did start."""
    if any(event.event == "started" and event.job_id == job_id for event in records.events(folder)):
        return None
    log = folder.launch_log(job_id)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    # bash prefixes errors with the path of the script's copy on the node
    said = f": {re.sub(_SCRIPT, '', lines[-1].strip())[:200]}" if lines else ""
    return f"its batch script failed before the ranks were started{said}"
