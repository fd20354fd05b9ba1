"""A loop whose steps take turns, in blocks, between `run.backward` and `run.gradients`; see `benchmarks/memory.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.jobs.loops import (
    BATCHES,
    CLIP,
    WARM_UPS,
    make_data,
    make_optimizer,
    seconds_per_step,
    write_blocks,
)
from benchmarks.jobs.sharded_blocks import FEATURES, Block, make_model
from benchmarks.jobs.sharded_blocks import Config as BlocksConfig
from benchmarks.measure import interleave
from mgpu_slurm import Run
from mgpu_slurm.training.memory import agreement
from mgpu_slurm.training.memory.sharded_exchanges import LEARNED_AFTER


@dataclass
class Config(BlocksConfig):
    agrees: bool = False
    """Whether ranks always tell each other whether memory has run out; otherwise they may stop after a while."""
    runs_out: bool = False
    """Whether to compare steps in which memory runs out on the last rank with others, in place of the loops."""


class Steps:
    """Training steps of which each computes its gradients in the way chosen at the time."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._run = run
        self._model = model
        self.uses_gradients = False
        self.runs_out = False

    def loss_of(self, features: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(self._model(features), labels)
        if self.runs_out and self._run.rank == self._run.world_size - 1:
            self.runs_out = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    def endless(self, batch_size: int) -> Iterator[None]:
        run = self._run
        optimizer = make_optimizer(self._model)
        data = run.loader(make_data(BATCHES * batch_size, FEATURES), batch_size=batch_size, shuffle=True)
        run.restore(model=self._model, optimizer=optimizer, data=data)
        while True:
            for batch in data:
                if self.uses_gradients:
                    run.gradients(self.loss_of, *batch)
                else:
                    run.backward(self.loss_of(*batch))
                run.update(optimizer, clip=CLIP)
                yield


def train(run: Run, config: Config) -> dict[str, float]:
    if config.agrees:
        agreement.SETTLED_AFTER = 1 << 60
    run.seed(0)
    steps = Steps(run, run.wrap(make_model(config), blocks=(Block,)))
    endless = steps.endless(config.batch_size)

    def block(uses_gradients: bool) -> tuple[float, float]:
        steps.uses_gradients = uses_gradients
        return seconds_per_step(endless, config.steps)

    def step(runs_out: bool) -> tuple[float, float]:
        steps.uses_gradients, steps.runs_out = True, runs_out
        # the size that was found before
        run._parts.size.limit = None
        return seconds_per_step(endless, 1)

    cases = {name: functools.partial(block, name == "gradients") for name in ("gradients", "backward")}
    if config.runs_out:
        cases = {name: functools.partial(step, name == "shortage") for name in ("shortage", "enough")}
    write_blocks(run, interleave(cases, config.rounds, LEARNED_AFTER if config.runs_out else WARM_UPS))
    return {"rounds": config.rounds}
