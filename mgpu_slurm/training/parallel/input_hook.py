"""A hook that reports the inputs of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class InputHook:
    """A forward pre-hook that reports a module's inputs. Copies of the module, such as for a moving average, report
    nothing."""

    def __init__(self, tell: Callable[[nn.Module, Any], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
        # a compiler would trace it, though it is not part of the computation
        if self._tell is not None and not torch.compiler.is_compiling():
            self._tell(module, (*args, *kwargs.values()))

    def __reduce__(self) -> tuple[type[InputHook], tuple[()]]:
        return InputHook, ()
