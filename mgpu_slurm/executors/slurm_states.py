"""The states of runs' jobs in SLURM: squeue for all at once, then other commands for jobs that squeue does not list.

A job that squeue does not list is not necessarily gone: accounting has to know its end, or the controller has to report
that it does not know the job, or squeue has to omit it repeatedly. The launch log may show how it ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import read_json, write_json
from mgpu_slurm.core.formatting import printable
from mgpu_slurm.core.retry import Note
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import failures, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState, StateChange
from mgpu_slurm.slurm import accounting, commands, job_identity, jobs
from mgpu_slurm.slurm.accounting import AccountedStart
from mgpu_slurm.slurm.jobs import QueuedJob
from mgpu_slurm.slurm.pending import wait_reasons

LOST = StateChange(
    states.FAILED, "lost: SLURM does not know its job, and its end was not recorded; continue with `resume`"
)
LOST_SO_FAR = StateChange(states.FAILED, "lost: SLURM no longer lists it, and its accounting does not answer")

# SLURM keeps no record of a task that was cancelled while pending if other tasks of its array still exist
DROPPED = StateChange(states.CANCELLED, "cancelled before it started")

UNLISTED = StateChange(reason="not listed by squeue: last known state, as nothing shows that it is gone")
"""For a job that nothing knows about; see `settled`."""

ACCOUNTED_ALIVE = StateChange(reason="not listed by squeue, but alive according to accounting")
"""For a job about which the controller reports nothing. It is not counted as missing; see `settled`."""

UNCERTAIN = (LOST, LOST_SO_FAR, DROPPED, UNLISTED, ACCOUNTED_ALIVE)

GONE_AFTER = 120.0
"""Seconds between the first and last of `ANSWERS_WITHOUT_IT` squeue answers, after which a job counts as gone."""

ANSWERS_WITHOUT_IT = 3

MAX_LOOKUPS = 20
"""Maximum number of jobs for which the controller is asked one by one in a call."""

LOOKUP_SECONDS = 10.0
"""Seconds after which no further job is looked up, so that a busy controller does not hold up `status`."""

NEVER_ARRIVED = StateChange(states.FAILED, "was never queued; `resume` submits it again")
"""The end of a run whose job SLURM never had."""

CANCELLED_FOR = dict.fromkeys(["DependencyNeverSatisfied", "Dependency"], failures.DEPENDENCY.words)
"""Reasons to show for a cancelled job, by squeue's reason for its waiting."""


def ask(job_ids: Mapping[RunFolder, str], note: Note) -> dict[RunFolder, StateChange] | None:
    """Return the states of runs' jobs: from one squeue, and one sacct for those that it does not list.

    Return None if the controller does not answer.

    Args:
        note: called with output of squeue that cannot be parsed.
    """
    if not job_ids:
        return {}
    asked_at = time.time()
    listed = jobs.queued(commands.whole_jobs(job_ids.values()), note)
    if listed is None:
        return None
    found = _listed(job_ids, listed)
    missing = {folder: job_id for folder, job_id in job_ids.items() if folder not in found}
    starts = accounting.accounted(commands.whole_jobs(missing.values())) if missing else []
    found |= _accounted(missing, starts or [])
    forgotten = {folder: job_id for folder, job_id in missing.items() if folder not in found}
    # tasks that had not started when their array was cancelled share one line without task numbers
    arrays = {folder: job_identity.array_id(job_id) for folder, job_id in forgotten.items()}
    found |= _accounted(arrays, starts or []) | _listed(arrays, listed)
    forgotten = {folder: job_id for folder, job_id in forgotten.items() if folder not in found}
    ended = [start.job_id for start in starts or [] if not states.is_alive(start.state)]
    with_others = {job_identity.array_id(job_id) for job_id in [*listed, *ended]}
    gone = _forgotten(forgotten, with_others, LOST if starts is not None else LOST_SO_FAR)
    newest = _newest(forgotten, starts or [])
    alive = (folder for folder, start in newest.items() if gone[folder] == UNLISTED and states.is_alive(start.state))
    gone |= dict.fromkeys(alive, ACCOUNTED_ALIVE)
    # a job that has just written something is alive, whatever SLURM reports
    lost = (folder for folder, state in gone.items() if state in UNCERTAIN and _last_change(folder) > asked_at)
    return found | gone | dict.fromkeys(lost, UNLISTED)


