"""Join the states that the stages of a pipeline saved, and find the part of a stage in the state of a whole model.

States are encoded here, so that a rank reads only its own tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from mgpu_slurm.checkpoints import folder as folders
from mgpu_slurm.checkpoints.rank_record import SharedRecord
from mgpu_slurm.checkpoints.state import optimizer_state
from mgpu_slurm.rank.communication import codec
from mgpu_slurm.rank.communication.codec import Plain


def saved_object(path: Path, shared: SharedRecord, name: str) -> Plain:
    """Return the state of an object in a checkpoint, joined from those of all stages of a pipeline.

    Args:
        path: the checkpoint.
        shared: the part of it that all ranks have in common.
    """
    parts = [shared.objects[name]]
    if name not in (shared.differing or ()):
        others = (folders.record(path, rank).content.objects for rank in shared.stages)
        parts += [objects[name] for objects in others if name in objects]
    return joined(parts)


def joined(parts: Sequence[Plain]) -> Plain:
    """Return the state of the whole object from those of its stages: of a module, or of an optimizer by names."""
    first, *others = parts
    if not others:
        return first
    if not optimizer_state.is_named(first):
        return codec.with_items(first, [pair for part in parts for pair in codec.items(part)])
    # each stage may have other options, which are found by the names of parameters
    groups = [group for part in parts for group in part["param_groups"]]
    entries = {name: entry for part in parts for name, entry in part["state"].items()}
    return {**first, "state": entries, "param_groups": groups}


def part_of(whole: Plain, names: Collection[str]) -> Plain:
    """Return the part of a state with these names: of a module's state, or of an optimizer's parameters."""
    if optimizer_state.is_named(whole):
        groups = [
            {**group, "params": [name for name in group["params"] if name in names]} for group in whole["param_groups"]
        ]
        entries = {name: entry for name, entry in whole["state"].items() if name in names}
        return {**whole, "state": entries, "param_groups": groups}
    return codec.with_items(whole, [pair for pair in codec.items(whole) if pair[0] in names])
