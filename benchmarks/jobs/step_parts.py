"""The parts of a tiny model's step, in two training loops on one rank that take turns in blocks of steps."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs.loops import BATCHES, CLIP, WARM_UPS, make_data, make_optimizer
from benchmarks.jobs.step_blocks import MODELS
from benchmarks.measure import interleave
from mgpu_slurm import Run

PARTS = ("batch", "forward", "backward", "update")


@dataclass
class Config:
    batch_size: int
    steps: int
    """Per block."""
    rounds: int


class Laps:
    """Adds up the time of each part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


def run_steps(run: Run, model: nn.Module, data: TensorDataset, batch_size: int, laps: Laps) -> Iterator[None]:
    model = run.wrap(model)
    optimizer = make_optimizer(model)
    loader = run.loader(data, batch_size=batch_size, shuffle=True)
    run.restore(model=model, optimizer=optimizer, data=loader)
    while True:
        for features, labels in loader:
            laps.end("batch")
            loss = cross_entropy(model(features), labels)
            laps.end("forward")
            run.backward(loss)
            laps.end("backward")
            run.update(optimizer, clip=CLIP)
            laps.end("update")
            yield


def plain_steps(run: Run, model: nn.Module, data: TensorDataset, batch_size: int, laps: Laps) -> Iterator[None]:
    optimizer = make_optimizer(model)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    while True:
        for features, labels in loader:
            laps.end("batch")
            loss = cross_entropy(model(features), labels)
            laps.end("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            laps.end("backward")
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            # the run does not count it
            with run._steps.paused():
                optimizer.step()
            optimizer.zero_grad()
            laps.end("update")
            yield


def block(steps: Iterator[None], laps: Laps, count: int) -> dict[str, float]:
    """Seconds of each part, by step."""
    laps.end("between blocks")
    laps.seconds.clear()
    for _ in itertools.islice(steps, count):
        pass
    return {part: laps.seconds[part] / count for part in PARTS}


def train(run: Run, config: Config) -> None:
    build, shape = MODELS["tiny"]
    data = make_data(BATCHES * config.batch_size, *shape)
    run.seed(0)
    cases = {}
    for name in ("run", "plain"):
        torch.manual_seed(0)
        laps = Laps()
        steps = run_steps if name == "run" else plain_steps
        loop = steps(run, build(), data, config.batch_size, laps)
        cases[name] = functools.partial(block, loop, laps, config.steps)
    found = interleave(cases, config.rounds, WARM_UPS)
    (run.folder / "parts.json").write_text(json.dumps(found))
