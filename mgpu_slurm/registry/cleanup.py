"""Delete runs, or only their checkpoints, from the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import program
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.registry import sweep_state

_DELETED_PREFIX = ".deleted-"
"""No run name starts with a dot, so a folder with this prefix is never listed as a run."""


def delete(folder: RunFolder, only_checkpoints: bool = False) -> None:
    """Delete a run, group or sweep that has ended, or only its checkpoints.

    Raises:
        UserError: it is part of a group, or something may not be deleted.
    """
    if only_checkpoints:
        members = [member for member, _ in records.read_states(folder)]
        for part in [*members, *sweep_state.trials(folder)]:
            delete_checkpoints(part)
    elif folder.task is not None:
        raise UserError(f"run {folder.run} is part of group {folder.group.run}: delete the group")
    else:
        delete_run(folder)


def check_has_ended(folder: RunFolder, state: str) -> None:
    """Refuse to delete a run that is still alive.

    Args:
        state: of the run, or of the group or sweep as a whole.

    Raises:
        UserError: it is alive.
    """
    if states.is_alive(state):
        raise UserError(
            f"run {folder.run} is {state}: `{program()} cancel {folder.run}` first,"
            f" or delete {str(folder.path)!r} by hand if its cluster no longer exists"
        )


def delete_run(folder: RunFolder) -> None:
    """Delete the whole folder of a run that is not alive, if it exists.

    The folder is renamed to a hidden name first, so that half a run is never listed. Interrupted deletions in the same
    runs folder are finished, too.

    Raises:
        UserError: something may not be deleted, or is still held by a process.
    """
    _delete(folder.path)


def delete_checkpoints(folder: RunFolder) -> None:
    """Delete `checkpoints/` of a run, or of one trial of a sweep, if it exists; keep the rest.

    Raises:
        UserError: as `delete_run`.
    """
    _delete(folder.checkpoints)


def _delete(path: Path) -> None:
    hidden = path.with_name(f"{_DELETED_PREFIX}{path.name}")
    try:
        # the leftover of an interrupted deletion would block the rename
        _remove(hidden)
        path.rename(hidden)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _cannot_delete(path, error) from None
    for leftover in path.parent.glob(f"{_DELETED_PREFIX}*"):
        try:
            _remove(leftover)
        except OSError as error:
            # another run's leftover is no reason to fail this deletion
            if leftover == hidden:
                raise _cannot_delete(hidden, error) from None


def _remove(path: Path) -> None:
    """Remove a folder with its content, even while another process does the same; of a link, only the link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    while os.path.lexists(path):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue


def _cannot_delete(path: Path, error: OSError) -> UserError:
    place = str(error.filename or path)
    return UserError(
        f"cannot delete all of {str(path)!r} ({error.strerror}: {place!r}):"
        " stop what still uses it or fix its permissions, then try again"
    )
