"""Names that stand for runs: `@last` and `@last-failed`, and those that a shell completes. No cluster is asked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry.index import folders, roots
from mgpu_slurm.run_folder.layout import SEEDS, TRIALS, RunFolder

NEWEST, NEWEST_FAILED = "@last", "@last-failed"

_MADE_UNIQUE = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}$")
"""The suffix that a submission adds to a run's name."""


def first_part(run: str) -> str:
    """Return the part of a run's name that was given, without the suffix that a submission adds."""
    return _MADE_UNIQUE.sub("", run)


def named(name: str, known: list[RunFolder]) -> list[RunFolder]:
    """Return the runs and groups that have this name or, without any, this first part of a name."""
    found = [folder for folder in known if folder.run == name]
    return found or [folder for folder in known if first_part(folder.run) == name]


def completions(begun: str, only_sweeps: bool = False, trials: bool = False) -> list[str]:
    """Return the names of runs and groups that begin like this; those that changed last come first. After `GROUP/`, for
    which the first part of a group's name will do, return its runs.

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
        meant = named(group, found)
        parts = _parts_of(meant[0], trials and part.startswith(TRIALS[:1])) if len(meant) == 1 else []
        names = [f"{group}/{name}" for name in parts]
        return [name for name in names if name.startswith(begun)]
    special = [] if only_sweeps else [NEWEST, NEWEST_FAILED]
    return [name for name in [*special, *(folder.run for folder in found)] if name.startswith(begun)]


def _newest_first(found: list[RunFolder]) -> list[RunFolder]:
    changed = {folder: os.stat(folder.state).st_mtime for folder in found}
    return sorted(found, key=lambda folder: changed[folder], reverse=True)


def _parts_of(group: RunFolder, trials: bool) -> Iterator[str]:
    """Yield the names, in their group, of its runs that have begun, or of a sweep's trials."""
    if not trials:
        yield from map(str, _numbers(group.tasks))
        return
    for number in _numbers(group.trials):
        trial = group.of_trial(number)
        yield from ([f"{TRIALS}/{number}/{SEEDS}/{seed}" for seed in _numbers(trial.seeds)] or [f"{TRIALS}/{number}"])


def _numbers(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())
