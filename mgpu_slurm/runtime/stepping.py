"""Counting the optimizer steps of a run, whoever makes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_DEPTH = 3
"""How far `_inside` looks into an object: a wrapper holds its optimizers in an attribute, a list or a dict."""


class StepCounter:
    """Reports each step of the run: one `step` through the counter, whatever steps inside it, and one for each
    `step()` of a torch optimizer elsewhere."""

    def __init__(self, done: Callable[[], None]) -> None:
        """
        Args:
            done: is called after each step.
        """
        self._done = done
        self._outermost: torch.optim.Optimizer | None = None
        """The optimizer that is stepping now; its `step()` may call that of others, or its base class's."""
        self._in_step = False
        self._has_stepped = False
        """Whether a torch optimizer has changed parameters in this `step`."""
        self._is_paused = False
        self.close = _listen(self)

    def step(self, optimizer: Any) -> None:
        """Call `optimizer.step()`, and count it as one step, unless it was skipped for infinite gradients."""
        is_torch = _steps_visibly(optimizer)
        scalers = [] if is_torch else list(_inside(optimizer, torch.amp.GradScaler))
        scales = [scaler.get_scale() for scaler in scalers]
        self._in_step, self._has_stepped = True, False
        try:
            optimizer.step()
        finally:
            self._in_step, self._outermost = False, None
        # a scaler halves its scale when it has skipped a step
        has_skipped = any(scaler.get_scale() < scale for scaler, scale in zip(scalers, scales, strict=True))
        if self._has_stepped or not (is_torch or has_skipped or any(_inside(optimizer, torch.optim.Optimizer))):
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
        if self._outermost is None:
            self._outermost = optimizer

    def _ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self._outermost is not optimizer:
            return
        self._outermost = None
        # set by torch's GradScaler for fused optimizers, which skip the step themselves
        if self._is_paused or getattr(optimizer, "found_inf", None):
            return
        if self._in_step:
            self._has_stepped = True
        else:
            self._done()


def _listen(counter: StepCounter) -> Callable[[], object]:
    """Have the counter hear of every step of a torch optimizer, for as long as it exists; return what ends that."""
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


def _steps_visibly(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Whether torch calls its hooks for this optimizer: not for a subclass that does not call torch's `__init__`."""
    return isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False)


def _inside(value: Any, kind: type, depth: int = _DEPTH) -> Iterator[Any]:
    """The instances of a class that an object holds."""
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    for item in items:
        if isinstance(item, kind):
            yield item
        elif depth > 1 and not isinstance(item, (torch.Tensor, torch.nn.Module)):
            yield from _inside(item, kind, depth - 1)
