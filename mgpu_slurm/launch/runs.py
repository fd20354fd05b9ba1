"""A run seen from outside: its state, its result, the ways to act on it. The command line and notebooks share it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mgpu_slurm import config as configs
from mgpu_slurm import paths, slurm, states
from mgpu_slurm.errors import ClusterError, RunFailed, UserError
from mgpu_slurm.launch import cleaning, local, registry
from mgpu_slurm.launch import submit as submitting
from mgpu_slurm.launch.plan import Request
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.spec import read_spec


class Handle:
    """One run, in this process or another, now or next week."""

    def __init__(self, folder: RunFolder) -> None:
        self.files = folder

    def __repr__(self) -> str:
        return f"<run {self.name} {self.state}>"

    @property
    def name(self) -> str:
        return self.files.run

    @property
    def folder(self) -> Path:
        return self.files.path

    @property
    def facts(self) -> dict[str, Any]:
        """All that `status` shows of the run."""
        return registry.state(self.files)

    @property
    def state(self) -> str:
        return str(self.facts["state"])

    @property
    def is_command(self) -> bool:
        """Whether it runs a command, which saves only what it saves by itself."""
        return read_spec(self.files).target.is_command

    def wait(self, timeout: float | None = None) -> str:
        """Blocks until the run has ended and returns its state.

        Args:
            timeout: seconds, None for as long as it takes.

        Raises:
            TimeoutError: it has not ended in that time.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        pause = 0.05
        watch = registry.Watch(self.files)
        while True:
            state = str(watch.state()["state"])
            if not states.is_alive(state):
                return state
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(f"run {self.name} is still {state} after {timeout} s")
            time.sleep(pause)
            pause = min(1.0, pause * 1.2)

    def result(self) -> dict[str, float]:
        """Waits, and returns what the job function returned, as numbers by name.

        Raises:
            RunFailed: with the first cause.
        """
        state = self.wait()
        if state != "COMPLETED":
            raise RunFailed(f"run {self.name} is {state}: {self.facts['reason']}")
        record = paths.read_json(self.files.result) or {"result": {}}
        result: dict[str, float] = record["result"]
        return result

    def cancel(self) -> bool:
        """Asks the run to save and end; False where it had ended already."""
        facts = self.facts
        if not states.is_alive(facts["state"]):
            return False
        if facts["executor"] == "local":
            return local.cancel(facts)
        if facts["job_id"] is None:
            raise UserError(f"run {self.name} is being submitted: cancel it once `status` shows its job")
        if facts["job_id"] is None:
            raise ClusterError(f"run {self.name}: whether SLURM took its job is not known yet: try again later")
        slurm.run(slurm.scancel_command([facts["job_id"]]))
        return True

    def logs(self, rank: int = 0) -> str:
        """All that a rank has printed, over all attempts."""
        return "".join(path.read_text(errors="replace") for _, path in log_files(self.files, rank))

    def resume(self) -> None:
        """Starts a run that has ended again: the same run, its next attempt, from its newest checkpoint.

        Raises:
            UserError: it is still alive, or has nothing left to do.
        """
        facts = self.facts
        if states.is_alive(facts["state"]):
            raise UserError(f"run {self.name} is {facts['state']}: only a run that has ended can be resumed")
        if facts["state"] == "COMPLETED":
            raise UserError(f"run {self.name} is COMPLETED: there is nothing left to do; submit a new one")
        submitting.restart(self.files, read_spec(self.files))

    def delete(self, only_checkpoints: bool = False) -> None:
        """Deletes the run, or only its checkpoints, from the disk.

        Raises:
            UserError: it is still alive.
        """
        facts = self.facts
        if states.is_alive(facts["state"]):
            raise UserError(f"run {self.name} is {facts['state']}: `mgpu-slurm cancel {self.name}` first")
        if only_checkpoints:
            cleaning.delete_checkpoints(self.files)
        else:
            cleaning.delete_run(self.files)


def log_files(folder: RunFolder, rank: int) -> list[tuple[int, Path]]:
    """Attempt and file of each log of a rank, in order."""
    return sorted((int(path.name.partition("-")[0]), path) for path in folder.logs.glob(f"[0-9]*-{rank}.log"))


def submit(
    target: str | Callable[..., Any] | None = None,
    config: Any = None,
    *,
    executor: str = "auto",
    cluster: str | None = None,
    name: str | None = None,
    signal: str | None = None,
    max_requeues: int | None = None,
    **resources: Any,
) -> Handle:
    """Submits a job function and returns at once.

    Args:
        target: a function `train(run, config)`, also one of a notebook, or a name such as `jobs.digits:train`.
        config: an instance of the function's dataclass, or a mapping of the values that differ from its defaults.
        executor: `auto` (SLURM where there is an sbatch, else local), `slurm` or `local`.
        resources: sbatch's long names with underscores: `nodes=2, gpus_per_node=4, time="1:00:00"`.

    Raises:
        UserError: something in the call is wrong; nothing was started.
        ClusterError: the cluster refused or did not answer; nothing was started.
    """
    values = configs.to_plain(config) if config is not None else {}
    if not isinstance(values, dict):
        raise UserError(f"config: expected a dataclass or a mapping, got {type(config).__name__}")
    request = Request(
        target=target,
        values=values,
        flags=resources,
        executor=executor,
        cluster=cluster,
        name=name,
        signal=signal,
        max_requeues=max_requeues,
    )
    return Handle(submitting.submit(request).plan.folder)


def runs() -> list[Handle]:
    """All runs of this user, newest first."""
    return [Handle(folder) for folder, _ in registry.all_states()]


def find(name: str) -> Handle:
    return Handle(registry.find(name))
