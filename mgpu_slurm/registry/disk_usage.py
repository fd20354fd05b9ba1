"""Disk usage of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.core.layout import RunFolder

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
