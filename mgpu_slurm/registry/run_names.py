"""Names that stand for runs: `@last` and `@last-failed`, and those that a shell completes. No cluster is asked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry.index import folders, roots
from mgpu_slurm.run_folder.layout import TRIALS, RunFolder

NEWEST, NEWEST_FAILED = "@last", "@last-failed"


def completions(begun: str, only_sweeps: bool = False) -> list[str]:
    """Return the names of runs and groups that begin like this, and of a group's runs after `GROUP/`; those that
    changed last come first."""
    try:
        found = _newest_first([folder for root in roots() for folder in folders(root)])
    except (UserError, OSError):
        # a shell has no place for an error
        return []
    if only_sweeps:
        found = [folder for folder in found if folder.sweep.exists()]
    group, slash, _ = begun.rpartition("/")
    if slash:
        return [f"{group}/{part}" for part in _parts(group, found) if f"{group}/{part}".startswith(begun)]
    special = [] if only_sweeps else [NEWEST, NEWEST_FAILED]
    return [name for name in [*special, *(folder.run for folder in found)] if name.startswith(begun)]


def _newest_first(found: list[RunFolder]) -> list[RunFolder]:
    changed = {folder: os.stat(folder.state).st_mtime for folder in found}
    return sorted(found, key=lambda folder: changed[folder], reverse=True)


def _parts(name: str, known: Iterable[RunFolder]) -> list[str]:
    """Return what may follow a name and a slash: the runs of a group, or the trials of a sweep, that have begun."""
    found = []
    for folder in known:
        if folder.run == name:
            found += [*_numbers(folder.tasks), *([f"{TRIALS}/"] if folder.trials.is_dir() else [])]
        elif f"{folder.run}/{TRIALS}" == name:
            found += _numbers(folder.trials)
    return found


def _numbers(folder: Path) -> list[str]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(filter(str.isdigit, names), key=int)
