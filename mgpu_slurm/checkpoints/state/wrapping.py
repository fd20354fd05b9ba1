"""The modules that `run.wrap` returned, whose state is rank 0's on all ranks, and state names independent of wrapping.

DistributedDataParallel, DataParallel and `torch.compile` add a prefix to the names of the module they wrap. They are
recognized by their classes, because a user's attribute may have the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from mgpu_slurm.checkpoints.state.tensors import is_sharded, memory_id
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.torch_adapter import is_dtensor

WRAPPERS = {"module", "_orig_mod"}
"""Parts of names in checkpoints of version 0.1 that may come from wrapping."""


class Wrapped:
    """The modules that `run.wrap` has returned."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._stages: list[nn.Module] = []

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def add(self, module: nn.Module) -> None:
        self._modules.append(module)

    def add_stage(self, module: nn.Module) -> None:
        """Add a module that is one stage of a model; the other stages are on other ranks."""
        self.add(module)
        self._stages.append(module)

    def is_staged(self, value: Any) -> bool:
        """Return whether an object is a stage of a model, or an optimizer or a moving average of one."""
        if not hasattr(value, "param_groups"):
            return any(part in self._stages for part in (value, getattr(value, "module", None)))
        staged = {id(parameter) for stage in self._stages for parameter in stage.parameters()}
        parameters = [each for group in value.param_groups for each in group["params"]]
        # without any, all layers of this stage are frozen, and the other stages' optimizers have some
        return any(id(each) in staged for each in parameters) if parameters else bool(self._stages)

    def contains_stage(self, value: Any) -> bool:
        """Return whether an object is a module around a stage, which cannot be joined with the other stages."""
        parts = value.modules() if isinstance(value, nn.Module) else ()
        return any(part in self._stages for part in parts if part is not value)

    def reaches(self, value: Any) -> Callable[[str], bool]:
        """Return a function that reports whether a name in the state of an object belongs to a wrapped module.

        An optimizer belongs to wrapped modules if all of its parameters do, a moving average if it averages one.
        """
        tensors = {id(each) for module in self._modules for each in (*module.parameters(), *module.buffers())}
        if isinstance(value, torch.optim.Optimizer):
            parameters = [parameter for group in value.param_groups for parameter in group["params"]]
            are_all = all(id(parameter) in tensors or is_dtensor(parameter) for parameter in parameters)
            return lambda name: are_all
        if not isinstance(value, nn.Module):
            averaged = _unwrapped(getattr(value, "module", None))
            is_average = any(averaged is _unwrapped(module) for module in self._modules)
            return lambda name: is_average
        if is_sharded(value):
            # a single model, sharded over the ranks
            return lambda name: True

        # computed once, not for each name
        inside = [part for module in self._modules for part in module.modules()]
        inside += [part for part in value.modules() if isinstance(part, DistributedDataParallel)]
        inside += [part for part in value.modules() if isinstance(part, AveragedModel) and self._averages(part)]
        belonging = tensors | {id(part) for part in inside}
        is_inside = id(value) in belonging
        if is_inside or not belonging:
            return lambda name: is_inside
        return lambda name: any(id(part) in belonging for part in _along(value, name))

    def holds(self) -> Callable[[torch.Tensor], bool]:
        """Return a function that reports whether a tensor belongs to a wrapped module, in whichever state it occurs."""
        held = (each for module in self._modules for each in (*module.parameters(), *module.buffers()))
        places = {memory_id(each) for each in held if not is_dtensor(each)}
        return lambda tensor: memory_id(tensor) in places

    def _averages(self, average: AveragedModel) -> bool:
        """Return whether it is a moving average of a wrapped module, judged by the same names and shapes."""
        return any(_form(average.module) == _form(module) for module in self._modules)


def _form(module: nn.Module) -> list[tuple[str, torch.Size]]:
    module = _unwrapped(module)
    return [(name, each.shape) for name, each in (*module.named_parameters(), *module.named_buffers())]


def _unwrapped(module: Any) -> Any:
    while (child := _wraps(module)) is not None:
        module = getattr(module, child)
    return module


