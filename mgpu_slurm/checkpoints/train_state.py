"""The state that a rank saves in checkpoints, and how a run resumes from it."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mgpu_slurm.checkpoints import folder as folders
from mgpu_slurm.checkpoints.policy import Best
from mgpu_slurm.checkpoints.rank_record import Content, ProgressRecord, RankRecord, SharedRecord
from mgpu_slurm.checkpoints.reader import OfRank, StoredTensors
from mgpu_slurm.checkpoints.wrapping import Wrapped, load_state, state_of
from mgpu_slurm.checkpoints.writer import HostCopies, refuse_unwritable
from mgpu_slurm.core.errors import MgpuError, UserError, nearest
from mgpu_slurm.rank import codec
from mgpu_slurm.rank.codec import Plain, StateDict
from mgpu_slurm.rank.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.torch_adapter import is_dtensor
from mgpu_slurm.run_folder import layout, records
from mgpu_slurm.run_folder.layout import RunFolder

LOOK_EVERY = 1.0
"""Seconds between two looks at the progress of a write."""

_PIECE = 1 << 24
"""Bytes copied from a device at once."""


class Stateful(Protocol):
    """An object that checkpoints can contain, such as a module, an optimizer or a scheduler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Restored:
    """What a rank continues from, besides the objects."""

    progress: ProgressRecord
    best: Best | None
    owns: list[StateDict]
    """The rank's own state, if the checkpoint has one, followed by states of ranks that no longer exist."""


