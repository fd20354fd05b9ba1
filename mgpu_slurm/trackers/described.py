"""Describe runs and trials to trackers: who they are, their config, and how they stand."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from mgpu_slurm.core.files import read_json
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.flat_config import flattened, identity
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.trackers.tracker import Status, TrackedRun

_FAILED = (states.FAILED, states.OUT_OF_MEMORY, states.NODE_FAIL)
_WAITING = (states.PENDING, states.REQUEUED)
_OUTCOMES: dict[str, Status] = {"COMPLETE": "completed", "PRUNED": "completed", "FAIL": "failed"}
"""States in the outcome of a trial."""


@dataclass(frozen=True)
class Standing:
    """How a run stands."""

    status: Status
    state: str
    """The project's own word for it."""
    is_final: bool = False
    """Whether no attempt can follow, so that all reports are settled."""
    ended: str | None = None
    attempts: int = 0

    @property
    def tags(self) -> dict[str, str]:
        return {"mgpu.state": self.state, "mgpu.attempts": str(self.attempts)}


def describe(folder: RunFolder, spec: Spec) -> TrackedRun:
    """Return what trackers are told of a run.

    Args:
        spec: of the run, or of its whole group.
    """
    if folder.task is not None and spec.tasks is not None:
        spec = spec.of_task(folder.task)
    target, config = identity(spec)
    config |= _own_config(folder)
    environment = read_json(folder.environment) or {}
    return TrackedRun(
        name=folder.run,
        # a study of the same name may be started again later
        key=uuid.uuid5(uuid.NAMESPACE_OID, f"{folder.run} {spec.submitted}").hex[:12],
        folder=folder.path,
        started=records.read_state(folder).started or spec.submitted,
        group=None if folder.group == folder else folder.group.run,
        is_trial=folder.is_trial,
        config=config,
        tags={"mgpu.target": target},
        commit=environment.get("commit"),
    )


def _own_config(folder: RunFolder) -> Config:
    """Return the values of a trial, or of a run whose defaults were not known when it was submitted."""
    if folder.config.exists():
        return flattened(configs.read_yaml(folder.config))
    return flattened(read_json(folder.parameters) or {}) if folder.is_trial else {}


def standing(folder: RunFolder, is_job_over: bool) -> Standing:
    """Return how a run stands.

    Args:
        is_job_over: whether its job, or that of its worker, has ended.
    """
    if folder.is_trial:
        return _standing_of_trial(folder, is_job_over)
    state = records.read_state(folder)
    status: Status = "running"
    word = state.state
    if state.state == states.COMPLETED:
        status = "completed"
    elif state.state in _FAILED:
        status = "failed"
    elif state.state in states.TERMINAL:
        status = "stopped"
    elif is_job_over:
        # SLURM ends a job without a word in the state
        status = "waiting" if state.state in _WAITING else "stopped"
        word = state.state if status == "waiting" else "STOPPED"
    return Standing(status, word, status == "completed", state.ended, records.attempts_started(folder))


def _standing_of_trial(folder: RunFolder, is_job_over: bool) -> Standing:
    attempts = records.attempts_started(folder)
    # the run of a trial with one of its seeds ends with the trial at the latest
    for each in dict.fromkeys((folder, RunFolder(folder.path.parent.parent))):
        for outcome in (each.result, each.failure) if each.is_trial else ():
            found = read_json(outcome)
            if found is not None:
                state = str(found.get("state", states.UNKNOWN))
                status = _OUTCOMES.get(state, "completed")
                return Standing(status, state, True, found.get("ended"), attempts)
    return Standing("waiting" if is_job_over else "running", states.RUNNING, attempts=attempts)