def _wraps(module: Any) -> str | None:
    """Return the name under which a wrapper holds its module, or None for any other module."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    return torch_adapter.COMPILED_MODULE if torch_adapter.is_compiled(module) else None


def _along(module: nn.Module, name: str) -> Iterator[Any]:
    """Yield the modules on the path to a name in a state, from the root, and the tensor at its end."""
    current: Any = module
    for part in name.split("."):
        yield current
        current = torch_adapter.registered(current, part)
        if current is None:
            return
        if not isinstance(current, nn.Module):
            break
    yield current


def canonical_names(module: nn.Module, state: Collection[str]) -> dict[str, str]:
    """Map each name in a module's state to the name without the parts that come from wrapping."""
    modules = module.named_modules(remove_duplicate=False)
    wrapped = {f"{path}.{child}".lstrip(".") for path, each in modules if (child := _wraps(each)) is not None}
    names = {name: _without(wrapped, name) if wrapped else name for name in state}
    # wrappers with their own tensors may cause duplicate names, of which one would be lost
    return names if len(set(names.values())) == len(names) else {name: name for name in state}


def _without(wrapped: Container[str], name: str) -> str:
    """Return a name without the last part of each of its prefixes that is the name of a wrapped module."""
    parts = name.split(".")
    beginnings = accumulate(parts, "{}.{}".format)
    return ".".join(part for part, beginning in zip(parts, beginnings, strict=True) if beginning not in wrapped)


def named_parameters(objects: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return the parameters of all modules among these objects by name, independent of wrapping."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            parameters = dict(value.named_parameters())
            canonical = canonical_names(value, parameters)
            for own, parameter in parameters.items():
                found.setdefault(id(parameter), (f"{name}.{canonical[own]}", parameter))
    return dict(found.values())


def frozen_parameters(objects: Mapping[str, Any]) -> list[str]:
    """Return the names of those of them that are not trained."""
    return [name for name, parameter in named_parameters(objects).items() if not parameter.requires_grad]


def freeze(objects: Mapping[str, Any], frozen: Collection[str]) -> int:
    """Freeze the parameters with these names, and train all others; return how many that changes."""
    changed = 0
    for name, parameter in named_parameters(objects).items():
        if parameter.requires_grad != (name not in frozen):
            parameter.requires_grad_(name not in frozen)
            changed += 1
    return changed


def state_of(value: Any) -> tuple[Any, dict[str, str]]:
    """Return the state of an object, and its actual names by canonical name; a module's state has canonical names."""
    state = value.state_dict()
    if not isinstance(value, nn.Module):
        return state, {}
    names = canonical_names(value, state)
    return _renamed(state, names), {canonical: name for name, canonical in names.items()}


def _renamed(state: Any, names: Mapping[str, str]) -> Any:
    return type(state)((names.get(name, name), each) for name, each in state.items())


def load_state(value: Any, state: Any, is_old: bool) -> None:
    """Load a state returned by `state_of` into an object, however that is wrapped now.

    Args:
        is_old: whether version 0.1 wrote the state, which used different names.
    """
    if isinstance(value, nn.Module):
        _, actual = state_of(value)
        if is_old:
            actual = _from_version_0_1(actual, state)
        state = _renamed(state, actual)
    value.load_state_dict(state)


def _from_version_0_1(actual: Mapping[str, str], state: Collection[str]) -> dict[str, str]:
    """Map the names in an old checkpoint, which depend on its wrapping, to the names of the module.

    Args:
        actual: the module's names by canonical name.
    """
    if set(state) == set(actual.values()):
        return {}
    if set(state) != set(actual):
        # its wrapping is unknown: map the names only if each has exactly one counterpart
        ours, theirs = {_short(name): name for name in actual}, {_short(name): name for name in state}
        if ours.keys() == theirs.keys() and len(ours) == len(actual) and len(theirs) == len(state):
            return {theirs[short]: actual[name] for short, name in ours.items()}
    return dict(actual)


def _short(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
