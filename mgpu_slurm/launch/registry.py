"""Which runs there are, and how they stand: found from any folder, true also when nobody was there to write it down."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mgpu_slurm import accounting, paths, records, sbatch, slurm, states
from mgpu_slurm.errors import ClusterError, UserError, nearest
from mgpu_slurm.launch import allocation, cleaning, fates, last_words, local
from mgpu_slurm.paths import RunFolder, append_jsonl, read_jsonl
from mgpu_slurm.patience import Note, quiet
from mgpu_slurm.wording import program

State = dict[str, Any]

_NEVER_ARRIVED: State = {
    "state": states.FAILED,
    "reason": "never arrived in SLURM's queue; `resume` submits it again",
}

_SUPERVISOR_LOST = "lost: its supervisor process is gone (killed, or the machine was restarted); `resume` goes on"
_ELSEWHERE = "as it was last seen: its job is on cluster {}, and this is {}"
_SILENT = "as it was last seen: SLURM's controller does not answer"

_JOB_ID = re.compile(r"\d+(_\d+)?")
_MADE_UNIQUE = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}$")
"""What a submission adds to the name of a run."""


def _index() -> Path:
    return paths.state_home() / "runs-folders.jsonl"


def remember_root(root: Path) -> None:
    """Adds a runs folder to this user's index, once."""
    index = _index()
    if any(record["folder"] == str(root) for record in read_jsonl(index)):
        return
    # without a home that can be written, runs are still found from their own folder
    with contextlib.suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(index, {"folder": str(root)})


def roots() -> list[Path]:
    """The runs folder of the working directory, then every other one that this user has used and that still exists."""
    known = [paths.runs_root(), *(Path(record["folder"]) for record in read_jsonl(_index()))]
    # two ways to the same folder are one
    found = dict.fromkeys(root.resolve() for root in known)
    return [root for root in found if os.path.isdir(root) and os.access(root, os.R_OK | os.X_OK)]


def folders(root: Path) -> list[RunFolder]:
    """The runs and groups in a runs folder, but for those of others who keep theirs to themselves."""
    return [
        RunFolder(path)
        for path in root.iterdir()
        if not path.name.startswith(".") and os.path.exists(path / "state.json")
    ]


def all_groups(note: Note = quiet) -> list[RunFolder]:
    """Every group, and every run of its own, newest first; `note` is as for `current`."""
    return list(dict.fromkeys(folder.group for folder, _ in all_states(note)))


def all_states(note: Note = quiet) -> list[tuple[RunFolder, State]]:
    """Every run and how it stands, newest first, the runs of a group in their order; `note` is as for `current`."""
    found = current([folder for root in roots() for folder in folders(root)], note)
    gone = _removed(found)
    left = [pair for pair in found if pair[0].group not in gone]
    newest: dict[RunFolder, str] = {}
    for folder, state in left:
        newest[folder.group] = max(newest.get(folder.group, ""), state["submitted"] or "")
    # a part of a group may have been submitted again
    return sorted(left, key=lambda pair: (newest[pair[0].group], pair[0].group.run), reverse=True)


def _removed(found: list[tuple[RunFolder, State]]) -> set[RunFolder]:
    """Of submissions that were killed before SLURM had the job nothing is left."""
    here = {folder.group for folder, state in found if state["reason"] != _NEVER_ARRIVED["reason"]}
    gone = {folder.group for folder, _ in found} - here
    unused = {folder for folder in gone if not folder.tasks.exists() and not list(folder.logs.glob("*"))}
    for folder in unused:
        # somebody else's stays
        with contextlib.suppress(UserError):
            cleaning.delete_run(folder)
    return unused


