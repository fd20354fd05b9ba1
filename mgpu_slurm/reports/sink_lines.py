"""Tell where trackers show what has ended, or what they lack and how to send it."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_slurm.core.formatting import latest
from mgpu_slurm.registry import lookup
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import SEEDS, RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.trackers import outcome


def await_trackers(folder: RunFolder, found: Sequence[RunState]) -> None:
    """Wait until trackers have all of a run, a group or a sweep that has ended, at most as long as that may take.

    Args:
        found: the states of its runs or workers.
    """
    sinks = _sinks(folder)
    if sinks:
        outcome.await_end(_runs(folder), sinks, latest(state.ended for state in found))


def sink_lines(folder: RunFolder) -> list[str]:
    """Return a line for each tracker of a run, a group or a sweep."""
    sinks = _sinks(folder)
    if not sinks:
        return []
    runs = _runs(folder)
    if runs == [folder]:
        return outcome.lines(folder, sinks)
    # a trial with several seeds is several runs
    are_trials = _is_sweep(folder) and not any(f"/{SEEDS}/" in run.run for run in runs)
    return outcome.lines_of_several(folder, runs, sinks, "trial" if are_trials else "run")


def _sinks(folder: RunFolder) -> tuple[str, ...]:
    return read_spec(folder.group).sinks if folder.spec.exists() else ()


def _runs(folder: RunFolder) -> list[RunFolder]:
    return [*outcome.runs_of_sweep(folder)] if _is_sweep(folder) else lookup.members(folder)


def _is_sweep(folder: RunFolder) -> bool:
    return records.read_state(folder).kind == "sweep"
