"""Compile the repeated blocks of a model, or the whole model, by `torch.compile`: `--compile`.

Blocks of one class share the code of one compilation, see
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html. The forward method of the class is compiled, not
the module: hooks, such as those of `fully_shard` and autocast, are called around the compiled code.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.training.parallel.sharding import blocks_of
from mgpu_slurm.training.speed.compiler_cache import CACHE_VARIABLE


def compile_model(model: nn.Module, blocks: Sequence[type[nn.Module]], device: torch.device, in_order: bool) -> None:
    """Compile the blocks of a model, or all of it if there are none, in place. Names of parameters stay.

    Torch does so when a block is first called, and once more for another batch size, which it then treats as dynamic.

    Args:
        blocks: classes of the repeated layers.
        in_order: whether results must depend on the current batch alone. Otherwise, batches after one of another size
            are computed by code for any size, which may round differently.

    Raises:
        UserError: the model contains no such blocks, or this node has no compiler.
    """
    compile_layers(blocks_of(model, blocks, "--compile") if blocks else [model], device, in_order)


def compile_layers(layers: Iterable[nn.Module], device: torch.device, in_order: bool) -> None:
    """Compile each of these modules, see `compile_model`."""
    _check_compiler(device)
    fresh = [layer for layer in layers if not isinstance(layer, _Compiled) and not torch_adapter.is_compiled(layer)]
    kinds: set[Any] = {(type(layer), *(tensor.shape for tensor in layer.parameters())) for layer in fresh}
    torch_adapter.allow_compilations(len(kinds), for_each_size=in_order)
    # also on a GPU, where a model may compute something on the CPU
    if CACHE_VARIABLE in os.environ:
        torch_adapter.keep_headers_in(Path(os.environ[CACHE_VARIABLE], "headers"))
    if shutil.which("openssl") is None:
        # torch names them by a checksum from it
        torch_adapter.compile_without_headers()
    for layer in fresh:
        if "forward" in vars(layer):
            raise UserError(
                f"--compile: {type(layer).__name__}.forward was replaced on the module itself: replace it in a subclass"
            )
        layer.__class__ = _compiled(type(layer), in_order)  # type: ignore[arg-type]


class _Compiled:
    """Base class of modules whose forward method is compiled."""


@cache
def _compiled(kind: type[nn.Module], in_order: bool) -> type[nn.Module]:
    forward = torch.compile(
        kind.forward,
        dynamic=False if in_order else None,
        options=torch_versions.deterministic_options() if in_order else None,
    )

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return type(kind.__name__, (_Compiled, kind), {"__module__": kind.__module__, "forward": call})


def _check_compiler(device: torch.device) -> None:
    """
    Raises:
        UserError: this node lacks what torch needs to compile for the device.
    """
    # torch compiles for a CPU by the one, and Triton its launchers of kernels for a GPU by the other
    language, variable, names = ("C++", "CXX", ["g++"]) if device.type == "cpu" else ("C", "CC", ["gcc", "clang"])
    names = [os.environ[variable]] if variable in os.environ else names
    node = os.uname().nodename
    if not any(map(shutil.which, names)):
        raise UserError(
            f"--compile needs a {language} compiler, and {node} has no {' or '.join(names)}: load one in the cluster's"
            f" `setup`, or set {variable} to its path"
        )
    if not (header := Path(sysconfig.get_paths()["include"], "Python.h")).exists():
        raise UserError(
            f"--compile needs Python's headers, and {node} has no {header}: install them (python3-dev), or use a Python"
            " that brings them, such as conda's or uv's"
        )
