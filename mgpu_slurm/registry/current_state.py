"""The state of runs as it is now, also if nobody was there to write down that it has changed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from typing import Any

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors import held_allocation, slurm_states, supervisors
from mgpu_slurm.registry.permissions import is_own
from mgpu_slurm.slurm import accounting, sbatch, site, termination

State = dict[str, Any]

NEVER_ARRIVED: State = {
    "state": states.FAILED,
    "reason": "never arrived in SLURM's queue; `resume` submits it again",
}

_SUPERVISOR_LOST = "lost: its supervisor process is gone (killed, or the machine was restarted); `resume` goes on"

_ELSEWHERE = "as it was last seen: its job is on cluster {}, and this is {}"

_SILENT = "as it was last seen: SLURM's controller does not answer"


def state(folder: RunFolder) -> State:
    return current([folder])[0][1]


def current(asked: Iterable[RunFolder], note: Note = quiet) -> list[tuple[RunFolder, State]]:
    """How runs stand now, those of a group one by one: as recorded, and for those not known to have ended, as their
    executor knows.

    One squeue serves all of them, and one sacct those that it has forgotten.

    Args:
        note: hears that the cluster does not answer, or is not the one to ask.
    """
    found = [pair for folder in asked for pair in recorded(folder)]
    asks = [pair for pair in found if states.is_alive(pair[1]["state"]) and _is_slurms_to_tell(pair[1])]
    here = site.cluster_name() if any(state["slurm_cluster"] for _, state in asks) else None
    away = sorted({state["slurm_cluster"] for _, state in asks if _is_elsewhere(state, here)})
    known = slurm_states.ask({folder: state["job_id"] for folder, state in asks if _is_asked(state, here)}, note)
    if known is None or (away and here is None):
        silent = "SLURM's controller does not answer" if shutil.which("squeue") else "there is no squeue on PATH here"
        note(f"{silent}: runs are taken as they were last seen")
    elif away:
        note(f"this is cluster {here}: runs of {', '.join(away)} are taken as they were last seen")
    return [(folder, _true(folder, state, known, here)) for folder, state in found]


def _is_slurms_to_tell(state: State) -> bool:
    """Of a run inside an allocation only where its supervisor does not vouch for it."""
    if state["executor"] == "allocation":
        return not (supervisors.is_here(state) and supervisors.is_supervised(state))
    return bool(state["executor"] == "slurm")


def _is_asked(state: State, here: str | None) -> bool:
    return state["job_id"] is not None and not _is_elsewhere(state, here)


def _is_elsewhere(state: State, here: str | None) -> bool:
    """Whether its job is another cluster's, which shares this one's files: here its id is nobody's, or another job's.

    Args:
        here: this cluster; None where that is not to be found out.
    """
    return state["slurm_cluster"] not in (None, here)


def check_are_of_this_cluster(found: Iterable[State]) -> None:
    """Refuses what SLURM is to be asked for these runs, where one has its job on another cluster.

    Raises:
        ClusterError: one has.
    """
    named = [state for state in found if state["slurm_cluster"]]
    here = site.cluster_name() if named else None
    for state in named:
        if here is not None and _is_elsewhere(state, here):
            raise ClusterError(
                f"run {state['run']} has its job on cluster {state['slurm_cluster']}, and this is {here}:"
                " call this on a login node there"
            )


def recorded(folder: RunFolder) -> list[tuple[RunFolder, State]]:
    """As written down, the runs of a group one by one, with the ids of jobs that have not started."""
    found = records.read_states(folder)
    if any(state["executor"] == "slurm" and state["job_id"] is None for _, state in found):
        submissions = _confirmed(folder.group)
        for member, recorded in found:
            if recorded["job_id"] is None and states.is_alive(recorded["state"]):
                recorded |= submissions.get(member.task, {})
    return found


def _confirmed(folder: RunFolder) -> dict[int | None, State]:
    """The job ids of a run or group by task, and the end of what never arrived in SLURM's queue."""
    found: dict[int | None, State] = {}
    for submission in records.submissions(folder):
        job_id, arrived = submission.job_id, not submission.refused
        if submission.is_unconfirmed:
            job_id, arrived = _looked_for(folder, submission)
        for task in submission.tasks or [None]:
            found[task] = {"job_id": submission.job_of(task, job_id)} if arrived else NEVER_ARRIVED
    return found


def look_for_jobs(folder: RunFolder) -> None:
    """Writes down the jobs of a run or group that SLURM has got and nobody knows of yet."""
    for submission in records.submissions(folder):
        if submission.job_id is None and not submission.refused:
            _looked_for(folder, submission)


