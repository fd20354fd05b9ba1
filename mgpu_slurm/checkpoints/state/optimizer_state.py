"""Save an optimizer's state by the names of its parameters.

torch numbers the parameters in the order of an optimizer's groups. Names do not depend on which of them a rank holds:
each stage of a pipeline has an optimizer of its own layers only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mgpu_slurm.checkpoints.state.wrapping import named_parameters
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.communication import codec
from mgpu_slurm.rank.communication.codec import Plain, RankPart, StateDict

Names = Mapping[int, str]
"""Names of parameters, by id; each begins with the name of the module in `run.restore`."""


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of these parameters by id."""
    return {id(parameter): name for name, parameter in named_parameters(objects).items()}


def named(state: Any, optimizer: torch.optim.Optimizer, names: Names) -> Any:
    """Return an optimizer's state with names for numbers; unchanged if a parameter has none, or in another form."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        return state
    own = _own_names(optimizer, names)
    if own is None or not all(number in range(len(own)) for number in state["state"]):
        return state
    groups = [{**group, "params": [own[number] for number in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {own[number]: each for number, each in state["state"].items()}, "param_groups": groups}


def is_named(state: Any) -> bool:
    """Return whether `named` has returned this state, whose tensors may be encoded."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return bool(groups) and all(isinstance(each, str) for group in groups or () for each in group["params"])


def named_by_order(state: Plain, order: Sequence[str]) -> Plain:
    """Return an encoded state of an earlier version, which saved no names, with those of the model's parameters.

    Args:
        order: names of all parameters of the model, in its order.

    Raises:
        UserError: the optimizer has several groups, or other parameters.
    """
    groups = state["param_groups"]
    if len(groups) != 1 or len(groups[0]["params"]) != len(order):
        raise UserError(
            "this checkpoint does not name the optimizer's parameters, as it is of an earlier version: resume it"
            " without --pipeline up to its next checkpoint"
        )
    entries = {order[number]: each for number, each in codec.items(state["state"])}
    return {**state, "state": entries, "param_groups": [{**groups[0], "params": list(order)}]}


def numbered(state: StateDict, optimizer: torch.optim.Optimizer, names: Names) -> StateDict:
    """Return a state with the numbers of this optimizer in place of names; the inverse of `named`.

    Raises:
        UserError: it is the state of other parameters.
    """
    saved = [name for group in state["param_groups"] for name in group["params"]]
    # unknown if the modules are not among the restored objects any more
    known = _own_names(optimizer, names)
    own = saved if known is None else known
    _check_same(saved, own)
    number_of = {name: number for number, name in enumerate(own)}
    entries = {number_of[name]: each for name, each in state["state"].items()}
    if known is None:
        groups = [{**group, "params": [number_of[name] for name in group["params"]]} for group in state["param_groups"]]
        return {**state, "state": entries, "param_groups": groups}
    group_of = {name: group for group in state["param_groups"] for name in group["params"]}
    numbers = iter(range(len(own)))
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        mine = [next(numbers) for _ in group["params"]]
        # a group of frozen layers only has no parameters
        saved_groups = [group_of[own[number]] for number in mine] or state["param_groups"][at : at + 1] or [group]
        options = _options(saved_groups[0])
        if any(each is not saved_groups[0] and not _are_same(_options(each), options) for each in saved_groups):
            raise UserError(
                f"the optimizer in the checkpoint has {own[mine[0]]!r} in a group with other options than those that"
                " are in its group now: create the groups as at that time"
            )
        groups.append({**options, "params": mine})
    return {**state, "state": entries, "param_groups": groups}


def _check_same(saved: Sequence[str], own: Sequence[str]) -> None:
    for owner, names in (("checkpoint", set(saved) - set(own)), ("new one", set(own) - set(saved))):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"the optimizer in the checkpoint has other parameters: only the one in the {owner} has"
                f" {min(names)!r}{others}: create it with the same parameters as at that time, including frozen ones"
            )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def is_same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)


def add_later_groups(optimizer: torch.optim.Optimizer, saved: Plain, objects: Mapping[str, Any]) -> int:
    """Add the groups that a run added to an optimizer some time after it had created it; return their number.

    Args:
        saved: the encoded state in the checkpoint.
        objects: see `named_parameters`.
    """
    parameters = named_parameters(objects)
    own = _own_names(optimizer, {id(parameter): name for name, parameter in parameters.items()})
    if own is None or not is_named(saved):
        return 0
    groups = [group["params"] for group in saved["param_groups"]]
    count = len(optimizer.param_groups)
    earlier, later = groups[:count], groups[count:]
    is_first_part = sorted(own) == sorted(itertools.chain(*earlier))
    if not is_first_part or not parameters.keys() >= {*itertools.chain(*later)}:
        return 0
    for group in later:
        optimizer.add_param_group({"params": [parameters[name] for name in group]})
    return len(later)


def make_divided_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create its state if that is divided over ranks like its parameters, without changing these.

    The layout has to be known before parts of the state are read.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or not any(map(torch_adapter.is_dtensor, parameters)):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # some optimizers insist on a tensor
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def divided(state: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a state with tensors that are divided like those of the optimizer in place of its parts.

    Raises:
        UserError: a state in 8 bits was divided in another way; its blocks cannot be divided again.
    """
    if not isinstance(state, dict) or "state" not in state:
        return state
    current = optimizer.state_dict()["state"]
    entries = {
        number: {key: _divided(value, current.get(number, {}).get(key)) for key, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _divided(value: Any, current: Any) -> Any:
    is_part = isinstance(value, RankPart)
    if not is_part and not (isinstance(value, torch.Tensor) and torch_adapter.is_composed(value)):
        return value
    tensor = value.tensor if is_part else value
    if is_part != (current is not None and torch_adapter.is_dtensor(current)) or (
        is_part and torch_adapter.local_part(current).shape != tensor.shape
    ):
        raise UserError(
            "the checkpoint's optimizer keeps its state in 8 bits, which cannot be divided in another way: resume with"
            " the same strategy and number of ranks"
        )
    return torch_adapter.like_dtensor(current, tensor.to(current.device)) if is_part else tensor


def _own_names(optimizer: torch.optim.Optimizer, names: Names) -> list[str] | None:
    """Return the names of the parameters by number, or None if not all are known or some have the same."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = [names[id(parameter)] for parameter in parameters if id(parameter) in names]
    return own if len(own) == len(parameters) == len(set(own)) else None
