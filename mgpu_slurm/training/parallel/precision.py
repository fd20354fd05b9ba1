"""Compute models in a lower precision: bf16 or fp16 by autocast, and TF32 for the products of float32.

Parameters, gradients and optimizer state stay in float32; see Micikevicius et al., Mixed Precision Training (2018), and
https://docs.pytorch.org/docs/stable/amp.html.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batching.nests import children_of, rebuilt
from mgpu_slurm.rank.communication.codec import StateDict
from mgpu_slurm.request.parallelism import Precision

HALF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Precisions in which models compute in 16 bits; with `fp8`, the products of large linear layers in 8."""

FP8_CAPABILITY = (8, 9)
"""The compute capability of the first GPUs with matrix products in 8 bits: Ada, then Hopper."""


def to_fp8(model: nn.Module, device: torch.device, emulate: bool = False) -> None:
    """Make the linear layers of a model compute their products in 8 bits, in place. Parameters and names stay.

    Layers whose numbers of inputs or outputs are not multiples of 16 stay as they are.
    See https://docs.pytorch.org/ao/stable/workflows/training.html.

    Args:
        emulate: compute in float32 with values of 8 bits, on any device.

    Raises:
        UserError: torchao is not installed, or the device has no such products.
    """
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY):
        here = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        raise UserError(f"--precision fp8 needs a GPU such as an H100 or newer, and this rank's is a {here}: use bf16")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise UserError("--precision fp8 needs torchao: `pip install 'mgpu-slurm[torchao]'`, or use bf16") from None
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda layer, _: layer.in_features % 16 == 0 and layer.out_features % 16 == 0,
    )


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Make a model compute under autocast, in training and in evaluation, and return float32.

    This is done by hooks, so copies of the model, such as a moving average, compute in the same way. A compiled model
    has to be compiled before: the compiler cannot trace the hooks.
    """
    hooks = _Autocast(device.type, dtype)
    model.register_forward_pre_hook(hooks.enter, prepend=True)
    model.register_forward_hook(hooks.leave, always_call=True)


class _Autocast:
    """The hooks of one model."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._entered = threading.local()
        """A stack of contexts in each thread, as replicas of DataParallel share this object; one context for each
        forward pass in progress, as a model may call itself."""

    def enter(self, model: nn.Module, inputs: Any) -> None:
        stack = ExitStack()
        stack.enter_context(torch.autocast(self._device_type, self._dtype))
        self._entered.__dict__.setdefault("contexts", []).append(stack)

    def leave(self, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        # also after an error in the model, with no outputs
        self._entered.contexts.pop().close()
        return in_float32(outputs)

    def __reduce__(self) -> tuple[type[_Autocast], tuple[str, torch.dtype]]:
        return _Autocast, (self._device_type, self._dtype)


def in_float32(outputs: Any) -> Any:
    """Return the outputs of a model with all tensors of 16 bits in float32."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in HALF.values() else outputs
    children = children_of(outputs)
    return outputs if children is None else rebuilt(outputs, [in_float32(child) for child in children])


def prepare(precision: Precision, device: torch.device) -> LossScaler | None:
    """Prepare this process for a precision, and return what scales the loss; None if nothing does."""
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    return LossScaler(device) if precision == "fp16" else None


class LossScaler:
    """Scales the loss for gradients in float16, and skips steps with infinite ones.

    The scale is adjusted before the next loss and not after each step, so that all optimizers that step after the same
    backward pass divide by the scale that it used.
    """

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)
        self._stepped: set[int] = set()
        """Ids of the optimizers that have stepped since the scale was adjusted."""
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def factor(self) -> float:
        """The scale of the next loss."""
        self._adjust()
        return self._scaler.get_scale()

    def add(self, optimizer: Any) -> None:
        """Record an optimizer that may step later."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._known.add(optimizer)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss.

        Raises:
            UserError: the scale changes while an optimizer has gradients with the previous one.
        """
        if self._stepped and any(map(_has_gradients, self._known)):
            raise UserError(
                "--precision fp16: an optimizer still has gradients of an earlier run.backward, after another one has"
                " stepped: update or zero them before the next run.backward, or use bf16"
            )
        self._adjust()
        return self._scaler.scale(loss)

    def of(self, optimizer: Any) -> ScaledStep | None:
        """Return an object whose `step()` steps the optimizer with its gradients divided by the scale; None for an
        optimizer without gradients.

        Raises:
            UserError: it is not a torch optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"--precision fp16: run.update needs a torch optimizer, not a {type(optimizer).__name__}: use bf16, or"
                " pass the optimizer"
            )
        self.add(optimizer)
        if not _has_gradients(optimizer):
            return None
        if id(optimizer) in self._stepped:
            self._adjust()
        self._stepped.add(id(optimizer))
        return ScaledStep(self._scaler, optimizer)

    def state_dict(self) -> StateDict:
        self._adjust()
        return self._scaler.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._scaler.load_state_dict(state)

    def _adjust(self) -> None:
        if self._stepped:
            self._scaler.update()
            self._stepped.clear()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])


@dataclass(frozen=True)
class ScaledStep:
    """One step of an optimizer whose gradients are those of a scaled loss."""

    scaler: torch.amp.GradScaler
    optimizer: torch.optim.Optimizer

    def unscale(self) -> None:
        """Divide the gradients by the scale, before they are clipped."""
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        """Step, unless a gradient is infinite on any rank."""
        self.scaler.step(self.optimizer)
