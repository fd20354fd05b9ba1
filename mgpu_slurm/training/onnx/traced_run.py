"""The run of a job of which only the first forward pass of its model matters: it ends there, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.training.restore import State
from mgpu_slurm.training.run import Run


@dataclass(frozen=True)
class ModelCall:
    """A model, and the inputs with which the job calls it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hook: Callable[..., None]
    """The forward pre-hook of the model that has found the call."""


class FirstForward(BaseException):
    """Ends the job at the first forward pass of the model that is looked for."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class TracedRun(Run):
    """A run on one rank, on the CPU."""

    def __init__(self, folder: Path, name: str, keys: Set[str]) -> None:
        """
        Args:
            folder: an empty one.
            name: that of the model in `run.restore`.
            keys: the names of its parameters and buffers.
        """
        alone = RankInfo()
        super().__init__(alone, folder, torch.device("cpu"), 1, StopFlag(), Collectives(alone))
        self._name = name
        self._keys = keys
        self._restored: dict[int, str] = {}
        """Names of restored objects, by their ids."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        # a compiled model is exported as it was
        model = getattr(model, torch_adapter.COMPILED_MODULE) if torch_adapter.is_compiled(model) else model

        # functions, because a copy of the model would copy methods with this run
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            known = self._restored.get(id(module))
            # one that is not restored may be a copy of the one that is
            if known == self._name or (known is None and module.state_dict().keys() == self._keys):
                raise FirstForward(ModelCall(module, args, kwargs, enter))

        model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        return model

    def pipeline(self, layers: Sequence[nn.Module], *args: Any, **options: Any) -> NoReturn:
        raise UserError("--to onnx: a model in the stages of run.pipeline has no single forward pass")

    def restore(self, **objects: Any) -> State:
        self._restored |= {id(each): name for name, each in objects.items()}
        state = super().restore(**{name: each for name, each in objects.items() if isinstance(each, Loader)})
        self._loop_control.keeps = False
        return state

    def report(self, progress: SupportsIndex, *, total: SupportsIndex | None = None, **metrics: Any) -> None:
        pass

    def save(self) -> None:
        pass
