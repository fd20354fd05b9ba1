"""Checkpoints of copies in population based training: a new trial continues from that of another one."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from optuna.trial import FrozenTrial

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.core.files import write_json
from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study.snapshots import copy_of

_TRIES = 3
"""How often to look for a checkpoint of a running source, which may delete it meanwhile."""


def set_aside(source: RunFolder, replaced: RunFolder, end: int) -> int:
    """Keep the newest checkpoint of a trial for the copy that replaces another one, and has no number yet.

    Return the progress of that checkpoint; 0 if there is none before the end: the copy then begins at the start. The
    caller must hold the lock.

    Args:
        end: the progress of a complete trial.
    """
    place = _place(replaced)
    # of a copy that was not created, perhaps from another source
    shutil.rmtree(place, ignore_errors=True)
    for _ in range(_TRIES):
        newest = newest_checkpoint(source)
        if newest is None:
            return 0
        with suppress(OSError):
            progress = _link_checkpoint(newest, place)
            if 0 < progress < end:
                return progress
        shutil.rmtree(place, ignore_errors=True)
    return 0


def _link_checkpoint(checkpoint: Path, place: Path) -> int:
    """Put a checkpoint there, as links: its files stay when the source deletes it. Return its progress.

    Raises:
        OSError: it has been deleted meanwhile.
    """
    copied = place / checkpoint.name
    place.mkdir(parents=True)
    # shutil.Error is an OSError
    shutil.copytree(checkpoint, copied, copy_function=_link)
    if not checkpoints.is_whole(copied):
        raise FileNotFoundError(checkpoint)
    shared = checkpoints.record(copied, 0).content.shared
    return 0 if shared is None else shared.progress.progress


def adopt(trial: RunFolder, frozen: FrozenTrial) -> None:
    """Give a copy the checkpoint that was set aside for it, if it has not saved one itself."""
    found = copy_of(frozen)
    if found is None:
        return
    place = _place(trial.group.of_trial(found.trial))
    if newest_checkpoint(trial) is None and place.exists():
        for checkpoint in place.iterdir():
            write_json(trial.copied, {"checkpoint": checkpoint.name, "source": found.source})
            trial.checkpoints.mkdir(parents=True, exist_ok=True)
            checkpoint.rename(trial.checkpoints / checkpoint.name)
    shutil.rmtree(place, ignore_errors=True)


def _place(replaced: RunFolder) -> Path:
    return replaced.group.copies / replaced.path.name


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # not on every file system
        shutil.copy2(source, target)
