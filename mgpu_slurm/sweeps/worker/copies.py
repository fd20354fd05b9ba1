"""Checkpoints of copies in population based training: a new trial continues from that of another one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from optuna.trial import FrozenTrial

from mgpu_slurm.core.files import write_json
from mgpu_slurm.run_folder import layout
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study.snapshots import copy_of


def set_aside(source: RunFolder, replaced: RunFolder) -> None:
    """Keep the newest checkpoint of a trial for the copy that replaces another one, which has no number yet.

    If the source has none, the copy begins at the start. The caller must hold the lock.
    """
    newest, place = layout.newest_checkpoint(source), _place(replaced)
    if newest is None or place.exists():
        return
    half = place.with_name(f".{place.name}")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    # links: later checkpoints of the source replace this one, and its files stay
    shutil.copytree(newest, half / newest.name, copy_function=_link)
    half.rename(place)


def adopt(trial: RunFolder, frozen: FrozenTrial) -> None:
    """Give a copy the checkpoint that was set aside for it, if it has not saved one itself."""
    found = copy_of(frozen)
    if found is None or layout.newest_checkpoint(trial) is not None:
        return
    place = _place(trial.group.of_trial(found.trial))
    if not place.exists():
        return
    (checkpoint,) = place.iterdir()
    write_json(trial.copied, {"checkpoint": checkpoint.name, "source": found.source})
    trial.checkpoints.mkdir(parents=True, exist_ok=True)
    checkpoint.rename(trial.checkpoints / checkpoint.name)
    place.rmdir()


def _place(replaced: RunFolder) -> Path:
    return replaced.group.copies / replaced.path.name


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # not on every file system
        shutil.copy2(source, target)
