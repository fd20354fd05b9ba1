"""Whole-or-nothing checkpoints: a folder that has its final name is complete and on disk.

Ranks write their files into a hidden folder and sync them; once all have said so, rank 0 renames the folder. Older
checkpoints go only after that. A reader takes the newest folder with a final name. Files hold tensors and plain values
only and are read with `weights_only=True`: nothing in them can run code.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from mgpu_slurm.errors import MgpuError, UserError
from mgpu_slurm.paths import RunFolder, sync_folder
from mgpu_slurm.wording import first_line

KEPT = 2
"""How many checkpoints stay: the newest, and the one before."""

_FINAL = re.compile(r"step-(\d{9,})")
_SHARED = "state.pt"


def newest(folder: RunFolder) -> Path | None:
    """The newest complete checkpoint, or None."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def _complete(folder: RunFolder) -> list[Path]:
    if not folder.checkpoints.is_dir():
        return []
    steps = [(int(match[1]), path) for path in folder.checkpoints.iterdir() if (match := _FINAL.fullmatch(path.name))]
    return [path for _, path in sorted(steps)]


class Writing:
    """A checkpoint on its way. `prepare` on rank 0, `write` on every rank, `publish` on rank 0, in step."""

    def __init__(self, folder: RunFolder, step: int, check: bool) -> None:
        """With `check` what was written is read once more, as a restore would."""
        self._check = check
        self._folder = folder
        self._final = folder.checkpoint(step)
        self._hidden = self._final.with_name(f".{self._final.name}")

    def prepare(self) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)
        self._hidden.mkdir(parents=True)

    def write(self, rank: int, own: dict[str, Any], shared: dict[str, Any] | None) -> None:
        """Writes this rank's own state, and the state that all ranks share where this rank is the one to do it."""
        _save(self._hidden / _rank_file(rank), own)
        if shared is not None:
            _save(self._hidden / _SHARED, shared)
            if self._check:
                _refuse_unreadable(self._hidden / _SHARED, shared["objects"])

    def publish(self) -> None:
        sync_folder(self._hidden)
        before = self._hidden.with_name(f"{self._hidden.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        if self._final.exists():
            # the same step again, from another place in the loop
            os.rename(self._final, before)
        os.rename(self._hidden, self._final)
        sync_folder(self._final.parent)
        shutil.rmtree(before, ignore_errors=True)
        for old in _complete(self._folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _save(path: Path, state: dict[str, Any]) -> None:
    with open(path, "xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _refuse_unreadable(path: Path, objects: dict[str, Any]) -> None:
    """Better now than at the restore: files may hold more than can be read without running code.

    Raises:
        UserError: names the object.
    """
    if _is_readable(path):
        return
    for name, state in objects.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        if not _is_readable(buffer):
            raise UserError(
                f"run.restore({name}=...): its state_dict holds more than tensors, numbers, texts, lists and dicts,"
                " which a checkpoint could not give back: make it plain"
            )


def _is_readable(file: Path | io.BytesIO) -> bool:
    try:
        torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path) or None)
    except pickle.UnpicklingError:
        return False
    return True


def read(checkpoint: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The shared state, on the CPU, and this rank's own (None for a rank that did not exist when it was written).

    Raises:
        MgpuError: names the file that cannot be read.
    """
    own_file = checkpoint / _rank_file(rank)
    return _load(checkpoint / _SHARED), _load(own_file) if own_file.exists() else None


def _load(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise MgpuError(
            f"checkpoint file {str(path)!r} cannot be read: {type(error).__name__}: {first_line(str(error))}: "
            f"delete {str(path.parent)!r} to go back to the checkpoint before"
        ) from error
    return state


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that a job may draw from: Python's, NumPy's, torch's and the device's."""
    import numpy as np

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    name, keys, *rest = np.random.get_state(legacy=True)
    state["numpy"] = [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    import numpy as np

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
