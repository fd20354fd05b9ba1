"""Names that stand for runs: `@last` and `@last-failed`, and those that a shell completes. No cluster is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry.index import folders, roots
from mgpu_slurm.run_folder.layout import TRIALS, RunFolder

NEWEST, NEWEST_FAILED = "@last", "@last-failed"


def completions(begun: str, only_sweeps: bool = False, trials: bool = False) -> list[str]:
    """Return the names of runs and groups that begin like this, and of a group's runs after `GROUP/`; those that
    changed last come first.

    Args:
        trials: whether the name may be that of a trial; these come after `SWEEP/t`.
    """
    try:
        found = _newest_first([folder for root in roots() for folder in folders(root)])
    except (UserError, OSError):
        # a shell has no place for an error
        return []
    if only_sweeps:
        found = [folder for folder in found if folder.sweep.exists()]
    group, slash, part = begun.partition("/")
    if slash and only_sweeps:
        return []
    if slash:
        wants_trial = trials and part.startswith(TRIALS[:1])
        names = (name for folder in found if folder.run == group for name in _parts_of(folder, wants_trial))
        return [name for name in names if name.startswith(begun)]
    special = [] if only_sweeps else [NEWEST, NEWEST_FAILED]
    return [name for name in [*special, *(folder.run for folder in found)] if name.startswith(begun)]


def _newest_first(found: list[RunFolder]) -> list[RunFolder]:
    changed = {folder: os.stat(folder.state).st_mtime for folder in found}
    return sorted(found, key=lambda folder: changed[folder], reverse=True)


def _parts_of(group: RunFolder, trials: bool) -> Iterator[str]:
    """Yield the names of a group's runs that have begun, or of a sweep's trials."""
    if not trials:
        yield from (group.of_task(number).run for number in _numbers(group.tasks))
        return
    for number in _numbers(group.trials):
        trial = group.of_trial(number)
        yield from ([trial.of_seed(seed).run for seed in _numbers(trial.seeds)] or [trial.run])


def _numbers(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())
