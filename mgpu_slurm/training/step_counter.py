"""Count the optimizer steps of a run, whatever code makes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.torch_adapter import is_dtensor
from mgpu_slurm.training.parallel.clipping import clip_gradients
from mgpu_slurm.training.parallel.precision import LossScaler, ScaledStep

_DEPTH = 3
"""How deep `_inside` searches an object: a wrapper holds its optimizers in an attribute, a list or a dict."""


class StepCounter:
    """Reports each step of the run: one per `step` of the counter, however many optimizers step inside it, and one per
    `step()` of a torch optimizer elsewhere."""

    def __init__(
        self,
        done: Callable[[], None],
        scaler: LossScaler | None = None,
        stages_of: Callable[[Any], Any] = lambda optimizer: None,
    ) -> None:
        """
        Args:
            done: called after each step.
            scaler: scales the loss; only `step` may then use the gradients.
            stages_of: returns the mesh of the ranks whose optimizers have the other parameters of a model that
                is divided into stages; None for any other optimizer.
        """
        self._done = done
        self.scaler = scaler
        self._stages_of = stages_of
        self._outermost: torch.optim.Optimizer | None = None
        """The optimizer that is stepping now; its `step()` may call those of others, or of its base class."""
        self._updated: Any = None
        """The object that `step` is stepping."""
        self._has_stepped = False
        """Whether a torch optimizer inside it has changed parameters."""
        self._is_paused = False
        self.close = _listen(self)

    def add(self, value: Any) -> None:
        """Record an object that may be an optimizer which steps later."""
        if self.scaler is not None:
            self.scaler.add(value)

    def step(self, optimizer: Any, clip: float | None = None) -> None:
        """Call `optimizer.step()`, and count it as one step unless it was skipped because of infinite gradients.

        Args:
            clip: the norm to which the gradients are clipped before.

        Raises:
            UserError: the gradients cannot be clipped, or are those of a scaled loss and this is no torch optimizer.
        """
        scaled = None if self.scaler is None else self.scaler.of(optimizer)
        if clip is not None:
            _clip(optimizer, clip, scaled, self._stages_of(optimizer))
        self._updated, self._has_stepped = scaled or optimizer, False
        try:
            with _heard_scalers() as skips:
                self._updated.step()
        finally:
            self._updated = self._outermost = None
        if self._has_stepped:
            is_skipped = False
        elif skips:
            is_skipped = all(skips)
        else:
            is_skipped = _has_skipped_by_itself(optimizer)
        if not is_skipped:
            self._done()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in this block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None and self._updated is None and not self._is_paused:
            raise UserError(
                "--precision fp16: the loss is scaled: call run.update(optimizer) instead of step(), or use bf16"
            )
        if self._outermost is None:
            self._outermost = optimizer

    def _ends(self, optimizer: torch.optim.Optimizer) -> None:
        is_outermost = self._outermost is optimizer
        if is_outermost:
            self._outermost = None
        if self._is_paused or torch_adapter.skips_step(optimizer):
            return
        if self._updated is None:
            if is_outermost:
                self._done()
        elif optimizer is not self._updated:
            self._has_stepped = True


def _listen(counter: StepCounter) -> Callable[[], object]:
    """Notify the counter of every step of a torch optimizer while it exists; return a function that stops that."""
    counts = weakref.ref(counter)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (own := counts()) is not None:
            own._begins(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (own := counts()) is not None:
            own._ends(optimizer)

    hooks = ExitStack()
    hooks.callback(register_optimizer_step_pre_hook(before).remove)
    hooks.callback(register_optimizer_step_post_hook(after).remove)
    return weakref.finalize(counter, hooks.close)


def _clip(optimizer: Any, norm: float, scaled: ScaledStep | None, stages: Any) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise UserError(
            f"run.update(clip={norm!r}): a {type(optimizer).__name__} has no param_groups: clip the gradients before"
            " run.update, or add that attribute"
        )
    if scaled is not None:
        scaled.unscale()
    clip_gradients((each for group in optimizer.param_groups for each in group["params"]), norm, stages)


def _steps_visibly(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Return whether this is an optimizer for which torch calls its hooks."""
    return isinstance(optimizer, torch.optim.Optimizer) and torch_adapter.calls_step_hooks(optimizer)


@contextmanager
def _heard_scalers() -> Iterator[list[bool]]:
    """Collect, for each step of a GradScaler in this block, whether it was skipped. This patches the class, because an
    object may hold its scaler anywhere."""
    skips: list[bool] = []
    original = torch.amp.GradScaler.step

    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result = original(scaler, optimizer, *args, **kwargs)
        # before `update` resets it; a disabled scaler records nothing
        if scaler.is_enabled():
            skips.append(torch_adapter.has_found_infinite(scaler, optimizer))
        return result

    with torch_adapter.replaced(torch.amp.GradScaler, step=step):
        yield skips


def _has_skipped_by_itself(optimizer: Any) -> bool:
    """Return whether an object in which no torch optimizer has stepped skipped infinite gradients without a
    GradScaler."""
    if _steps_visibly(optimizer):
        return False
    groups = [group for each in _inside(optimizer) for group in each.param_groups]
    gradients = [each.grad for group in groups for each in group["params"] if each.grad is not None]
    return bool(gradients) and not _are_finite(gradients)


def _are_finite(gradients: list[torch.Tensor]) -> bool:
    """Return whether gradients are finite; on all ranks, if they are sharded."""
    # in 16 bits, the norm of finite numbers may be infinite
    norms = [gradient.float().norm() for gradient in gradients]
    whole = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    return bool(torch.stack([norm.to(whole[0].device) for norm in whole]).isfinite().all())


def _inside(value: Any, depth: int = _DEPTH) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers that an object holds."""
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    for item in items:
        if isinstance(item, torch.optim.Optimizer):
            yield item
        elif depth > 1 and not isinstance(item, (torch.Tensor, torch.nn.Module)):
            yield from _inside(item, depth - 1)