def find(name: str) -> RunFolder:
    """The run or group of that name, or whose name begins so, or with that job id; `<group>/<index>` is one run of it.

    Raises:
        UserError: there is none, or there are several, or it is somebody else's who keeps it closed.
    """
    if os.path.exists(Path(name) / "spec.yaml"):
        return RunFolder(Path(name).absolute())
    head, slash, index = name.rpartition("/")
    if slash and index.isdigit():
        return _task(find(head), int(index))
    known = [folder for root in roots() for folder in folders(root)]
    found = (
        [folder for folder in known if folder.run == name]
        or [folder for folder in known if _MADE_UNIQUE.sub("", folder.run) == name]
        or [folder for folder in known if folder.run.startswith(name)]
        or (_with_job(name, known) if _JOB_ID.fullmatch(name) else [])
    )
    here = [folder for folder in found if folder.path.parent == paths.runs_root().resolve()]
    if len(here) == 1:
        # one of another project may have the same name
        return here[0]
    if len(found) > 1 and len({folder.run for folder in found}) == 1:
        places = ", ".join(str(folder.path) for folder in found[-5:])
        raise UserError(f"run {name!r} is there more than once: name one by its folder: {places}")
    if len(found) > 1:
        names = ", ".join(sorted(folder.run for folder in found)[-5:])
        raise UserError(f"run {name!r} is not clear, it may be {names}: give more of the name")
    if not found:
        _refuse_closed(name)
        raise UserError(f"there is no run {name!r}{_hint(name, known)}: see `{program()} status`")
    return found[0]


def _refuse_closed(name: str) -> None:
    """Tells a run that may not be looked into from one that is not there."""
    for path in [Path(name), *(root / name for root in roots())]:
        try:
            os.stat(path / "spec.yaml")
        except PermissionError:
            raise UserError(
                f"run {str(path)!r} is not open to you: its owner shares runs by `readable-by: group` in mgpu.yaml,"
                " in a runs folder of a group that both are in"
            ) from None
        except OSError:
            continue


def _task(folder: RunFolder, task: int) -> RunFolder:
    runs = len(members(folder))
    if not is_group(folder):
        raise UserError(f"run {folder.run} is one run, and no group with a run {task}")
    if task >= runs:
        raise UserError(f"group {folder.run} has runs {folder.run}/0 to {folder.run}/{runs - 1}, and no {task}")
    return folder.of_task(task)


def _with_job(job_id: str, known: list[RunFolder]) -> list[RunFolder]:
    """Runs by `42`, groups by the id of their array, and a run of a group by `42_3`."""
    array, _, _ = job_id.partition("_")
    found = []
    for folder in known:
        arrays = {submission.job_id for submission in records.submissions(folder)}
        members = [member for member, state in _recorded(folder) if state["job_id"] == job_id]
        # a run of a group that goes on alone is known to itself only
        found += [folder] if job_id in arrays else members or ([folder] if array in arrays else [])
    return found


def is_group(folder: RunFolder) -> bool:
    return records.read_state(folder)["tasks"] is not None


def members(folder: RunFolder) -> list[RunFolder]:
    """The runs of a group; a run of its own is its only one."""
    tasks = records.read_state(folder)["tasks"]
    return [folder] if tasks is None else [folder.of_task(task) for task in range(tasks)]


def _hint(name: str, known: list[RunFolder]) -> str:
    hint = nearest(name, [folder.run for folder in known])
    return hint if hint.startswith(" (did") else ""


def state(folder: RunFolder) -> State:
    return current([folder])[0][1]


def current(asked: Iterable[RunFolder], note: Note = quiet) -> list[tuple[RunFolder, State]]:
    """How runs stand now, those of a group one by one: as recorded, and for those not known to have ended, as their
    executor knows.

    One squeue serves all of them, and one sacct those that it has forgotten.

    Args:
        note: hears that the cluster does not answer, or is not the one to ask.
    """
    found = [pair for folder in asked for pair in _recorded(folder)]
    asks = [pair for pair in found if states.is_alive(pair[1]["state"]) and _is_slurms_to_tell(pair[1])]
    here = slurm.cluster_name() if any(state["slurm_cluster"] for _, state in asks) else None
    away = sorted({state["slurm_cluster"] for _, state in asks if _is_elsewhere(state, here)})
    known = fates.ask({folder: state["job_id"] for folder, state in asks if _is_asked(state, here)}, note)
    if known is None or (away and here is None):
        silent = "SLURM's controller does not answer" if shutil.which("squeue") else "there is no squeue on PATH here"
        note(f"{silent}: runs are taken as they were last seen")
    elif away:
        note(f"this is cluster {here}: runs of {', '.join(away)} are taken as they were last seen")
    return [(folder, _true(folder, state, known, here)) for folder, state in found]


