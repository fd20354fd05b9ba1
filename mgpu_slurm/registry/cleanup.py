"""What a run folder takes on disk, and how it goes away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.layout import RunFolder

_DELETED_PREFIX = ".deleted-"
"""No run name starts with a dot, so what carries it is never listed as a run."""


@dataclass(frozen=True)
class Usage:
    """Bytes by kind: the files' own sizes (as `ls -l` shows them), which are the same on every file system.

    `du` adds the rounding to blocks. Links count with their own size, never with what they lead to.
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
    """What a run takes, or a group with all its runs, or a sweep with all its trials; files that vanish meanwhile count
    nothing.

    Raises:
        UserError: where a folder may not be read.
    """
    parts = [folder, *(RunFolder(path) for path in [*_listed(folder.tasks), *_listed(folder.trials)])]
    places = {
        "checkpoints": [part.checkpoints for part in parts],
        "logs": [part.logs for part in parts],
        "tensorboard": [part.tensorboard for part in parts],
        "code": [folder.code],
    }
    sizes = {kind: sum(_all_sizes(sections)) for kind, sections in places.items()}
    counted = frozenset(section for sections in places.values() for section in sections)
    return Usage(**sizes, other=sum(_sizes(folder.path, without=counted)))


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _all_sizes(sections: list[Path]) -> Iterator[int]:
    for section in sections:
        if not section.is_symlink():
            yield from _sizes(section)


def delete_run(folder: RunFolder) -> None:
    """Deletes the whole folder of a run that is not alive; one that is gone already is fine.

    It takes a hidden name first, so that no half of a run is ever listed. Deletions that were interrupted in the
    same runs folder are finished on the way.

    Raises:
        UserError: where something may not be deleted or is still held by a process.
    """
    _delete(folder.path)


def delete_checkpoints(folder: RunFolder) -> None:
    """Deletes `checkpoints/` of a run, or of one trial of a sweep, and leaves the rest; a second time is fine.

    Raises:
        UserError: as `delete_run`.
    """
    _delete(folder.checkpoints)


def _delete(path: Path) -> None:
    hidden = path.with_name(f"{_DELETED_PREFIX}{path.name}")
    try:
        # an interrupted deletion of the same name would be in the way of the rename
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
    """Removes a folder with its content, also while another process does the same; of a link only the link."""
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
        " end what still uses it or mend its permissions, then delete again"
    )


def _sizes(folder: Path, without: frozenset[Path] = frozenset()) -> Iterator[int]:
    """Sizes of the files below a folder, except below the folders in `without`."""
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
