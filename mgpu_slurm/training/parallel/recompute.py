"""Recompute the activations of blocks in the backward pass instead of keeping them: `run.wrap(recompute=True)`.

See Chen et al., Training Deep Nets with Sublinear Memory Cost (2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recompute_blocks(blocks: Sequence[nn.Module]) -> None:
    """Make blocks recompute their activations; names, values and copies of the modules stay as they are."""
    for block in blocks:
        if not isinstance(block, _Recomputed):
            block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]


class _Recomputed:
    """The forward pass of a block that keeps only its inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # mypy: the class after this one in the resolution order is the block's own
        own: Any = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        contexts = (nullcontext(), _without_statistics(self))
        return checkpoint(own, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)


@contextmanager
def _without_statistics(block: Any) -> Iterator[None]:
    """Do not update the statistics of batch norm a second time, when a block is computed again."""
    tracking = [part for part in block.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    momenta = [part.momentum for part in tracking]
    for part in tracking:
        part.momentum = 0.0
    try:
        yield
    finally:
        for part, momentum in zip(tracking, momenta, strict=True):
            part.momentum = momentum
            if part.training and part.num_batches_tracked is not None:
                part.num_batches_tracked -= 1


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Recomputed, kind), {"__module__": kind.__module__})
