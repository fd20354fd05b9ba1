"""Checkpoints as folders: one that has its final name is whole, and on the disk.

Into a hidden folder each rank writes two files: its tensors, and after them a record of all else, with the checksums of
both. When the records of all ranks are there nothing is missing, and the folder gets its final name; whoever comes
later can do that too, where the one who should was killed. Older checkpoints go only after that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import google_crc32c

from mgpu_slurm.checkpoints.writer import SUFFIX, Part, Written, summed, write
from mgpu_slurm.core.checkpoint_names import Key, below, complete, key_of
from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.files import sync_folder, write_whole
from mgpu_slurm.core.layout import DAMAGED, RunFolder

FORMAT = 1

BEST = "best"

_HIDDEN = re.compile(r"\.step-(\d{9,})\.of-\d+-\d+")
_RECORD = re.compile(r"rank-(\d{5,})\.json")


def hidden(run: RunFolder, step: int, attempt: int, save: int) -> Path:
    """Where an attempt writes its save of this number: one of the same step may still be on its way to its name."""
    final = run.checkpoint(step)
    return final.with_name(f".{final.name}.of-{attempt}-{save}")


def write_part(
    folder: Path,
    rank: int,
    world_size: int,
    state: Mapping[str, Any],
    parts: Mapping[str, Part],
    came_on: Callable[[], None] = lambda: None,
) -> None:
    """Writes what a rank keeps, its record last.

    Args:
        state: what JSON can hold of it.
        came_on: is called now and then.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / f"{_name(rank)}{SUFFIX}"
    tensors.unlink(missing_ok=True)
    written = write(tensors, parts, came_on)
    body = {"format": FORMAT, "rank": rank, "world_size": world_size, "tensors": asdict(written), **state}
    write_whole(folder / f"{_name(rank)}.json", json.dumps(body | {"checksum": _checksum(body)}))
    sync_folder(folder)


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _checksum(body: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(body).encode()))


def ranks(folder: Path) -> list[int]:
    """Those whose records are there."""
    # a listing: of a single name a network file system may say for a while that it is not there
    entries = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for entry in entries if (match := _RECORD.fullmatch(entry)))


def is_whole(folder: Path) -> bool:
    """Whether the records of all ranks are there."""
    found = ranks(folder)
    try:
        return bool(found) and len(found) == record(folder, found[0])["world_size"]
    except (OSError, ValueError):
        return False


def record(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has kept but for its tensors.

    Raises:
        OSError: it is not there.
        ValueError: it is not what was written.
        MgpuError: another version has written it.
    """
    body: Any = json.loads((folder / f"{_name(rank)}.json").read_text())
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise ValueError(f"{_name(rank)}.json is damaged")
    if body["format"] != FORMAT:
        raise MgpuError(f"checkpoint {str(folder)!r} has the format {body['format']}: this version reads {FORMAT}")
    return body


def problem(folder: Path, some: Iterable[int]) -> str | None:
    """What is wrong with the files of some ranks; None if they are what was written."""
    for rank in some:
        try:
            known = record(folder, rank)["tensors"]
            if summed(folder / f"{_name(rank)}{SUFFIX}") != Written(**known):
                return f"{_name(rank)}{SUFFIX} is damaged"
        except (OSError, ValueError) as error:
            return f"{_name(rank)}: {type(error).__name__}: {error}"
    return None


def publish(folder: Path) -> Path:
    """Give a hidden folder that is whole its final name, and return that."""
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
    """Return the name for a checkpoint of this step: that of the newest one of the step if both are of the same place
    in the run, else a new one, so that the older is kept."""
    run = RunFolder(folder.parents[1])
    keys = [key for path in complete(run) if (key := key_of(path)) is not None and key.step == step]
    if not keys:
        return run.checkpoint(step)
    newest = run.checkpoint(*keys[-1])
    return newest if _place(newest) == _place(folder) else run.checkpoint(step, keys[-1].number + 1)


def _place(folder: Path) -> Any:
    """Return where in the run a checkpoint was written; None if it does not tell."""
    try:
        return record(folder, 0)["shared"]["facts"]["place"]
    except (OSError, ValueError, KeyError, MgpuError):
        return None


def any_whole(run: RunFolder) -> bool:
    """Whether there is one to go on from, with its name or still without."""
    return bool(complete(run) or _left_whole(run))


def publish_left(run: RunFolder) -> None:
    """Publishes what an attempt that is over has left whole, and clears the rest away."""
    for path in _left_whole(run):
        publish(path)
    for path in below(run):
        if path.name.startswith(".step-"):
            shutil.rmtree(path, ignore_errors=True)


def _left_whole(run: RunFolder) -> list[Path]:
    """Those without their name that lack nothing, the oldest first."""
    found = [path for path in below(run) if _HIDDEN.fullmatch(path.name) and is_whole(path)]
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def set_aside(folder: Path) -> Path:
    """Takes a damaged checkpoint away from those that are read; what is left of it stays."""
    aside = folder.with_name(f"{DAMAGED}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def point_to_best(run: RunFolder, best: Key | None) -> None:
    """Has the link `best` name this checkpoint; None for no link."""
    link = run.checkpoints / BEST
    if best is None:
        link.unlink(missing_ok=True)
        return
    new = link.with_name(f".{BEST}")
    new.unlink(missing_ok=True)
    new.symlink_to(run.checkpoint(*best).name)
    os.replace(new, link)


def trim(run: RunFolder, keep: int, also: Key | None = None) -> None:
    """Deletes all but the newest ones.

    Args:
        also: one that stays too.
    """
    for path in complete(run)[:-keep]:
        if key_of(path) != also:
            shutil.rmtree(path, ignore_errors=True)


def tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"rank-*{SUFFIX}"))
