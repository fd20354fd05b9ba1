"""Which runs there are, and how they stand: found from any folder, true also when nobody was there to write it down."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from mgpu_slurm import paths, records, slurm, states
from mgpu_slurm.errors import ClusterError, UserError, nearest
from mgpu_slurm.launch import local
from mgpu_slurm.paths import RunFolder, append_jsonl, read_jsonl

State = dict[str, Any]

ASK_EVERY = {"local": 1.0, "slurm": 15.0}
"""Seconds between two questions to an executor by one who waits; a controller serves thousands."""


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
    return [root for root in dict.fromkeys(root.resolve() for root in known) if root.is_dir()]


def folders(root: Path) -> list[RunFolder]:
    """The runs in a runs folder."""
    return [
        RunFolder(path) for path in root.iterdir() if not path.name.startswith(".") and (path / "state.json").exists()
    ]


def all_states() -> list[tuple[RunFolder, State]]:
    """Every run and how it stands, newest first."""
    found = current([folder for root in roots() for folder in folders(root)])
    return sorted(found, key=lambda pair: pair[1]["submitted"] or "", reverse=True)


def find(name: str) -> RunFolder:
    """The run of that name, or whose name begins so, or with that job id.

    Raises:
        UserError: there is none, or there are several.
    """
    if (Path(name) / "spec.yaml").exists():
        return RunFolder(Path(name).absolute())
    known = [folder for root in roots() for folder in folders(root)]
    exact = [folder for folder in known if folder.run == name]
    found = exact or [folder for folder in known if folder.run.startswith(name)]
    if not found and name.isdigit():
        found = [folder for folder in known if _recorded(folder)["job_id"] == name]
    if len(found) > 1:
        names = ", ".join(sorted(folder.run for folder in found)[-5:])
        raise UserError(f"run {name!r} is not clear: {names}; give more of the name")
    if not found:
        raise UserError(f"there is no run {name!r}{_hint(name, known)}: see `mgpu-slurm status`")
    return found[0]


def _hint(name: str, known: list[RunFolder]) -> str:
    hint = nearest(name, [folder.run for folder in known])
    return hint if hint.startswith(" (did") else ""


def state(folder: RunFolder) -> State:
    return current([folder])[0][1]


class Watch:
    """One run's state, again and again: its record each time, its executor's word not more often than that can bear."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._next_question = 0.0

    def state(self) -> State:
        recorded = _recorded(self._folder)
        if not states.is_alive(recorded["state"]) or time.monotonic() < self._next_question:
            return recorded
        self._next_question = time.monotonic() + ASK_EVERY.get(recorded["executor"], 1.0)
        return state(self._folder)


def current(asked: Iterable[RunFolder]) -> list[tuple[RunFolder, State]]:
    """How runs stand now: as recorded, and for those not known to have ended, as their executor knows.

    One squeue serves all of them.
    """
    found = [(folder, _looked_for(folder, _recorded(folder))) for folder in asked]
    known = _queue([state for _, state in found if states.is_alive(state["state"]) and state["executor"] == "slurm"])
    return [(folder, _true(folder, state, known)) for folder, state in found]


def _recorded(folder: RunFolder) -> State:
    state = records.read_state(folder)
    if state["executor"] == "slurm" and state["job_id"] is None:
        state["job_id"] = records.submitted_job(folder)
    return state


def _looked_for(folder: RunFolder, state: State) -> State:
    """The state with the job id of a submission that was not confirmed, or with its end where it never arrived."""
    if state["executor"] != "slurm" or state["job_id"] is not None or not states.is_alive(state["state"]):
        return state
    token = records.unconfirmed_token(folder)
    if token is None:
        # being submitted at this moment
        return state
    try:
        job_id = slurm.job_marked(token)
    except ClusterError:
        return state
    if job_id is None:
        reason = "never arrived in SLURM's queue; `resume` submits it again"
        return records.update_state(folder, state="FAILED", reason=reason, ended=records.now())
    records.record_event(folder, "submitted", job_id=job_id, token=token)
    return state | {"job_id": job_id}


def _queue(waiting: list[State]) -> dict[str, State] | None:
    """What SLURM says of these runs, by job id: one squeue, and one sacct for those that it has forgotten.

    None where the controller does not answer.
    """
    ids = [state["job_id"] for state in waiting if state["job_id"]]
    if not ids:
        return {}
    queued = slurm.queued(ids)
    if queued is None:
        return None
    known: dict[str, State] = {job_id: _facts(job) for job_id, job in queued.items()}
    forgotten = [job_id for job_id in ids if job_id not in known]
    for start in slurm.accounted(forgotten) if forgotten else []:
        known[start.job_id] = {"state": start.state, "reason": "", **_ended(start.end)}
    return known


def _facts(job: slurm.QueuedJob) -> State:
    if states.is_alive(job.state):
        return {"state": job.state, "reason": job.reason}
    # why it pended is what SLURM goes on to say of a job that was cancelled
    reason = "cancelled" if job.state == states.CANCELLED else job.reason
    return {"state": job.state, "reason": reason, **_ended(job.end)}


def _ended(local_time: str | None) -> State:
    return {} if local_time is None else {"ended": _with_zone(local_time)}


def _with_zone(local_time: str) -> str:
    return datetime.fromisoformat(local_time).astimezone().isoformat()


def _true(folder: RunFolder, state: State, known: dict[str, State] | None) -> State:
    if not states.is_alive(state["state"]):
        return state
    if state["executor"] == "local":
        return _true_local(folder, state)
    if known is None or state["job_id"] is None:
        return state
    facts = known.get(state["job_id"])
    if facts is None:
        # the controller answers, and neither it nor accounting nor the run's own records know of an end
        return state | {"state": "FAILED", "reason": "lost"}
    if states.is_alive(facts["state"]):
        return state | facts
    # the job may have written its last word while SLURM was asked
    again = _recorded(folder)
    if not states.is_alive(again["state"]):
        return again
    facts = {"ended": records.now()} | facts
    # SLURM forgets; a run of somebody else's stays as it is on disk
    with contextlib.suppress(OSError):
        records.update_state(folder, sync=True, **facts)
    return state | facts


def _true_local(folder: RunFolder, state: State) -> State:
    if state.get("supervisor") is None or local.is_supervised(state):
        return state
    # it may have written its last word between the two looks
    again = records.read_state(folder)
    if not states.is_alive(again["state"]):
        return again
    reason = "lost: its supervisor process is gone (killed, or the machine was restarted); `resume` goes on"
    return records.update_state(folder, state="FAILED", reason=reason, ended=records.now())
