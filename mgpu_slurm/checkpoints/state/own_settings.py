"""Settings of optimizers and learning rate schedulers that a run keeps when it continues from another one's checkpoint.

`load_state_dict` replaces the learning rate, momentum and so on by those of the checkpoint. A copy in population based
training continues with the other's weights and optimizer state, but trains on with its own values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_BASES, _MOST, _LAST, _PARTS = "base_lrs", "max_lrs", "_last_lr", "_schedulers"
"""Keys in the state of a scheduler: learning rates at the start, at most and now, and the states of schedulers that it
joins."""


class OwnSettings:
    """The settings that the job has built these objects with."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """
        Args:
            objects: by name, before the checkpoint is loaded.
        """
        self._optimizers = [each for each in objects.values() if isinstance(each, torch.optim.Optimizer)]
        self._groups = [[_settings(group) for group in each.param_groups] for each in self._optimizers]
        self._schedulers = [
            (each, copy.deepcopy(each.state_dict())) for each in objects.values() if isinstance(each, LRScheduler)
        ]

    def put_back(self) -> None:
        """Set them again after the checkpoint was loaded.

        A learning rate keeps its ratio to the one at the start, if the scheduler stores that. Other settings of
        schedulers are those of the checkpoint. Groups that the job adds later are as in the checkpoint, too.
        """
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, own in zip(optimizer.param_groups, groups, strict=False):
                group.update(own | _scaled_rate(group, own))
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(_with_bases(scheduler.state_dict(), state))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _scaled_rate(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning rate of a group that has a scheduler."""
    start, own_start = group.get("initial_lr"), own.get("initial_lr")
    if not start or own_start is None:
        return {}
    return {"lr": group["lr"] * (own_start / start)}


def _with_bases(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a scheduler with its own learning rates at the start."""
    found = dict(state)
    if _BASES in own and _BASES in state and len(own[_BASES]) == len(state[_BASES]):
        ratios = [mine / other if other else 1.0 for mine, other in zip(own[_BASES], state[_BASES], strict=True)]
        found |= {name: own[name] for name in (_BASES, _MOST) if name in own}
        if _LAST in state:
            found[_LAST] = [rate * ratio for rate, ratio in zip(state[_LAST], ratios, strict=True)]
    if _PARTS in state:
        found[_PARTS] = [_with_bases(part, mine) for part, mine in zip(state[_PARTS], own[_PARTS], strict=True)]
    return found