def _listed(job_ids: Mapping[RunFolder, str], listed: Mapping[str, QueuedJob]) -> dict[RunFolder, StateChange]:
    """Return what the controller lists for these jobs, without other jobs that have reused an id."""
    pairs = [(folder, listed.get(job_id)) for folder, job_id in job_ids.items()]
    return {folder: _facts(job) for folder, job in pairs if job is not None and job_identity.belongs_to(folder, job)}


def _accounted(job_ids: Mapping[RunFolder, str], starts: Iterable[AccountedStart]) -> dict[RunFolder, StateChange]:
    """Return the ends of these jobs according to accounting, by the last start of each."""
    return {
        folder: _accounted_facts(folder, start)
        for folder, start in _newest(job_ids, starts).items()
        # accounting may have missed the end of a job that the controller no longer has
        if not states.is_alive(start.state) and not _is_older(folder, start)
    }


def _newest(job_ids: Mapping[RunFolder, str], starts: Iterable[AccountedStart]) -> dict[RunFolder, AccountedStart]:
    """Return the last start of each of these jobs in accounting."""
    by_id: dict[str, list[AccountedStart]] = {}
    for start in starts:
        by_id.setdefault(start.job_id, []).append(start)
    found = {}
    for folder, job_id in job_ids.items():
        own = [start for start in by_id.get(job_id, []) if job_identity.belongs_to(folder, start)]
        if own:
            found[folder] = own[-1]
    return found


def _is_older(folder: RunFolder, start: AccountedStart) -> bool:
    """Return whether a run has started or been requeued since: accounting lags by some seconds."""
    events = [event for event in records.events(folder) if event.event in ("started", "requeued")]
    if start.submit is not None and events and events[-1].event == "requeued":
        return datetime.fromisoformat(start.submit).astimezone() < datetime.fromisoformat(events[-1].time)
    return start.end is not None and is_before_last_start(folder, datetime.fromisoformat(start.end))


def _accounted_facts(folder: RunFolder, start: AccountedStart) -> StateChange:
    is_by_slurm = start.state == states.CANCELLED and not start.is_by_user
    reason = failures.DEPENDENCY.words if is_by_slurm and _has_waited_in_vain(folder) else ""
    return StateChange(start.state, reason, _iso(start.end))


def _has_waited_in_vain(folder: RunFolder) -> bool:
    """Return whether a run that SLURM cancelled by itself had to wait for others to complete.

    The waiting reason in accounting is from some time before the job's end, and may differ.
    """
    with suppress(UserError):
        after = read_spec(folder.group).after
        return not records.attempts_started(folder) and any(entry.startswith("afterok:") for entry in after)
    return False


def _forgotten(
    job_ids: Mapping[RunFolder, str], with_others: Container[str], lost: StateChange
) -> dict[RunFolder, StateChange]:
    """Return the states of jobs that neither squeue nor sacct lists, asking the controller for each of them.

    Args:
        with_others: the arrays of which squeue or sacct lists other tasks.
        lost: the state of a job that the controller does not know.
    """
    found: dict[RunFolder, StateChange] = dict.fromkeys(job_ids, UNLISTED)
    give_up = time.monotonic() + LOOKUP_SECONDS
    for array in commands.whole_jobs(job_ids.values())[:MAX_LOOKUPS]:
        shown = jobs.shown(array)
        if shown is not None:
            own = {folder: job_id for folder, job_id in job_ids.items() if job_identity.array_id(job_id) == array}
            for folder, job_id in own.items():
                is_dropped = job_id != array and array in with_others and lost == LOST
                found[folder] = DROPPED if is_dropped else lost
            found |= _listed(own, {job.job_id: job for job in shown})
        if time.monotonic() > give_up:
            break
    return found


