"""Divide the layers of a model over ranks, which compute each layer together: `--tensor`.

See Shoeybi et al., Megatron-LM (2019), and https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.rank.torch_adapter import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STYLES = ("column", "row", "embedding", "output")
"""`column` divides the outputs of a linear layer, or the columns of an embedding; `row` divides the inputs of a linear
layer, which a layer in style `column` computes; `embedding` divides the rows of an embedding; `output` is `column` with
gathered outputs, for a last layer."""


def divide(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divide layers in place over the ranks of a mesh of one dimension.

    The parameters of all other layers stay whole on each rank.

    Args:
        plan: styles by the names of `nn.Linear` and `nn.Embedding` modules, in which `*` matches one part of a name.

    Raises:
        UserError: the plan does not fit the model.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    styles = _styles()
    planned = _planned(model, plan)
    tied = _tied_parameters(model)
    for name, style in planned.items():
        parallelize_module(model.get_submodule(name), mesh, styles[style]())
    _tie_again(model, tied)


def step_one_by_one(optimizer: Any) -> None:
    """Make an optimizer compute each parameter by itself where only some of a group are divided.

    On a GPU, torch's optimizers compute all of them together by default, by operations that refuse such a mixture.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and len(set(map(is_dtensor, group["params"]))) > 1:
            group["foreach"] = False


def _styles() -> dict[str, Callable[[], Any]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "column": ColwiseParallel,
        "row": RowwiseParallel,
        "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
        "output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }


def _planned(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the styles by full names of modules.

    Raises:
        UserError: a style or name is unknown, or a module is none of those that can be divided.
    """
    modules = dict(model.named_modules())
    planned: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UserError(
                f"run.wrap(plan=...): {pattern!r}: {style!r} is none of {', '.join(STYLES)}{nearest(style, [*STYLES])}"
            )
        found = [name for name in modules if _matches(name, pattern)]
        if not found:
            known = {re.sub(r"\b\d+\b", "*", name) for name in modules if name}
            raise UserError(f"run.wrap: plan names {pattern!r}, which matches nothing{nearest(pattern, sorted(known))}")
        for name in found:
            if not isinstance(modules[name], (nn.Linear, nn.Embedding)):
                raise UserError(
                    f"run.wrap: plan names {pattern!r}, a {type(modules[name]).__name__}: only nn.Linear and"
                    " nn.Embedding can be divided"
                )
            if planned.setdefault(name, style) != style:
                raise UserError(f"run.wrap: plan has two styles for {name!r}: {planned[name]} and {style}")
    return planned


def _matches(name: str, pattern: str) -> bool:
    parts, expected = name.split("."), pattern.split(".")
    return len(parts) == len(expected) and all(map(fnmatchcase, parts, expected))


def _tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are the same tensor."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]


def _tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Make parameters the same again after they were divided one by one.

    Raises:
        UserError: they were divided in different ways.
    """
    for names in tied:
        first: Any = model.get_parameter(names[0])
        for name in names[1:]:
            other: Any = model.get_parameter(name)
            if getattr(first, "placements", None) != getattr(other, "placements", None):
                raise UserError(
                    f"run.wrap: plan divides {names[0]!r} and {name!r} differently, but they are one tensor: use"
                    " `embedding` with `output`, or leave both out"
                )
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, first)
