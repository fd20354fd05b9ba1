"""The state that a rank saves in checkpoints, and how a run resumes from it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mgpu_slurm.checkpoints import folder as folders
from mgpu_slurm.checkpoints.policy import Best
from mgpu_slurm.checkpoints.rank_record import Content, ProgressRecord, RankRecord, SharedRecord
from mgpu_slurm.checkpoints.reader import OfRank, StoredTensors
from mgpu_slurm.checkpoints.state import optimizer_state, stage_states
from mgpu_slurm.checkpoints.state.object_state import ObjectState, digest
from mgpu_slurm.checkpoints.state.wrapping import Wrapped, freeze, frozen_parameters, load_state, state_of
from mgpu_slurm.checkpoints.writer import HostCopies, refuse_unwritable
from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import MgpuError, UserError, nearest
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.rank.communication import codec
from mgpu_slurm.rank.communication.codec import Plain, StateDict
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.torch_adapter import is_dtensor
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.checkpoint_names import CheckpointKey, checkpoint_key, complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.usage_records import SaveRecord, note_save

LOOK_EVERY = 1.0
"""Seconds between two looks at the progress of a write."""


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
    first: StateDict
    """The state of rank 0, for what all ranks have in common."""


class Keeper:
    """One rank's part in the checkpoints of a run."""

    def __init__(
        self,
        run: RunFolder,
        facts: RankInfo,
        attempt: int,
        wrapped: Wrapped,
        collectives: Collectives,
        first_ranks: Sequence[int] = (0,),
    ) -> None:
        """
        Args:
            wrapped: modules whose state is saved by rank 0 only; ranks may differ in anything else.
            first_ranks: the first rank of each stage, which saves the state of that.
        """
        self.objects: dict[str, Stateful] = {}
        """Objects by the names that the user gave them."""
        self._run = run
        self._rank = facts.rank
        self._world_size = facts.world_size
        self._attempt = attempt
        self._wrapped = wrapped
        self._collectives = collectives
        self._first_ranks = first_ranks
        self._saves = 0
        self._is_written = threading.Event()
        self._pieces = 0
        """Number of pieces written so far."""
        self._shared_copies = HostCopies()
        self._stage_copies = HostCopies()
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
        staged = {name: self._wrapped.is_staged(value) for name, value in self.objects.items()}
        for name, value in self.objects.items():
            if self._wrapped.contains_stage(value):
                raise UserError(f"run.restore({name}=...): it contains a pipeline: pass the pipeline itself")
            is_optimizer = isinstance(value, torch.optim.Optimizer)
            if is_optimizer and staged[name] and not optimizer_state.is_named(self._state(name).plain):
                raise UserError(f"run.restore({name}=...): pass the pipeline of this optimizer, too")
        if any(self._collectives.differ(digest(names, {}))):
            raise UserError(f"run.restore: every rank must pass the same names, and this one passed {', '.join(names)}")
        # not together with the names, on which the number of flags depends
        for name, is_mixed in zip(names, self._collectives.differ([*staged.values()]), strict=True):
            if is_mixed:
                raise UserError(
                    f"run.restore({name}=...): on some ranks only, it has parameters of a pipeline: create a separate"
                    f" {type(self.objects[name]).__name__} for the other parameters"
                )

    def _state(self, name: str, with_names: bool = True) -> ObjectState:
        """
        Args:
            with_names: whether an optimizer's parameters have names; in checkpoints of earlier versions, they have not.
        """
        value = self.objects[name]
        state, actual = state_of(value)
        if with_names and isinstance(value, torch.optim.Optimizer):
            state = optimizer_state.named(state, value, optimizer_state.parameter_names(self.objects))
        shape, tensors = codec.split(state, name)
        refuse_unwritable(tensors)
        reached, is_held = self._wrapped.reaches(value), self._wrapped.holds()
        parts = codec.names_in_parts(shape)
        own = {
            key: tensor
            for key, tensor in tensors.items()
            if key in parts
            or not (is_dtensor(tensor) or reached(actual.get(key.removeprefix(f"{name}."), "")) or is_held(tensor))
        }
        return ObjectState(
            shape, tensors, own, is_rank_0s=reached("") and not parts, is_staged=self._wrapped.is_staged(value)
        )

    def _states(self) -> dict[str, ObjectState]:
        return {name: self._state(name) for name in self.objects}

    def _differing(self, states: Mapping[str, ObjectState]) -> list[str]:
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
        staged = [name for name, state in states.items() if state.is_staged]
        is_first = self._rank in self._first_ranks
        frozen = frozen_parameters(self.objects) if is_first else None
        if self._rank == 0:
            objects = {name: state.plain for name, state in states.items()}
            stages = tuple(self._first_ranks[1:]) if staged else ()
            shared_record = SharedRecord(progress, best, objects, differing, stages)
            self._content = Content(own_state, shared_record, frozen=frozen)
        else:
            saved = [*differing, *(staged if is_first else [])]
            self._content = Content(own_state, None, {name: states[name].plain for name in saved}, frozen)
            of_objects = [tensor for name in differing for tensor in states[name].own.items()]
            own_tensors |= {f"{_prefix(self._rank)}{name}": tensor for name, tensor in of_objects}
        shared = {
            name: tensor for each in states.values() if not each.is_staged for name, tensor in each.tensors.items()
        }
        of_stage = {name: tensor for each in staged for name, tensor in states[each].tensors.items()}
        self._parts = self._shared_copies.take(shared, is_main=self._rank == 0)
        self._parts |= self._stage_copies.take(of_stage, is_main=is_first)
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

    def publish(self, step: int) -> CheckpointKey:
        """Give the checkpoint its final name and return its key; on rank 0, after all ranks have written.

        Raises:
            OSError: it could not be renamed.
            MgpuError: a later attempt has replaced this one.
        """
        if records.attempts_started(self._run) > self._attempt:
            # for example on a node that was considered lost but is still running
            raise MgpuError(f"attempt {self._attempt} of this run was superseded by a later one and exits")
        key = checkpoint_key(folders.publish(self._hidden(step)))
        assert key is not None
        return key

    def note_save(self, times: SaveRecord) -> None:
        """Record when a checkpoint was saved."""
        note_save(self._run, self._attempt, times)

    def tidy(self, keep: int, best: CheckpointKey | None) -> None:
        """Delete old checkpoints and point the link `best` to the best one; on rank 0.

        Args:
            keep: number of newest checkpoints to keep.
            best: checkpoint to keep as well.

        Raises:
            OSError: the link cannot be created.
        """
        folders.trim(self._run, keep, also=best)
        folders.point_to_best(self._run, best)

    def has(self, key: CheckpointKey) -> bool:
        return self._run.checkpoint(*key).is_dir()

    def discard(self, step: int) -> None:
        """Delete a failed checkpoint to free its disk space; on rank 0, after all ranks are done."""
        shutil.rmtree(self._hidden(step), ignore_errors=True)

    def _hidden(self, step: int) -> Path:
        return folders.hidden(self._run, step, self._attempt, self._saves)

    # -- reading

    def newest(self) -> tuple[CheckpointKey, int]:
        """Return the newest checkpoint and the number of checkpoints; on rank 0."""
        folders.publish_leftover(self._run)
        found = complete_checkpoints(self._run)
        return (checkpoint_key(found[-1]) if found else None) or CheckpointKey(0), len(found)

    def problem(self, key: CheckpointKey) -> str | None:
        """Return what is wrong with this rank's share of a checkpoint's files, or None if they are intact."""
        path = self._run.checkpoint(*key)
        if not folders.is_whole(path):
            return "the record of a rank is damaged or missing"
        return folders.problem(path, folders.ranks(path)[self._rank :: self._world_size])

    def set_aside(self, key: CheckpointKey) -> None:
        folders.set_aside(self._run.checkpoint(*key))

    def load(self, key: CheckpointKey, names: list[str]) -> Restored:
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
        saved = self._saved_objects(path, shared)
        for name, value in self.objects.items():
            if isinstance(value, torch.optim.Optimizer):
                if name not in own and not shared.stages:
                    self._add_later_groups(name, value, saved[name])
                optimizer_state.make_divided_state(value)
        current = {name: self._state(name, optimizer_state.is_named(saved[name])) for name in self.objects}
        like = {name: tensor for state in current.values() for name, tensor in state.tensors.items()}
        tensors = StoredTensors(folders.tensor_files(path), like)
        parameters = optimizer_state.parameter_names(self.objects)
        for name, value in self.objects.items():
            if name in own:
                state = codec.joined(own[name], OfRank(tensors, _prefix(self._rank)))
            else:
                state = codec.joined(self._part(name, saved[name], current[name]), tensors)
            if isinstance(value, torch.optim.Optimizer):
                if optimizer_state.is_named(state):
                    state = optimizer_state.numbered(state, value, parameters)
                state = optimizer_state.divided(state, value)
            load_state(value, state, is_old=shared.differing is None)
        self._freeze([first, *(folders.record(path, rank) for rank in shared.stages)])
        assigned = folders.ranks(path)[self._rank :: self._world_size]
        owns = [codec.joined(folders.record(path, rank).content.own, tensors) for rank in assigned]
        of_first = codec.joined(first.content.own, tensors)
        return Restored(shared.progress, shared.best and shared.best.named_by(key), owns, of_first)

    def _add_later_groups(self, name: str, optimizer: torch.optim.Optimizer, saved: Plain) -> None:
        added = optimizer_state.add_later_groups(optimizer, saved, self.objects)
        if added and self._rank == 0:
            log_lines.say(
                f"run.restore: added {counted(added, 'group')} of parameters to {name!r}, as in the checkpoint"
            )

    def _freeze(self, saved: Sequence[RankRecord]) -> None:
        """Train the parameters that were trained when these ranks wrote their records, and freeze the others."""
        if any(record.content.frozen is None for record in saved):
            return
        frozen = {name for record in saved for name in record.content.frozen or ()}
        changed = freeze(self.objects, frozen)
        if changed and self._rank == 0:
            log_lines.say(f"run.restore: froze or unfroze {counted(changed, 'parameter')}, as in the checkpoint")

    def _saved_objects(self, path: Path, shared: SharedRecord) -> dict[str, Plain]:
        """Return the encoded states of the objects, joined from those of all stages of a pipeline."""
        return {name: stage_states.saved_object(path, shared, name) for name in self.objects}

    def _part(self, name: str, saved: Plain, current: ObjectState) -> Plain:
        """Return the part of an object's encoded state that this rank loads: that of its stage, or all of it."""
        if not current.is_staged:
            return saved
        value = self.objects[name]
        if not isinstance(value, torch.optim.Optimizer):
            return stage_states.part_of(saved, {pair[0] for pair in codec.items(current.plain)})
        if not optimizer_state.is_named(saved):
            order = [
                f"{key}.{each}" for key in self.objects for each in getattr(self.objects[key], "parameter_names", [])
            ]
            saved = optimizer_state.named_by_order(saved, order)
        return stage_states.part_of(saved, set(optimizer_state.parameter_names(self.objects).values()))

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
        if not differing or not self._rank:
            return {}
        # the first rank of a stage has saved other objects, too
        saved = folders.record(path, self._rank).content.objects
        return {name: saved[name] for name in differing}


def _prefix(rank: int) -> str:
    """Return the prefix of the names of the tensors that a rank saves for its own objects."""
    return f"rank-{rank}.objects."