def settled(folder: RunFolder, state: RunState, told: StateChange) -> StateChange:
    """Return what SLURM told with a state: for an unlisted job its last one, until it has been unlisted for long.

    Call this once per answer, because it counts them.
    """
    unlisted = StateChange(state.state, UNLISTED.reason)
    if told == UNLISTED:
        return LOST if is_missing_for_long(folder, state.job_id or "") else unlisted
    with suppress(OSError):
        folder.unlisted.unlink(missing_ok=True)
    return unlisted if told == ACCOUNTED_ALIVE else told


def is_missing_for_long(folder: RunFolder, name: str) -> bool:
    """Count one more squeue answer without a run's job; return whether these were enough, over a long enough time.

    Args:
        name: the id of the job, or the token of its submission.
    """
    noted = read_json(folder.unlisted) or {}
    if noted.get("name") != name or _last_change(folder) > noted["since"]:
        noted = {"name": name, "since": time.time(), "answers": 0}
    noted["answers"] += 1
    with suppress(OSError):
        folder.create_task()
        write_json(folder.unlisted, noted, sync=False)
    return bool(noted["answers"] >= ANSWERS_WITHOUT_IT and time.time() - noted["since"] >= GONE_AFTER)


def _last_change(folder: RunFolder) -> float:
    """Return when a run's processes last wrote something, according to its files."""
    files = [folder.state, *folder.logs.glob("*")]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def _facts(job: QueuedJob) -> StateChange:
    if job.state == states.PENDING:
        return StateChange(job.state, _why_it_waits(job))
    if states.is_alive(job.state):
        # SLURM has no reason for a running job, but the run itself may
        return StateChange(job.state, job.reason or None)
    # SLURM keeps reporting a cancelled job's pending reason
    reason = CANCELLED_FOR.get(job.reason, "cancelled") if job.state == states.CANCELLED else job.reason
    return StateChange(job.state, reason, _iso(job.end))


def _why_it_waits(job: QueuedJob) -> str:
    meaning = wait_reasons.explained(job.reason)
    why = job.reason if meaning is None or meaning.is_plain else f"{job.reason}: {meaning.words}"
    if job.start is None or "held" in job.reason.lower() or wait_reasons.NEVER in why:
        # the expected start is from before it was held
        return why
    start, now = datetime.fromisoformat(job.start), datetime.now()
    if start > now + commands.FORESEEABLE:
        return f"{why}, after jobs that have no time limit"
    # a start in the past is from before it got its nodes
    return f"{why}, expected to start at {job.start.replace('T', ' ')}" if start > now else why


def _iso(local_time: str | None) -> str | None:
    return None if local_time is None else datetime.fromisoformat(local_time).astimezone().isoformat()


# -- the end of a job that SLURM has forgotten, from SLURM's messages in its launch log


# from slurmstepd's source, req.c; SLURM writes it on the batch step's node before it sends the first signal. In
# 26.05, the time is in front instead of the program.
_NOTICE = re.compile(
    r"^(?:slurmstepd.*:|\[\S+\]) error: \*\*\* JOB \S+ ON \S+ CANCELLED AT (?P<at>\S+)"
    r"(?: DUE (?:TO|to) (?P<why>.+))? \*\*\*$",
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
    found = _NOTICE.finditer(log.read_text(errors="replace")) if log.exists() else ()
    # a job's own output may look like one
    notices = [notice for notice in found if commands.time_of(notice["at"]) is not None]
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
    said = f": {printable(re.sub(_SCRIPT, '', lines[-1].strip()))[:200]}" if lines else ""
    return f"its batch script failed before the ranks were started{said}"