def _is_slurms_to_tell(state: State) -> bool:
    """Of a run inside an allocation only where its supervisor does not vouch for it."""
    if state["executor"] == "allocation":
        return not (local.is_here(state) and local.is_supervised(state))
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
    here = slurm.cluster_name() if named else None
    for state in named:
        if here is not None and _is_elsewhere(state, here):
            raise ClusterError(
                f"run {state['run']} has its job on cluster {state['slurm_cluster']}, and this is {here}:"
                " call this on a login node there"
            )


def _recorded(folder: RunFolder) -> list[tuple[RunFolder, State]]:
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
            found[task] = {"job_id": submission.job_of(task, job_id)} if arrived else _NEVER_ARRIVED
    return found


def look_for_jobs(folder: RunFolder) -> None:
    """Writes down the jobs of a run or group that SLURM has got and nobody knows of yet."""
    for submission in records.submissions(folder):
        if submission.job_id is None and not submission.refused:
            _looked_for(folder, submission)


def _looked_for(folder: RunFolder, submission: records.Submission) -> tuple[str | None, bool]:
    """The job id of a submission that was not confirmed, and whether it may have arrived, or still may."""
    if not _is_own(folder) or _is_elsewhere(records.read_state(folder), slurm.cluster_name()):
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
        return not fates.is_missing_for_long(folder, submission.token)
    return any(states.is_alive(start.state) for start in named)


def _is_own(folder: RunFolder) -> bool:
    return folder.group.path.stat().st_uid == os.geteuid()


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
    if facts in fates.NO_WORD:
        if not _is_own(folder):
            # a site may keep the jobs of others to itself
            return state
        facts = last_words.ending(folder, state["job_id"]) or facts
    facts = fates.settled(folder, state, facts)
    is_listed = facts.get("reason") != fates.UNLISTED["reason"]
    if states.is_alive(facts["state"]) and is_listed:
        return state | facts
    if (newer := _newer(folder, state)) is not None:
        return newer
    if not is_listed:
        return state | facts
    if facts == fates.DROPPED and records.attempts_started(folder):
        facts = fates.LOST
    if facts in (fates.LOST, fates.LOST_SO_FAR):
        # the controller answers, and neither it nor accounting nor the run's own records know of an end
        return state | facts
    if facts["state"] == states.FAILED:
        facts = facts | {"reason": last_words.before_the_ranks(folder, state["job_id"]) or facts["reason"]}
    # one that never started has left no word of its job itself
    return _ended_unseen(folder, {"job_id": state["job_id"]} | facts)


def _newer(folder: RunFolder, state: State) -> State | None:
    """Return how a run stands that has ended, or started again, while SLURM was asked; None if it has not."""
    again = records.read_state(folder)
    has_moved = again["job_id"] not in (None, state["job_id"]) or again["attempts"] > state["attempts"]
    return again if has_moved or not states.is_alive(again["state"]) else None


def _true_local(folder: RunFolder, state: State) -> State:
    if state.get("supervisor") is None or local.is_supervised(state):
        return state
    return _ended_unseen(folder, {"state": states.FAILED, "reason": _SUPERVISOR_LOST})


def _true_held(folder: RunFolder, state: State, known: dict[RunFolder, State] | None) -> State:
    """Of a run inside an allocation: it lives while both its supervisor and the allocation do."""
    if not _is_slurms_to_tell(state):
        return state
    job_id = state["job_id"]
    if known is None:
        return state | {"reason": state["reason"] or _SILENT}
    job = state if job_id is None else fates.settled(folder, state, known[folder])
    if not states.is_alive(job["state"]):
        of_run, reason = allocation.ending(job_id, job["state"])
        ended = {"ended": job["ended"]} if "ended" in job else {}
        return _ended_unseen(folder, {"state": of_run, "reason": reason, **ended})
    if job.get("reason") == fates.UNLISTED["reason"]:
        return job
    if local.is_here(state):
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
