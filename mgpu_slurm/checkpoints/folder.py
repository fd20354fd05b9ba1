"""Checkpoints as folders: a folder with its final name is complete and on disk.

Each rank writes two files into a hidden folder: its tensors, then a record of everything else, with the checksums of
both. Once the records of all ranks exist, nothing is missing, and the folder gets its final name. If the process that
should rename it was killed, a later one can do so. Older checkpoints are deleted only after that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from mgpu_slurm.checkpoints.rank_record import Content, RankRecord
from mgpu_slurm.checkpoints.writer import SUFFIX, Part, summed, write
from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.files import sync_folder, write_whole
from mgpu_slurm.run_folder.checkpoint_names import (
    CheckpointKey,
    below_checkpoints,
    checkpoint_key,
    complete_checkpoints,
)
from mgpu_slurm.run_folder.layout import DAMAGED, RunFolder

FORMAT = 1

BEST = "best"

_HIDDEN = re.compile(r"\.step-(\d{9,})\.of-\d+-\d+")
_RECORD = re.compile(r"rank-(\d{5,})\.json")


def hidden(run: RunFolder, step: int, attempt: int, save: int) -> Path:
    """Return the hidden folder for one save of an attempt.

    It depends on the number of the save because another save of the same step may not be published yet.
    """
    final = run.checkpoint(step)
    return final.with_name(f".{final.name}.of-{attempt}-{save}")


def write_part(
    folder: Path,
    rank: int,
    world_size: int,
    content: Content,
    parts: Mapping[str, Part],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Write a rank's part of a checkpoint, its record last.

    Args:
        content: the part of the state that JSON can hold.
        on_progress: called after each piece.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / f"{_name(rank)}{SUFFIX}"
    tensors.unlink(missing_ok=True)
    written = write(tensors, parts, on_progress)
    body = {"format": FORMAT} | RankRecord(rank, world_size, written, content).to_json()
    write_whole(folder / f"{_name(rank)}.json", json.dumps(body | {"checksum": _checksum(body)}))
    sync_folder(folder)


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _checksum(body: Mapping[str, object]) -> int:
    return int(google_crc32c.value(json.dumps(body).encode()))


def ranks(folder: Path) -> list[int]:
    """Return the ranks whose records exist."""
    # a listing, because a network file system may report a single name as missing for a while
    entries = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for entry in entries if (match := _RECORD.fullmatch(entry)))


def is_whole(folder: Path) -> bool:
    """Return whether the records of all ranks exist."""
    found = ranks(folder)
    try:
        return bool(found) and len(found) == record(folder, found[0]).world_size
    except (OSError, ValueError):
        return False


def record(folder: Path, rank: int) -> RankRecord:
    """Return a rank's record.

    Raises:
        OSError: the record cannot be read.
        ValueError: the record is damaged.
        MgpuError: the record has another version's format.
    """
    body: Any = json.loads((folder / f"{_name(rank)}.json").read_text())
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise ValueError(f"{_name(rank)}.json is damaged")
    if body["format"] != FORMAT:
        raise MgpuError(f"checkpoint {str(folder)!r} has the format {body['format']}: this version reads {FORMAT}")
    return RankRecord.from_json(body)


def problem(folder: Path, some: Iterable[int]) -> str | None:
    """Return what is wrong with the files of some ranks, or None if they are intact."""
    for rank in some:
        try:
            known = record(folder, rank).tensors
            if summed(folder / f"{_name(rank)}{SUFFIX}") != known:
                return f"{_name(rank)}{SUFFIX} is damaged"
        except (OSError, ValueError) as error:
            return f"{_name(rank)}: {type(error).__name__}: {error}"
    return None


def publish(folder: Path) -> Path:
    """Give a complete hidden folder its final name, and return that path."""
    match = _HIDDEN.fullmatch(folder.name)
    assert match is not None, folder
    final = _final(folder, int(match[1]))
    before = final.with_name(f".{final.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    if final.exists():
        os.rename(final, before)
    os.rename(folder, final)
    sync_folder(final.parent)
    shutil.rmtree(before, ignore_errors=True)
    return final


def _final(folder: Path, step: int) -> Path:
    """Return the final path for a checkpoint of this step.

    If the newest checkpoint of the step is of the same place in the run, return its path. Otherwise return a new path,
    so that the older checkpoint is kept.
    """
    run = RunFolder(folder.parents[1])
    keys = [key for path in complete_checkpoints(run) if (key := checkpoint_key(path)) is not None and key.step == step]
    if not keys:
        return run.checkpoint(step)
    newest = run.checkpoint(*keys[-1])
    return newest if _place(newest) == _place(folder) else run.checkpoint(step, keys[-1].number + 1)


def _place(folder: Path) -> list[int | list[int]] | None:
    """Return the place in the run at which a checkpoint was written, or None if it is unknown."""
    try:
        shared = record(folder, 0).content.shared
    except (OSError, ValueError, MgpuError):
        return None
    return None if shared is None else shared.progress.place


def has_checkpoint(run: RunFolder) -> bool:
    """Return whether there is a complete checkpoint to resume from, published or not."""
    return bool(complete_checkpoints(run) or _left_whole(run))


def publish_leftover(run: RunFolder) -> None:
    """Publish the complete checkpoints that an ended attempt has left unpublished, and delete the incomplete ones."""
    for path in _left_whole(run):
        publish(path)
    for path in below_checkpoints(run):
        if path.name.startswith(".step-"):
            shutil.rmtree(path, ignore_errors=True)


def _left_whole(run: RunFolder) -> list[Path]:
    """Return the complete folders that are not published yet, oldest first."""
    found = [path for path in below_checkpoints(run) if _HIDDEN.fullmatch(path.name) and is_whole(path)]
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is not read again; its files are kept."""
    aside = folder.with_name(f"{DAMAGED}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def point_to_best(run: RunFolder, best: CheckpointKey | None) -> None:
    """Point the link `best` to a checkpoint; None removes the link."""
    link = run.checkpoints / BEST
    if best is None:
        link.unlink(missing_ok=True)
        return
    new = link.with_name(f".{BEST}")
    new.unlink(missing_ok=True)
    new.symlink_to(run.checkpoint(*best).name)
    os.replace(new, link)


def trim(run: RunFolder, keep: int, also: CheckpointKey | None = None) -> None:
    """Delete all checkpoints except the newest ones.

    Args:
        keep: number of newest checkpoints to keep.
        also: a checkpoint to keep as well.
    """
    for path in complete_checkpoints(run)[:-keep]:
        if checkpoint_key(path) != also:
            shutil.rmtree(path, ignore_errors=True)


def tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"rank-*{SUFFIX}"))
