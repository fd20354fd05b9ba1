"""What a call that extends a sweep says of it: what has changed, and what it starts."""

from __future__ import annotations

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.sweep_records import SweepOver
from mgpu_slurm.submission.resume_overrides import Change
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.worker_starts import Found


def standing(old: Sweep, new: Sweep, change: Change, trials: int, found: Found) -> list[str]:
    """Return the state of a sweep, and how its file differs from the one before."""
    at_work = sum(states.is_alive(state.state) for _, state in found)
    lines = [f"study     {new.study}: {counted(trials, 'trial')} so far, {counted(at_work, 'worker')} running"]
    if old.trials != new.trials:
        known = "as many as the budget allows" if new.trials is None else new.trials
        lines.append(f"trials    {known} (was {old.trials})")
    for name in ("workers", "trials_per_worker", "stuck_after", "sampler", "pruner"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            lines.append(f"{name:<9} {getattr(now, 'words', now)} (was {getattr(before, 'words', before)})")
    # tasks follow from the number of trials of a worker
    resources = {name: value for name, value in change.given.items() if name not in ("sbatch", "ntasks-per-node")}
    resources |= new.resources.sbatch if "sbatch" in change.given else {}
    if resources:
        lines.append(f"resources {' '.join(f'{name}={value}' for name, value in resources.items())}")
    return lines


def starts(workers: int, is_alive: bool, is_full: bool, spent: SweepOver | None, new_code: bool) -> list[str]:
    """Return what is started.

    Args:
        workers: how many more the file asks for.
        is_full: whether they have to wait for the running ones to end.
        spent: why the sweep is over.
    """
    if not workers:
        why = "all trials are done" if spent is None or spent.failed else spent.reason
        return [] if is_alive else [f"starts    no worker: {why}"]
    if is_full:
        return ["starts    no more workers until the running ones have ended: they share the same resources"]
    code = "the project's, as it is now" if new_code else "the study's (--code new: the project's)"
    return [f"starts    {counted(workers, 'worker')}", f"code      {code}"]
