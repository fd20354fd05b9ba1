"""Mistakes of a job that cost memory or time are named with variable, file and line; correct jobs are not bothered."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.core import log_lines
from mgpu_slurm.training.memory import mistakes
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

STEPS = 16
BIG = 50_000
"""Numbers in a tensor that should not be kept."""


class Job:
    """Trains a small model, one step at a time."""

    def __init__(self, run: Run) -> None:
        self.run = run
        torch.manual_seed(0)
        self.model: Any = run.wrap(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.history: list[torch.Tensor] = []

    def steps(self) -> Iterator[torch.Tensor]:
        """Yield the loss of each step, after it."""
        for _ in range(STEPS):
            loss = self.model(torch.ones(3, 2)).square().mean()
            self.run.backward(loss)
            self.run.update(self.optimizer)
            yield loss

    def evaluate(self) -> None:
        for (batch,) in self.run.shard(TensorDataset(torch.ones(6, 2)), batch_size=2):
            self.model(batch)


# -- mistakes, each in the line with the comment


def sum_of_losses(job: Job) -> None:
    total: Any = 0.0
    for loss in job.steps():
        total += loss  # here


def sum_in_a_tensor(job: Job) -> None:
    total = torch.zeros(())
    for loss in job.steps():
        total = total + loss  # here


def moving_average(job: Job) -> None:
    average: Any = 0.0
    for loss in job.steps():
        average = 0.9 * average + 0.1 * loss  # here


def list_of_losses(job: Job) -> None:
    losses = []
    for loss in job.steps():
        losses.append(loss)  # here


def list_of_outputs(job: Job) -> None:
    outputs = []
    for loss in job.steps():
        outputs.append(loss.detach() * torch.ones(BIG))  # here


def dictionary(job: Job) -> None:
    seen = {}
    for number, loss in enumerate(job.steps()):
        seen[number] = {"outputs": loss.detach() * torch.ones(BIG)}  # here


KEPT: list[torch.Tensor] = []


def list_of_the_module(job: Job) -> None:
    for loss in job.steps():
        KEPT.append(loss.detach() * torch.ones(BIG))  # here


def attribute_of_an_object(job: Job) -> None:
    for loss in job.steps():
        job.history.append(loss)  # here


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        self.mean = 0.9 * self.mean + 0.1 * outputs.mean()  # here
        return outputs


def buffer_of_a_module(job: Job) -> None:
    model = job.model = job.run.wrap(Remembering())
    job.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in job.steps():
        pass


def cache_emptied(job: Job) -> None:
    for _ in job.steps():
        torch.cuda.empty_cache()  # here


def evaluated_with_gradients(job: Job) -> None:
    job.model.eval()
    for (batch,) in job.run.shard(TensorDataset(torch.ones(6, 2)), batch_size=2):  # here
        job.model(batch)


GRAPHS, HELD = "keeps the graphs of ", "holds 8 tensors more than 8 steps ago, 1.6 MB on cpu: keep numbers"
MISTAKES: dict[Callable[[Job], None], str] = {
    sum_of_losses: f"`total` {GRAPHS}",
    sum_in_a_tensor: f"`total` {GRAPHS}",
    moving_average: f"`average` {GRAPHS}",
    list_of_losses: f"`losses` {GRAPHS}",
    list_of_outputs: f"`outputs` {HELD}",
    dictionary: f"`seen` {HELD}",
    list_of_the_module: f"`KEPT` {HELD}",
    attribute_of_an_object: f"`self.history` {GRAPHS}",
    buffer_of_a_module: f"`self.model.mean` {GRAPHS}",
    cache_emptied: "`torch.cuda.empty_cache()` in every step makes the GPU wait",
    evaluated_with_gradients: "the model is evaluated with gradients on",
}


# -- correct jobs


def sum_of_numbers(job: Job) -> None:
    total = 0.0
    for loss in job.steps():
        total += loss.item()


def detached_losses(job: Job) -> None:
    losses, average = [], torch.zeros(())
    for loss in job.steps():
        losses.append(loss.detach())
        average = 0.9 * average + 0.1 * loss.detach()


def meter(job: Job) -> None:
    losses = job.run.meter("loss")
    for loss in job.steps():
        losses.add(loss, count=3)


def newest_outputs(job: Job) -> None:
    outputs: deque[torch.Tensor] = deque(maxlen=4)
    for loss in job.steps():
        outputs.append(loss.detach() * torch.ones(BIG))


def outputs_of_an_epoch(job: Job) -> None:
    outputs: list[torch.Tensor] = []
    for number, loss in enumerate(job.steps()):
        outputs.append(loss.detach() * torch.ones(BIG))
        if number % 4 == 3:
            outputs.clear()


def arrays(job: Job) -> None:
    outputs = []
    for loss in job.steps():
        outputs.append((loss.detach() * torch.ones(BIG)).numpy())


def longer_graphs(job: Job) -> None:
    for number in range(STEPS):
        state = torch.zeros(1, 2)
        for _ in range(5 * number + 1):
            state = job.model(state) * torch.ones(1, 2)
        job.run.backward(state.mean())
        job.run.update(job.optimizer)


def constant_with_a_graph(job: Job) -> None:
    scale = nn.Parameter(torch.ones(()))
    constant = (2 * scale).exp()
    for _ in range(STEPS):
        loss = constant * job.model(torch.ones(3, 2)).mean()
        loss.backward(retain_graph=True)
        job.optimizer.step()


def evaluated(job: Job) -> None:
    for _ in job.steps():
        job.model.eval()
        with torch.no_grad():
            job.evaluate()
        job.model.train()


def trained_in_evaluation_mode(job: Job) -> None:
    """As with frozen statistics of batch norm."""
    job.model.eval()
    for _ in job.steps():
        with torch.inference_mode():
            job.evaluate()


def gradients_of_inputs(job: Job) -> None:
    job.model.eval()
    for (batch,) in job.run.shard(TensorDataset(torch.ones(6, 2)), batch_size=2):
        job.model(batch.requires_grad_()).sum().backward()


def cache_emptied_once(job: Job) -> None:
    for number, _ in enumerate(job.steps()):
        if number == 8:
            torch.cuda.empty_cache()


CORRECT = [
    sum_of_numbers,
    detached_losses,
    meter,
    newest_outputs,
    outputs_of_an_epoch,
    arrays,
    longer_graphs,
    constant_with_a_graph,
    evaluated,
    trained_in_evaluation_mode,
    gradients_of_inputs,
    cache_emptied_once,
]


def told_of(run: Run, function: Callable[[Job], None], seconds: float = 10.0) -> list[str]:
    told: list[str] = []
    log_lines.warn = told.append
    mistakes.LOOK_SECONDS = seconds
    emptied = torch.cuda.empty_cache
    function(Job(run))
    run.close()
    assert torch.cuda.empty_cache is emptied
    return told


def line_of(function: Callable[[Job], None]) -> int:
    """Return the number of the line with the mistake."""
    lines = Path(__file__).read_text().splitlines()
    begins = "class Remembering(" if function is buffer_of_a_module else f"def {function.__name__}("
    first = next(at for at, line in enumerate(lines) if line.startswith(begins))
    return next(at for at, line in enumerate(lines[first:], first + 1) if line.endswith("# here"))


@pytest.mark.parametrize("function", MISTAKES, ids=lambda function: function.__name__)
def test_mistake_is_named_with_its_line(function: Callable[[Job], None]) -> None:
    ((told,),) = run_ranks(told_of, 1, function)
    assert told.startswith(f"{__file__}:{line_of(function)}: {MISTAKES[function]}")


@pytest.mark.parametrize("function", CORRECT, ids=lambda function: function.__name__)
def test_correct_job_is_not_bothered(function: Callable[[Job], None]) -> None:
    assert run_ranks(told_of, 1, function) == [[]]


def test_one_rank_tells() -> None:
    one, other = run_ranks(told_of, 2, sum_of_losses)
    assert (len(one), other) == (1, [])


def test_look_that_takes_too_long_says_nothing() -> None:
    assert run_ranks(told_of, 1, sum_of_losses, -1.0) == [[]]


def keep_nothing(run: Run) -> bool:
    """Return whether what a look has seen is freed."""
    kept = [torch.ones(3)]
    seen = weakref.ref(kept[0])
    for _ in Job(run).steps():
        pass
    del kept
    gc.collect()
    return seen() is None


def test_looks_keep_no_references() -> None:
    assert run_ranks(keep_nothing, 1) == [True]
