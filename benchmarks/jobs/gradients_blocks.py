"""A loop whose steps take turns, in blocks, between `run.backward` and `run.gradients`; see `benchmarks/memory.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass
class Config(BlocksConfig):
    agrees: bool = False
    """Whether ranks always tell each other whether memory has run out; otherwise they may stop after a while."""


class Steps:
    """Training steps of which each computes its gradients in the way chosen at the time."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._run = run
        self._model = model
        self.uses_gradients = False

    def loss_of(self, features: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self._model(features), labels)

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

    cases = {name: functools.partial(block, name == "gradients") for name in ("gradients", "backward")}
    write_blocks(run, interleave(cases, config.rounds, WARM_UPS))
    return {"rounds": config.rounds}
