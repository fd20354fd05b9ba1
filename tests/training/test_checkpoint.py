"""Checkpoints are whole or not there, the older one stays until the newer one is, and loading runs no code."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


def trained(run: Run, epochs: int) -> dict[str, float]:
    """Trains a little and says from which step it started."""
    run.seed(0)
    model = run.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = run.loader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    start = state.step
    for epoch in state.epochs(epochs):
        for (batch,) in data:
            run.backward(model(batch).mean())
            run.update(optimizer)
        run.report(epoch, weight=next(model.parameters()).flatten()[0])
    return {"start": start, "step": run.step, "progress": state.progress, "weight": run.last_metrics["weight"]}


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_newest_two_are_kept_and_resume_uses_the_newest(tmp_path: Path) -> None:
    run_ranks(trained, 2, 3, folder=tmp_path)
    assert listed(tmp_path) == ["step-000000004", "step-000000006"]
    (first, second) = run_ranks(trained, 2, 4, folder=tmp_path)
    assert (first["start"], first["step"], first["progress"]) == (6, 8, 4)
    assert first == second


def test_resume_of_a_finished_run_keeps_its_last_metrics(tmp_path: Path) -> None:
    (before,) = run_ranks(trained, 1, 2, folder=tmp_path)
    (after,) = run_ranks(trained, 1, 2, folder=tmp_path)
    assert after == before | {"start": 4}


def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path: Path) -> None:
    run_ranks(trained, 1, 1, folder=tmp_path)
    hidden = checkpoints.hidden(RunFolder(tmp_path), 4, attempt=1, save=1)
    hidden.mkdir()
    (hidden / "rank-00000.safetensors").write_bytes(b"torn")
    (answer,) = run_ranks(trained, 1, 2, folder=tmp_path)
    assert answer["start"] == 2
    assert listed(tmp_path) == ["step-000000002", "step-000000004"]


def test_training_continues_if_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    # a file in the way refuses root too, as a full disk does
    (tmp_path / "checkpoints").write_text("")
    (first, second) = run_ranks(trained, 2, 2, folder=tmp_path)
    assert first["step"] == second["step"] == 4


def test_another_world_size_resumes_from_the_same_step(tmp_path: Path) -> None:
    run_ranks(trained, 2, 1, folder=tmp_path)
    assert {answer["start"] for answer in run_ranks(trained, 3, 2, folder=tmp_path)} == {2}


def sharded(run: Run, epochs: int) -> list[float]:
    """A model that is spread over the ranks; its whole weights at the end."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(run.world_size)
    model = fully_shard(nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = run.restore(model=model, optimizer=optimizer)
    for _ in state.epochs(epochs):
        model(torch.linspace(-1, 1, 10).reshape(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole: list[float] = model.weight.full_tensor().flatten().tolist()
    return [run.step, *whole]


@pytest.mark.needs_torch("2.7")
def test_sharded_model_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    undisturbed, _ = run_ranks(sharded, 2, 4, folder=tmp_path / "whole")
    run_ranks(sharded, 2, 2, folder=tmp_path / "parts")
    assert run_ranks(sharded, 2, 3, folder=tmp_path / "parts")[0][0] == 3
    for found in run_ranks(sharded, 3, 4, folder=tmp_path / "parts"):
        torch.testing.assert_close(found, undisturbed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_checkpoint_is_set_aside_for_the_previous_one(tmp_path: Path, ranks: int) -> None:
    run_ranks(trained, 2, 2, folder=tmp_path)
    damaged = tmp_path / "checkpoints" / "step-000000004"
    os.truncate(damaged / "rank-00001.safetensors", 100)
    for answer in run_ranks(trained, ranks, 3, folder=tmp_path):
        assert (answer["start"], answer["step"]) == (2, 6)
    assert listed(tmp_path) == ["damaged-step-000000004", "step-000000004", "step-000000006"]


def test_damage_to_the_only_checkpoint_is_an_error(tmp_path: Path) -> None:
    run_ranks(trained, 1, 1, folder=tmp_path)
    newest = tmp_path / "checkpoints" / "step-000000002"
    (newest / "rank-00000.json").unlink()
    (answer,) = run_ranks(trained, 1, 3, folder=tmp_path, may_fail=True)
    assert answer == (
        f"MgpuError: checkpoint {str(newest)!r} is damaged (the record of a rank is damaged or missing), and there is"
        " no earlier one: delete it to start from the beginning"
    )


def test_loading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    run_ranks(trained, 1, 1, folder=tmp_path)
    newest = tmp_path / "checkpoints" / "step-000000002"
    evil = pickle.dumps(_Evil(tmp_path / "ran"))
    pickle.loads(evil)
    os.rmdir(tmp_path / "ran")
    for file in newest.iterdir():
        file.write_bytes(evil)
    (answer,) = run_ranks(trained, 1, 2, folder=tmp_path, may_fail=True)
    assert answer.startswith("MgpuError: checkpoint")
    assert not (tmp_path / "ran").exists()


class _Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.proof),)


def renamed(run: Run) -> None:
    run.restore(network=nn.Linear(2, 1))


def test_unknown_object_name_error_lists_known_names(tmp_path: Path) -> None:
    run_ranks(trained, 1, 1, folder=tmp_path)
    (answer,) = run_ranks(renamed, 1, folder=tmp_path, may_fail=True)
    assert "checkpoint step-000000002 has no 'network' (known: model, optimizer, data)" in answer


def draws(run: Run, epochs: int) -> list[float]:
    """What each generator gives in each epoch; a step an epoch, as a checkpoint is that of a step."""
    run.seed(11)
    state = run.restore(model=nn.Linear(1, 1))
    numbers = []
    for _ in state.epochs(epochs):
        run.step += 1
        numbers += [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]
    return numbers


def test_random_generators_of_every_rank_are_restored(tmp_path: Path) -> None:
    undisturbed = run_ranks(draws, 2, 5, folder=tmp_path / "whole")
    first = run_ranks(draws, 2, 3, folder=tmp_path / "parts")
    second = run_ranks(draws, 2, 5, folder=tmp_path / "parts")
    assert undisturbed[0] != undisturbed[1]
    assert [before + after for before, after in zip(first, second, strict=True)] == undisturbed


def stopped_and_resumed(run: Run, way: str, stop_at: int | None) -> list[list[int]] | list[float]:
    """A loop of a user's own; at the batch `stop_at` the rank is told to end, which it does at a boundary."""
    run.seed(3)
    torch.manual_seed(0)
    model = run.wrap(nn.Linear(1, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features = torch.arange(12, dtype=torch.float64).unsqueeze(1) / 12
    data = run.loader(TensorDataset(features), batch_size=2, shuffle=True)
    run.restore(model=model, optimizer=optimizer, data=data)
    seen, batches = [], 0
    while run.step < 12:
        for (batch,) in data:
            seen += (batch.flatten() * 12).round().int().tolist()
            run.backward(model(batch).square().mean())
            batches += 1
            if batches == stop_at:
                run._loop_control.stop.asked = Stop.END
            if way == "accumulates" and batches % 2:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if run.step == 12:
                break
    return [*seen, *(parameter.item() for parameter in model.parameters())]


@pytest.mark.parametrize(("way", "stop_at"), [("steps", 8), ("accumulates", 8), ("accumulates", 9)])
def test_custom_training_loop_resumes_exactly(way: str, stop_at: int, tmp_path: Path) -> None:
    """No `run.update`, no `state.epochs`, gradients over several batches: steps are counted, and no batch is lost."""
    (whole,) = run_ranks(stopped_and_resumed, 1, way, None, folder=tmp_path / "whole")
    (stopped,) = run_ranks(stopped_and_resumed, 1, way, stop_at, folder=tmp_path / "parts")
    assert stopped.startswith("RunStopped")
    (rest,) = run_ranks(stopped_and_resumed, 1, way, None, folder=tmp_path / "parts")
    assert rest[-2:] == whole[-2:]
    assert whole[: len(whole) - 2][-(len(rest) - 2) :] == rest[:-2]


class _Odd:
    def state_dict(self) -> dict[str, object]:
        return {"where": Path("/data")}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def saves_something_odd(run: Run) -> None:
    state = run.restore(model=nn.Linear(1, 1), odd=_Odd())
    for _ in state.epochs(1):
        pass


def test_unsupported_state_is_named_before_anything_is_saved(tmp_path: Path) -> None:
    (answer,) = run_ranks(saves_something_odd, 1, folder=tmp_path, may_fail=True)
    assert answer.startswith("UserError: run.restore(odd=...): odd.where is of type PosixPath, but a checkpoint holds")
    assert newest_checkpoint(RunFolder(tmp_path)) is None


def test_training_continues_if_metrics_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (answer,) = run_ranks(trained, 1, 2, folder=tmp_path)
    assert answer["step"] == 4


def asked_to_requeue(run: Run) -> int:
    run._loop_control.stop.asked = Stop.REQUEUE
    data = run.loader(TensorDataset(torch.arange(6)), batch_size=2)
    return sum(len(batch) for (batch,) in data)


def test_run_without_checkpoints_ignores_a_requeue_request(tmp_path: Path) -> None:
    assert run_ranks(asked_to_requeue, 1, folder=tmp_path) == [6]
