"""Write the weights in a checkpoint as one plain safetensors file, whichever ranks saved them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mgpu_slurm.checkpoints import folder as folders
from mgpu_slurm.checkpoints import writer
from mgpu_slurm.checkpoints.rank_record import SharedRecord
from mgpu_slurm.checkpoints.reader import StoredTensors
from mgpu_slurm.checkpoints.state import stage_states
from mgpu_slurm.checkpoints.state.wrapping import WRAPPERS
from mgpu_slurm.checkpoints.writer import Part
from mgpu_slurm.core.errors import MgpuError, UserError, nearest
from mgpu_slurm.core.files import sync_folder
from mgpu_slurm.rank.communication import codec
from mgpu_slurm.rank.communication.codec import Plain
from mgpu_slurm.run_folder.checkpoint_names import checkpoint_step, complete_checkpoints, newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder


@dataclass(frozen=True)
class Exported:
    """What was written."""

    object: str
    """Its name in `run.restore`."""
    checkpoint: str
    step: int
    tensors: int
    bytes: int
    """Size of the file."""


def export(run: RunFolder, which: str, name: str | None, file: Path) -> Exported:
    """Write a model of a run to a file. One tensor after the other is in memory.

    Args:
        which: `newest`, `best`, or the step of a checkpoint.
        name: name of the object in `run.restore`; None for the only module.
        file: must not exist.

    Raises:
        UserError: there is no such checkpoint or object, or the file exists.
        MgpuError: the checkpoint is damaged.
    """
    _check_is_new(file)
    if not file.absolute().parent.is_dir():
        raise UserError(f"{str(file.parent)!r} is no folder: create it first")
    path = _chosen(run, which)
    if not folders.is_whole(path) or (problem := folders.problem(path, folders.ranks(path))) is not None:
        raise MgpuError(f"checkpoint {path.name} of {run.run} is damaged{f' ({problem})' if problem else ''}")
    shared = folders.record(path, 0).content.shared
    assert shared is not None, path
    name = _name_of(shared, name)
    whole = stage_states.saved_object(path, shared, name)
    names = _tensor_names(whole, is_old=shared.differing is None)
    if not names:
        raise UserError(f"{name!r} holds no tensors by name: export one of {', '.join(_modules(shared))}")
    tensors = StoredTensors(folders.tensor_files(path), {})
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.absolute().parent) as hidden:
        written = writer.write(Path(hidden, file.name), _Parts(tensors, names))
        # a rename, because some file systems have no hard links
        _check_is_new(file)
        os.rename(Path(hidden, file.name), file)
    sync_folder(file.absolute().parent)
    step = checkpoint_step(path.resolve())
    return Exported(name, path.resolve().name, step or 0, len(names), written.size)


def _check_is_new(file: Path) -> None:
    if os.path.lexists(file):
        raise UserError(f"{str(file)!r} exists: delete it, or choose another name")


class _Parts(Mapping[str, Part]):
    """Tensors read when they are written."""

    def __init__(self, tensors: StoredTensors, names: Mapping[str, str]) -> None:
        """
        Args:
            names: names in the checkpoint by names in the file.
        """
        self._tensors = tensors
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Part:
        tensor: torch.Tensor = self._tensors[self._names[name]]
        return Part(tensor, (0,) * tensor.dim())


def _chosen(run: RunFolder, which: str) -> Path:
    found = complete_checkpoints(run)
    if not found:
        raise UserError(f"{run.run} has no checkpoint: a job saves them once it has called run.restore")
    if which == "newest":
        newest = newest_checkpoint(run)
        assert newest is not None
        return newest
    if which == folders.BEST:
        best = run.checkpoints / folders.BEST
        if not best.exists():
            raise UserError(f"{run.run} has no best checkpoint: use run.checkpoints(best=...), or --checkpoint newest")
        return best.resolve()
    steps = {str(checkpoint_step(path)): path for path in found}
    if which not in steps:
        names = ["newest", *([folders.BEST] if (run.checkpoints / folders.BEST).exists() else [])]
        raise UserError(f"--checkpoint {which}: {run.run} has {', '.join(names)} and the steps {', '.join(steps)}")
    return steps[which]


def _modules(shared: SharedRecord) -> list[str]:
    """Return the names of the modules: no other state is an ordered dictionary."""
    return [name for name, plain in shared.objects.items() if codec.type_of(plain) == "OrderedDict"]


def _name_of(shared: SharedRecord, name: str | None) -> str:
    modules = _modules(shared)
    if name is not None:
        if name not in shared.objects:
            known = [*shared.objects]
            raise UserError(f"--object {name}: the checkpoint has {', '.join(known)}{nearest(name, known)}")
        return name
    if len(modules) != 1:
        has = f"the modules {', '.join(modules)}" if modules else f"no module, but {', '.join(shared.objects)}"
        raise UserError(f"the checkpoint has {has}: choose one with --object")
    return modules[0]


def _tensor_names(plain: Plain, is_old: bool) -> dict[str, str]:
    """Return the names of an object's tensors in the checkpoint by their names in the object.

    Args:
        is_old: whether version 0.1 wrote it, with the names of wrappers.
    """
    if not isinstance(plain, dict):
        return {}
    found = {key: each["of"] for key, each in codec.items(plain) if codec.type_of(each) == "tensor"}
    while is_old and found and (common := {name.partition(".")[0] for name in found}) <= WRAPPERS and len(common) == 1:
        found = {name.partition(".")[2]: each for name, each in found.items()}
    return found