def _looked_for(folder: RunFolder, submission: records.Submission) -> tuple[str | None, bool]:
    """The job id of a submission that was not confirmed, and whether it may have arrived, or still may."""
    if not is_own(folder) or _is_elsewhere(records.read_state(folder), site.cluster_name()):
        # the jobs of others are not looked through, and those of another cluster cannot be
        return None, True
    try:
        job_id = sbatch.find(folder, submission.token)
    except ClusterError:
        return None, True
    if job_id is not None:
        records.record_event(folder, "submitted", job_id=job_id, token=submission.token)
    return job_id, job_id is not None or not submission.is_over or _may_be_hidden(folder, submission)


def _may_be_hidden(folder: RunFolder, submission: records.Submission) -> bool:
    """Return whether a job may be in the queue that squeue does not list."""
    named = accounting.named(folder.run, submission.begun)
    if named is None:
        return not slurm_states.is_missing_for_long(folder, submission.token)
    return any(states.is_alive(start.state) for start in named)


def _true(folder: RunFolder, state: State, known: dict[RunFolder, State] | None, here: str | None) -> State:
    if not states.is_alive(state["state"]):
        return state
    if state["executor"] == "local":
        return _true_local(folder, state)
    if _is_slurms_to_tell(state) and _is_elsewhere(state, here):
        seen = _SILENT if here is None else _ELSEWHERE.format(state["slurm_cluster"], here)
        return state | {"reason": state["reason"] or seen}
    if state["executor"] == "allocation":
        return _true_held(folder, state, known)
    if known is None:
        return state | {"reason": state["reason"] or _SILENT}
    if state["job_id"] is None:
        return state
    facts = known[folder]
    if facts in slurm_states.NO_WORD:
        if not is_own(folder):
            # a site may keep the jobs of others to itself
            return state
        facts = termination.ending(folder, state["job_id"]) or facts
    facts = slurm_states.settled(folder, state, facts)
    is_listed = facts.get("reason") != slurm_states.UNLISTED["reason"]
    if states.is_alive(facts["state"]) and is_listed:
        return state | facts
    if (newer := _newer(folder, state)) is not None:
        return newer
    if not is_listed:
        return state | facts
    if facts == slurm_states.DROPPED and records.attempts_started(folder):
        facts = slurm_states.LOST
    if facts in (slurm_states.LOST, slurm_states.LOST_SO_FAR):
        # the controller answers, and neither it nor accounting nor the run's own records know of an end
        return state | facts
    if facts["state"] == states.FAILED:
        facts = facts | {"reason": termination.before_the_ranks(folder, state["job_id"]) or facts["reason"]}
    # one that never started has left no word of its job itself
    return _ended_unseen(folder, {"job_id": state["job_id"]} | facts)


def _newer(folder: RunFolder, state: State) -> State | None:
    """Return how a run stands that has ended, or started again, while SLURM was asked; None if it has not."""
    again = records.read_state(folder)
    has_moved = again["job_id"] not in (None, state["job_id"]) or again["attempts"] > state["attempts"]
    return again if has_moved or not states.is_alive(again["state"]) else None


def _true_local(folder: RunFolder, state: State) -> State:
    if state.get("supervisor") is None or supervisors.is_supervised(state):
        return state
    return _ended_unseen(folder, {"state": states.FAILED, "reason": _SUPERVISOR_LOST})


def _true_held(folder: RunFolder, state: State, known: dict[RunFolder, State] | None) -> State:
    """Of a run inside an allocation: it lives while both its supervisor and the allocation do."""
    if not _is_slurms_to_tell(state):
        return state
    job_id = state["job_id"]
    if known is None:
        return state | {"reason": state["reason"] or _SILENT}
    job = state if job_id is None else slurm_states.settled(folder, state, known[folder])
    if not states.is_alive(job["state"]):
        of_run, reason = held_allocation.ending(job_id, job["state"])
        ended = {"ended": job["ended"]} if "ended" in job else {}
        return _ended_unseen(folder, {"state": of_run, "reason": reason, **ended})
    if job.get("reason") == slurm_states.UNLISTED["reason"]:
        return job
    if supervisors.is_here(state):
        return _ended_unseen(folder, {"state": states.FAILED, "reason": _SUPERVISOR_LOST})
    return state


def _ended_unseen(folder: RunFolder, facts: State) -> State:
    """Writes down how a run ended where its job or supervisor did not: SLURM forgets."""
    # it may have written its last word between the two looks, or have gone on as another job
    again = records.read_state(folder)
    if not states.is_alive(again["state"]) or again["job_id"] not in (None, facts.get("job_id", again["job_id"])):
        return again
    facts = {"ended": records.last_sign_of_life(folder)} | facts
    # a run of somebody else's stays as it is on disk
    with contextlib.suppress(OSError):
        folder.create_task()
        records.update_state(folder, sync=True, **facts)
    return again | facts
