"""`num_workers="auto"`: what is chosen for the cores of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.worker_choice import with_workers
from mgpu_slurm.training.run import Run

AUTO = {"num_workers": "auto"}


def chosen(workers: int, prefetch: int, persistent: bool = True) -> dict[str, Any]:
    return {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": persistent}


@pytest.mark.parametrize(
    ("cores", "is_stream", "options"),
    [
        (1, False, {"num_workers": 0}),
        (2, False, chosen(1, 4)),
        (3, False, chosen(2, 2)),
        (8, False, chosen(7, 2)),
        (17, False, chosen(16, 2)),
        (128, False, chosen(16, 2)),
        # which each worker reads from its beginning
        (1, True, {"num_workers": 0}),
        (8, True, chosen(1, 4, persistent=False)),
    ],
)
def test_one_core_is_left_to_the_rank(cores: int, is_stream: bool, options: dict[str, Any]) -> None:
    assert with_workers("run.loader", AUTO, cores, is_stream) == options


def test_options_of_the_job_win() -> None:
    own = {"prefetch_factor": 8, "persistent_workers": False, "pin_memory": False}
    assert with_workers("run.loader", AUTO | own, 8, False) == {"num_workers": 7, **own}
    # torch would refuse them without workers
    assert with_workers("run.loader", AUTO | own, 1, False) == {"num_workers": 0, "pin_memory": False}


@pytest.mark.parametrize("options", [{}, {"num_workers": 0}, {"num_workers": 3, "persistent_workers": True}])
def test_number_of_workers_is_taken_as_it_is(options: dict[str, Any]) -> None:
    assert with_workers("run.loader", options, 8, False) == options


def test_other_words_are_refused(run: Run) -> None:
    dataset = TensorDataset(torch.arange(4))
    with pytest.raises(
        UserError, match=r"^run.loader\(num_workers='all'\): expected a number of processes, or \"auto\"$"
    ):
        run.loader(dataset, 2, num_workers="all")
    with pytest.raises(UserError, match=r"^run.shard\(num_workers='8'\): expected a number"):
        run.shard(dataset, 2, num_workers="8")


def test_loader_and_shard_take_auto(run: Run) -> None:
    run._parts.data._cores = 2
    dataset = TensorDataset(torch.arange(4))
    data, shard = (make(dataset, 2, num_workers="auto") for make in (run.loader, run.shard))
    assert data._source.workers == 1
    for batches in (data, shard, data):
        assert [batch.tolist() for (batch,) in batches] == [[0, 1], [2, 3]]
