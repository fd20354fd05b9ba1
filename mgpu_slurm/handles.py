"""Handles of runs, groups and sweeps: their states, results and operations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import RunFailed, UserError
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import cleanup, current_state, index, lookup, reach, sweep_state, watch
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.resume_overrides import NO_CHANGE, Change


class _Submitted:
    """The common base of a run and a group of runs."""

    def __init__(self, folder: RunFolder) -> None:
        self.files = folder

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.state}>"

    def _repr_html_(self) -> str:
        """Return what Jupyter shows: the table of `status`, and a small curve."""
        from mgpu_slurm.reports.live import notebook

        return notebook.html(self.files, current_state.current([self.files]))

    @property
    def name(self) -> str:
        return self.files.run

    @property
    def folder(self) -> Path:
        return self.files.path

    @property
    def all_current(self) -> list[RunState]:
        """The current state of each run."""
        return [state for _, state in current_state.current([self.files])]

    @property
    def all_facts(self) -> list[dict[str, Any]]:
        """Everything that `status` shows, one entry per run, as in `state.json`."""
        return [state.to_json() for state in self.all_current]

    @property
    def state(self) -> str:
        """The state. For several runs: that of one that is alive, else of one that did not complete, if any."""
        return self._as_one(self.all_current)

    def _as_one(self, found: Sequence[RunState]) -> str:
        """Return one state for all runs."""
        return states.overall([state.state for state in found])

    def wait(self, timeout: float | None = None, note: Note = quiet) -> str:
        """Wait until everything has ended, and return the state.

        Args:
            timeout: in seconds; None to wait forever.
            note: called with a message when a cluster does not answer.

        Raises:
            TimeoutError: it has not ended within that time.
        """
        return watch.wait(self.files, self._as_one, timeout, note)

    def cancel(self) -> bool:
        """Ask the runs that are alive to save and end; return False if all had already ended."""
        return reach.cancel(self.files)

    def resume(self, change: Change = NO_CHANGE, note: Note = quiet) -> str:
        """Resume what has ended and did not complete, from its newest checkpoint, and return the id of the job.

        Args:
            change: options of the run to override.
            note: called with a message while waiting for a cluster that does not answer.

        Raises:
            UserError: there is nothing to resume, the change does not fit, or the run belongs to another user.
        """
        index.check_may_change(self.files, "resume")
        found = current_state.current([self.files])
        ended = [folder for folder, facts in found if not states.is_alive(facts.state)]
        unfinished = [folder for folder, facts in found if folder in ended and facts.state != states.COMPLETED]
        if not ended:
            raise UserError(f"run {self.name} is {self.state}: only a run that has ended can be resumed")
        if not unfinished:
            raise UserError(f"run {self.name} has already completed: submit a new run")
        return submitting.restart(self.files, unfinished, change, note)

    def delete(self, only_checkpoints: bool = False) -> None:
        """Delete it, or only its checkpoints, from disk.

        Raises:
            UserError: it is still alive, part of a group, or belongs to another user.
        """
        self.check_deletable()
        cleanup.delete(self.files, only_checkpoints)

    def check_deletable(self) -> None:
        """Check that it may be deleted.

        Raises:
            UserError: it is still alive, or belongs to another user.
        """
        index.check_may_change(self.files, "delete")
        cleanup.check_has_ended(self.files, self.state)


class Handle(_Submitted):
    """A handle on one run, which any process can make at any time."""

    @property
    def current(self) -> RunState:
        """The run's current state."""
        return current_state.state(self.files)

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that `status` shows for the run, as in `state.json`."""
        return self.current.to_json()

    def result(self) -> dict[str, float]:
        """Wait for the end, and return the job function's result as numbers by name.

        Raises:
            RunFailed: the run did not complete; reports the first cause.
        """
        state = self.wait()
        if state != states.COMPLETED:
            raise RunFailed(f"run {self.name} is {state}: {self.current.reason}")
        record = files.read_json(self.files.result) or {"result": {}}
        result: dict[str, float] = record["result"]
        return result

    def logs(self, rank: int = 0) -> str:
        """Return everything that a rank has printed, over all attempts."""
        attempts = range(1, records.attempts_started(self.files) + 1)
        texts = (path.read_bytes() for path in lookup.logs_of_rank(self.files, rank, attempts))
        return b"".join(texts).decode(errors="replace")


class Group(_Submitted):
    """A handle on runs that were submitted together, one per seed."""

    @property
    def runs(self) -> list[Handle]:
        return [Handle(folder) for folder in lookup.members(self.files)]

    def results(self) -> list[dict[str, float]]:
        """Wait for all runs, and return their results in order.

        Raises:
            RunFailed: a run did not complete; reports the first cause of the first such run.
        """
        self.wait()
        return [run.result() for run in self.runs]


class Study(Group):
    """A handle on a sweep: its workers and trials."""

    def _as_one(self, found: Sequence[RunState]) -> str:
        return sweep_state.overall(found, sweep_state.summary_of(self.files, found))

    def results(self) -> list[dict[str, float]]:
        """Wait for the sweep, and return the results of all complete trials, ordered by trial number.

        Raises:
            RunFailed: the sweep did not complete; reports why.
        """
        state = self.wait()
        if state != states.COMPLETED:
            reason = sweep_state.state_of(self.files, self.all_current).reason
            raise RunFailed(f"study {self.name} is {state}: {reason}")
        trials = sorted(sweep_state.trials(self.files), key=lambda trial: int(trial.path.name))
        records = [files.read_json(trial.result) for trial in trials]
        return [record["result"] for record in records if record is not None and record["state"] == "COMPLETE"]

    def resume(self, change: Change = NO_CHANGE, note: Note = quiet) -> str:
        """Start workers for the remaining trials, even if the sweep was abandoned. Return the id of their job.

        Raises:
            UserError: no trial remains, all workers are running, or the sweep belongs to another user.
        """
        from mgpu_slurm.sweeps import launch

        index.check_may_change(self.files, "resume")
        return launch.resume(self.files, change, note)

    def delete(self, only_checkpoints: bool = False) -> None:
        self.check_deletable()
        if not only_checkpoints:
            from mgpu_slurm.sweeps import launch

            launch.forget(self.files)
        super().delete(only_checkpoints)

    @property
    def trials(self) -> dict[str, int]:
        """The number of trials in each of Optuna's states. Asks SLURM which workers are alive."""
        return sweep_state.summary_of(self.files, self.all_current).trials

    @property
    def best(self) -> dict[str, Any] | None:
        """The best trial so far, with `number`, `value`, `params` and more; None until one is complete and feasible.

        With several metrics, that with the best value of the first one; see `front`.
        """
        best = sweep_state.summary_of(self.files).best
        return None if best is None else best.to_json()

    @property
    def front(self) -> list[dict[str, Any]]:
        """With several metrics, the complete trials that no other beats in all of them, as `best` has them."""
        return [trial.to_json() for trial in sweep_state.summary_of(self.files).front]