class Keeper:
    """One rank's part in the checkpoints of a run."""

    def __init__(
        self, run: RunFolder, facts: RankInfo, attempt: int, wrapped: Wrapped, collectives: Collectives
    ) -> None:
        """
        Args:
            wrapped: modules whose state is saved by rank 0 only; ranks may differ in anything else.
        """
        self.objects: dict[str, Stateful] = {}
        """Objects by the names that the user gave them."""
        self._run = run
        self._rank = facts.rank
        self._world_size = facts.world_size
        self._attempt = attempt
        self._wrapped = wrapped
        self._collectives = collectives
        self._saves = 0
        self._is_written = threading.Event()
        self._pieces = 0
        """Number of pieces written so far."""
        self._shared_copies = HostCopies()
        self._own_copies = HostCopies()

    def add(self, name: str, value: Any) -> None:
        """Add an object to the checkpoints.

        Raises:
            UserError: its state cannot be saved.
        """
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise UserError(f"run.restore({name}=...): a {type(value).__name__} has no state_dict and load_state_dict")
        self.objects[name] = value
        try:
            self._state(name)
        except UserError as error:
            raise UserError(f"run.restore({name}=...): {error}") from None

    def check_names(self) -> None:
        """Check that all ranks save the same objects.

        Raises:
            UserError: they do not.
        """
        names = list(self.objects)
        if any(self._collectives.differ(digest(names, {}))):
            raise UserError(f"run.restore: every rank must pass the same names, and this one passed {', '.join(names)}")

    def _state(self, name: str) -> _State:
        value = self.objects[name]
        state, actual = state_of(value)
        shape, tensors = codec.split(state, name)
        refuse_unwritable(tensors)
        reached, is_held = self._wrapped.reaches(value), self._wrapped.holds()
        own = {
            key: tensor
            for key, tensor in tensors.items()
            if not (is_dtensor(tensor) or reached(actual.get(key.removeprefix(f"{name}."), "")) or is_held(tensor))
        }
        return _State(shape, tensors, own, is_rank_0s=reached(""))

    def _states(self) -> dict[str, _State]:
        return {name: self._state(name) for name in self.objects}

    def _differing(self, states: Mapping[str, _State]) -> list[str]:
        """Return the names of the objects whose states are not the same on all ranks."""
        if self._world_size == 1:
            return []
        numbers = [number for state in states.values() for number in state.digest]
        found = self._collectives.differ(numbers)
        return [name for at, name in enumerate(states) if any(found[2 * at : 2 * at + 2])]

    # -- writing; all ranks make these calls, in the same order

    def copy(self, progress: ProgressRecord, best: Best | None, own: StateDict) -> None:
        """Copy the current state of the run.

        Args:
            progress: progress of the run, the same on all ranks.
            best: the best checkpoint once this one is published; known on rank 0.
            own: state of this rank.

        Raises:
            UserError: an object's state contains something that a checkpoint cannot hold.
        """
        states = self._states()
        differing = self._differing(states)
        own_state, own_tensors = codec.split(own, f"rank-{self._rank}")
        if self._rank == 0:
            objects = {name: state.plain for name, state in states.items()}
            self._content = Content(own_state, SharedRecord(progress, best, objects, differing))
        else:
            self._content = Content(own_state, objects={name: states[name].plain for name in differing})
            of_objects = [tensor for name in differing for tensor in states[name].own.items()]
            own_tensors |= {f"{_prefix(self._rank)}{name}": tensor for name, tensor in of_objects}
        tensors = {name: tensor for state in states.values() for name, tensor in state.tensors.items()}
        self._parts = self._shared_copies.take(tensors, is_main=self._rank == 0)
        self._parts |= self._own_copies.take(own_tensors, is_main=True)
        self._saves += 1
        self._is_written.clear()

    def write(self, step: int) -> None:
        """Write this rank's part of the copied state.

        Raises:
            OSError: it cannot be written.
        """
        hidden = self._hidden(step)
        try:
            folders.write_part(hidden, self._rank, self._world_size, self._content, self._parts, self._on_progress)
        finally:
            self._is_written.set()

    def _on_progress(self) -> None:
        self._pieces += 1

    def wait_for_write(self, alive: Callable[[], None]) -> None:
        """Wait until another thread has finished `write`.

        Args:
            alive: called while that makes progress.
        """
        seen = self._pieces
        while not self._is_written.wait(LOOK_EVERY):
            if seen != self._pieces:
                seen = self._pieces
                alive()

    def publish(self, step: int) -> layout.CheckpointKey:
        """Give the checkpoint its final name and return its key; on rank 0, after all ranks have written.

        Raises:
            OSError: it could not be renamed.
            MgpuError: a later attempt has replaced this one.
        """
        if records.attempts_started(self._run) > self._attempt:
            # for example on a node that was considered lost but is still running
            raise MgpuError(f"attempt {self._attempt} of this run was superseded by a later one and exits")
        key = layout.checkpoint_key(folders.publish(self._hidden(step)))
        assert key is not None
        return key

    def tidy(self, keep: int, best: layout.CheckpointKey | None) -> None:
        """Delete old checkpoints and point the link `best` to the best one; on rank 0.

        Args:
            keep: number of newest checkpoints to keep.
            best: checkpoint to keep as well.

        Raises:
            OSError: the link cannot be created.
        """
        folders.trim(self._run, keep, also=best)
        folders.point_to_best(self._run, best)

    def has(self, key: layout.CheckpointKey) -> bool:
        return self._run.checkpoint(*key).is_dir()

    def discard(self, step: int) -> None:
        """Delete a failed checkpoint to free its disk space; on rank 0, after all ranks are done."""
        shutil.rmtree(self._hidden(step), ignore_errors=True)

    def _hidden(self, step: int) -> Path:
        return folders.hidden(self._run, step, self._attempt, self._saves)

    # -- reading

    def newest(self) -> tuple[layout.CheckpointKey, int]:
        """Return the newest checkpoint and the number of checkpoints; on rank 0."""
        folders.publish_leftover(self._run)
        found = layout.complete_checkpoints(self._run)
        return (layout.checkpoint_key(found[-1]) if found else None) or layout.CheckpointKey(0), len(found)

    def problem(self, key: layout.CheckpointKey) -> str | None:
        """Return what is wrong with this rank's share of a checkpoint's files, or None if they are intact."""
        path = self._run.checkpoint(*key)
        if not folders.is_whole(path):
            return "the record of a rank is damaged or missing"
        return folders.problem(path, folders.ranks(path)[self._rank :: self._world_size])

    def set_aside(self, key: layout.CheckpointKey) -> None:
        folders.set_aside(self._run.checkpoint(*key))

    def load(self, key: layout.CheckpointKey, names: list[str]) -> Restored:
        """Load the objects; return the progress and the states assigned to this rank.

        The states of ranks that no longer exist are distributed over the current ranks, each to one of them.

        Args:
            names: everything to restore; a name that is not an object's is the loader's.

        Raises:
            UserError: the checkpoint lacks one of them, or has one per rank for a different number of ranks.
        """
        path = self._run.checkpoint(*key)
        first = folders.record(path, 0)
        shared = first.content.shared
        assert shared is not None, path
        known = [*shared.objects, shared.progress.loader.name]
        for name in names:
            if name not in known:
                raise UserError(
                    f"checkpoint {path.name} has no {name!r}{nearest(name, known)}: use the same names in run.restore"
                )
        own = self._own_objects(path, first)
        for value in self.objects.values():
            if isinstance(value, torch.optim.Optimizer):
                _make_spread_state(value)
        like = {name: tensor for state in self._states().values() for name, tensor in state.tensors.items()}
        tensors = StoredTensors(folders.tensor_files(path), like)
        for name, value in self.objects.items():
            if name in own:
                state = codec.joined(own[name], OfRank(tensors, _prefix(self._rank)))
            else:
                state = codec.joined(shared.objects[name], tensors)
            load_state(value, state, is_old=shared.differing is None)
        assigned = folders.ranks(path)[self._rank :: self._world_size]
        owns = [codec.joined(folders.record(path, rank).content.own, tensors) for rank in assigned]
        return Restored(shared.progress, shared.best and shared.best.named_by(key), owns)

    def _own_objects(self, path: Path, first: RankRecord) -> Mapping[str, Plain]:
        """Return the states of the objects that this rank saved separately.

        Args:
            first: the record of rank 0.

        Raises:
            UserError: they were saved by a different number of ranks.
        """
        shared = first.content.shared
        differing = [name for name in (shared and shared.differing) or [] if name in self.objects]
        if differing and first.world_size != self._world_size:
            raise UserError(
                f"checkpoint {path.name} has a separate {' and '.join(map(repr, differing))} for each of"
                f" {first.world_size} ranks, but this run has {self._world_size}: resume it on {first.world_size}"
                " ranks, or leave that out of run.restore"
            )
        return folders.record(path, self._rank).content.objects if differing and self._rank else {}


@dataclass(frozen=True)
class _State:
    """The current state of an object."""

    plain: Plain
    tensors: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]
    """The tensors that may differ between ranks."""
    is_rank_0s: bool
    """Whether rank 0's state counts for all ranks."""

    @property
    def digest(self) -> tuple[int, int]:
        return (0, 0) if self.is_rank_0s else digest(self.plain, self.own)


def _prefix(rank: int) -> str:
    """Return the prefix of the names of the tensors that a rank saves for its own objects."""
    return f"rank-{rank}.objects."


def _make_spread_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create its state if that is spread over ranks like its parameters, without changing these.

    The layout has to be known before parts of the state are read.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or not any(map(is_dtensor, parameters)):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def digest(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return a digest of a state as two 64-bit integers; equal states have equal digests.

    Args:
        plain: the part of the state that JSON can hold.
        tensors: tensors by name, not spread over ranks.
    """
    summed = hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        summed.update(f"\n{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        for piece in _pieces(tensors[name]):
            summed.update(piece)
    found = summed.digest()
    return int.from_bytes(found[:8], "little", signed=True), int.from_bytes(found[8:], "little", signed=True)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    held = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, held.numel(), _PIECE):
        yield held[start : start + _PIECE].cpu().numpy().data
