"""Measure what runs use of the disk, and delete runs or only their checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import human_size, program
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder

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
    """Delete `checkpoints/` of a run, or of one trial of a sweep with all its seeds, if it exists; keep the rest.

    Raises:
        UserError: as `delete_run`.
    """
    for part in folder.with_seeds():
        _delete(part.checkpoints)


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


# -- disk usage


HEADER = ["RUN", "CHECKPOINTS", "LOGS", "TENSORBOARD", "CODE", "OTHER", "TOTAL"]


@dataclass(frozen=True)
class Usage:
    """Bytes by kind: the files' own sizes (as `ls -l` shows them), which are the same on every file system.

    `du` rounds up to blocks instead. Links count with their own size, never with that of their target.
    """

    checkpoints: int
    logs: int
    tensorboard: int
    code: int
    other: int

    @property
    def total(self) -> int:
        return self.checkpoints + self.logs + self.tensorboard + self.code + self.other


def usage(folder: RunFolder) -> Usage:
    """Return the disk usage of a run, a group with all its runs, or a sweep with all its trials.

    Files that vanish meanwhile do not count.

    Raises:
        UserError: a folder may not be read.
    """
    # those of a confirmation are a link to its sweep's
    tasks = [] if folder.tasks.is_symlink() else _listed(folder.tasks)
    parts = [folder, *map(RunFolder, tasks)]
    parts += [part for path in _listed(folder.trials) for part in RunFolder(path).with_seeds()]
    places = {
        "checkpoints": [part.checkpoints for part in parts],
        "logs": [part.logs for part in parts],
        "tensorboard": [part.tensorboard for part in parts],
        "code": [folder.code],
    }
    sizes = {kind: sum(_all_sizes(sections)) for kind, sections in places.items()}
    counted = frozenset(section for sections in places.values() for section in sections)
    return Usage(**sizes, other=sum(_sizes(folder.path, without=counted)))


def usage_table(folders: list[RunFolder]) -> str:
    from tabulate import tabulate

    found = [(folder.run, usage(folder)) for folder in folders]
    rows = [HEADER]
    for run, use in found:
        sizes = (use.checkpoints, use.logs, use.tensorboard, use.code, use.other, use.total)
        rows.append([run, *map(human_size, sizes)])
    if len(found) > 1:
        rows.append(["all", "", "", "", "", "", human_size(sum(use.total for _, use in found))])
    return tabulate(rows, tablefmt="plain", disable_numparse=True, stralign="right", colalign=("left",))


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _all_sizes(sections: list[Path]) -> Iterator[int]:
    for section in sections:
        if not section.is_symlink():
            yield from _sizes(section)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(_sizes(folder))


def _sizes(folder: Path, without: frozenset[Path] = frozenset()) -> Iterator[int]:
    """Yield the sizes of the files below a folder, except below the folders in `without`."""
    try:
        with os.scandir(folder) as found:
            items = list(found)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        raise UserError(f"cannot read {str(folder)!r} ({error.strerror}): only its owner can clean it") from None
    for item in items:
        if not item.is_dir(follow_symlinks=False):
            yield _size(item)
        elif Path(item.path) not in without:
            yield from _sizes(Path(item.path), without)


def _size(item: os.DirEntry[str]) -> int:
    try:
        return item.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
