"""Checkpoints are written beside the training, when the run's plan says so, and the best one stays."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import TCPStore
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.checkpoints import saver
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.checkpoint_names import checkpoint_step, complete_checkpoints, newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.restore import State
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import wait_until


def start(run: Run, batches: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, State]:
    run.seed(0)
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(TensorDataset(torch.ones(2 * batches, 1)), batch_size=2)
    return model, optimizer, data, run.restore(model=model, optimizer=optimizer, data=data)


def steps_of(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> Iterator[None]:
    """A pass over the data, item after item a step."""
    for (batch,) in data:
        run.backward(model(batch).mean())
        run.update(optimizer)
        yield


def weight(model: nn.Module) -> float:
    return next(model.parameters()).item()


def steps(run: Run) -> list[str]:
    return sorted(path.name[5:].lstrip("0") for path in complete_checkpoints(RunFolder(run.folder)))


# -- beside the training


def saves_slowly(run: Run) -> dict[str, Any]:
    """Asks for a checkpoint after step 2, and lets nothing be written of it before step 8."""
    goes_on, write_part = threading.Event(), checkpoints.write_part

    def slow(*arguments: Any) -> None:
        assert goes_on.wait(60)
        write_part(*arguments)

    model, optimizer, data, state = start(run, 10)
    began, weights, at_8 = state.step, {state.step: weight(model)}, []
    checkpoints.write_part = slow
    for _ in state.epochs(1):
        for _ in steps_of(run, model, optimizer, data):
            weights[run.step] = weight(model)
            if run.step == 2 and run.rank == run.world_size - 1:
                run.save()
            if run.step == 8:
                at_8 = steps(run)
                goes_on.set()
            if run.step == 10:
                # as where the job dies of an error
                run.close()
                return {"start": began, "weights": weights, "at 8": at_8}
    raise AssertionError


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_continues_while_a_checkpoint_is_written(ranks: int, tmp_path: Path) -> None:
    for answer in run_ranks(saves_slowly, ranks, folder=tmp_path):
        assert answer["at 8"] == []
    for later in run_ranks(saves_slowly, ranks, folder=tmp_path):
        saved = later["start"]
        # the step at which it was asked for; the other rank may have gone past it
        assert saved == 2 or (saved == 3 and ranks == 2)
        assert later["weights"][saved] == answer["weights"][saved]


def saves_at_every_step(run: Run) -> list[str]:
    model, optimizer, data, state = start(run, 10)
    run.checkpoints(every_steps=1, keep=20)
    for _ in state.epochs(1):
        for _ in steps_of(run, model, optimizer, data):
            pass
    return steps(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_at_every_step_skips_no_checkpoint(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(saves_at_every_step, ranks, folder=tmp_path):
        assert set(found) == {str(step) for step in range(1, 11)}


def leaves_nothing_in_the_store(run: Run) -> set[str]:
    """What the store has of the saves when the last one is finished."""
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

    def told() -> set[str]:
        return {key for key in store.list_keys() if "/saves " in key}

    write_part = checkpoints.write_part

    def after_the_other(*arguments: Any) -> None:
        wait_until(lambda: bool(told()))
        write_part(*arguments)

    if run.rank == 1:
        checkpoints.write_part = after_the_other
    model, optimizer, data, state = start(run, 3)
    run.checkpoints(every_steps=1, keep=20)
    for _ in state.epochs(1):
        for _ in steps_of(run, model, optimizer, data):
            pass
    run._loop_control.saver.finish()
    return told()


# it lists the store's keys
@pytest.mark.needs_torch("2.13")
def test_finished_saves_leave_no_keys_in_the_store(tmp_path: Path) -> None:
    assert run_ranks(leaves_nothing_in_the_store, 2, folder=tmp_path) == [set(), set()]
    assert len(complete_checkpoints(RunFolder(tmp_path))) == 3


def cannot_write(run: Run) -> list[str]:
    """The last rank's disk is full from the second epoch to the third."""
    model, optimizer, data, state = start(run, 2)
    write_part, found = checkpoints.write_part, []

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    for epoch in state.epochs(4):
        for _ in steps_of(run, model, optimizer, data):
            pass
        checkpoints.write_part = full if epoch in (2, 3) and run.rank == run.world_size - 1 else write_part
        found.append(f"{run.step}: {', '.join(steps(run))}")
        assert run.step <= 2 or len(list(Path(run.folder, "checkpoints").glob(".step-*"))) < 2
    return [*found, f"{run.step}: {', '.join(steps(run))}"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_write_on_one_rank_loses_only_that_checkpoint(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(cannot_write, ranks, folder=tmp_path):
        assert found[2:] == ["6: 2", "8: 2", "8: 2, 8"]
    assert not list(Path(tmp_path, "checkpoints").glob(".*"))


def stops_while_it_waits(run: Run) -> None:
    """Told to stop while a save waits for the one before it."""
    write_part = checkpoints.write_part

    def slow(*arguments: Any) -> None:
        if run.step == 2:
            run._loop_control.stop.asked = Stop.END
        time.sleep(0.2)
        write_part(*arguments)

    model, optimizer, data, state = start(run, 10)
    checkpoints.write_part = slow
    run.checkpoints(every_steps=1, keep=20)
    for _ in state.epochs(1):
        for _ in steps_of(run, model, optimizer, data):
            pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_stopped_run_has_saved_its_current_step(ranks: int, tmp_path: Path) -> None:
    for answer in run_ranks(stops_while_it_waits, ranks, folder=tmp_path):
        assert answer.startswith("RunStopped")
    assert checkpoint_step(newest_checkpoint(RunFolder(tmp_path)) or tmp_path) in (
        2,
        3,
    )
    assert not list(Path(tmp_path, "checkpoints").glob(".step-*"))


def saves_one_step(run: Run) -> list[list[int]]:
    """No step is counted: each epoch's checkpoint takes the place of the one before."""
    run.checkpoints(keep=2)
    state = run.restore(model=run.wrap(nn.Linear(1, 1)))
    publish, found = checkpoints.publish, []

    def slow(folder: Path) -> Path:
        time.sleep(0.02)
        return publish(folder)

    checkpoints.publish = slow
    for _ in state.epochs(10):
        run.mean(0, 1)
        newest = newest_checkpoint(RunFolder(run.folder))
        found.append([] if newest is None else checkpoints.ranks(newest))
    return found


def test_repeated_saves_of_one_step_do_not_mix(tmp_path: Path) -> None:
    for found in run_ranks(saves_one_step, 2, folder=tmp_path):
        assert all(ranks in ([], [0, 1]) for ranks in found)
    assert checkpoints.ranks(Path(tmp_path, "checkpoints", "step-000000000")) == [0, 1]


def test_last_checkpoint_is_published_after_slower_ranks_finish(tmp_path: Path) -> None:
    assert run_ranks(ends_while_it_saves, 2, folder=tmp_path) == [3, 3]
    assert [path.name for path in complete_checkpoints(RunFolder(tmp_path))] == ["step-000000003"]


def ends_while_it_saves(run: Run) -> int:
    """Rank 1 takes longer, and no call brings the ranks together any more."""
    write_part = checkpoints.write_part

    def slow(*arguments: Any) -> None:
        time.sleep(0.3 * run.rank)
        write_part(*arguments)

    checkpoints.write_part = slow
    model, optimizer, data, state = start(run, 10)
    run.checkpoints(every_steps=3)
    for _ in state.epochs(1):
        for (batch,) in data:
            if run.step == 3:
                break
            run.backward(model(batch).mean())
            run.update(optimizer)
        break
    run.close(waits=True)
    return run.step


def fails_while_it_saves(run: Run) -> int:
    model, optimizer, data, state = start(run, 10)
    began = state.step
    for _ in state.epochs(1):
        for _ in steps_of(run, model, optimizer, data):
            if run.step == 3:
                run.save()
            if run.step == 4 and not began:
                run.close()
                raise ValueError("a mistake")
    return began


def test_save_in_progress_survives_an_exception(tmp_path: Path) -> None:
    assert run_ranks(fails_while_it_saves, 1, folder=tmp_path, may_fail=True) == ["ValueError: a mistake"]
    assert run_ranks(fails_while_it_saves, 1, folder=tmp_path) == [3]


def test_superseded_attempt_publishes_no_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for attempt in (1, 2):
        records.record_event(folder, "started", attempt=attempt)
    (answer,) = run_ranks(saves_at_every_step, 1, folder=tmp_path, may_fail=True)
    assert answer == "MgpuError: attempt 1 of this run was superseded by a later one and exits"
    assert complete_checkpoints(folder) == []


# -- when, and which stay


def follows(run: Run, plan: dict[str, Any], epochs: int, values: Sequence[float] = ()) -> tuple[list[str], str | None]:
    """Ten steps an epoch; in the middle and at the end of each a value is reported."""
    model, optimizer, data, state = start(run, 10)
    run.checkpoints(**plan)
    for epoch in state.epochs(epochs):
        for _ in steps_of(run, model, optimizer, data):
            if run.step % 5 == 0 and values:
                progress = run.step // 5
                run.report(progress, accuracy=values[progress - 1])
        assert run.step == 10 * epoch
    run.finish()
    link = Path(run.folder, "checkpoints", "best")
    return steps(run), link.readlink().name if link.is_symlink() else None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, ["10", "20"]),
        ({"keep": 1}, ["20"]),
        ({"every_steps": 4, "keep": 9}, ["4", "8", "10", "12", "16", "20"]),
        ({"every_steps": None, "every_minutes": None, "keep": 9}, ["10", "20"]),
    ],
)
def test_checkpoints_follow_the_plan(plan: dict[str, Any], expected: list[str], ranks: int, tmp_path: Path) -> None:
    for found, _ in run_ranks(follows, ranks, plan, 2, folder=tmp_path):
        assert sorted(found, key=int) == expected


def counts_minutes(run: Run) -> list[str]:
    """A clock that a step moves on by two minutes, and an epoch's end by none."""
    model, optimizer, data, state = start(run, 10)
    run.checkpoints(every_minutes=6, keep=99)
    began, clock = time.monotonic(), saver.time
    saver.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=lambda: began + 120 * run.step, sleep=time.sleep
    )
    try:
        for _ in state.epochs(2):
            for _ in steps_of(run, model, optimizer, data):
                # a step takes no time here, and the one before has to be written
                if run._saver._thread is not None:
                    run._saver._thread.join()
    finally:
        saver.time = clock
    return steps(run)


def test_every_minutes_counts_from_the_previous_checkpoint(tmp_path: Path) -> None:
    (found,) = run_ranks(counts_minutes, 1, folder=tmp_path)
    assert sorted(map(int, found)) == [3, 6, 9, 10, 13, 16, 19, 20]


def test_every_minutes_saves_at_most_one_step_late_on_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(counts_minutes, 2, folder=tmp_path):
        saved = [0, *sorted(map(int, found))]
        assert all(later - before in (3, 4) for before, later in itertools.pairwise(saved) if later not in (10, 20))
        assert {10, 20} <= {*saved}


def steps_twice(run: Run) -> list[str]:
    """Two optimizers, and an odd number of steps before the first boundary."""
    model, optimizer, data, _ = start(run, 10)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    state = run.restore(other=other)
    run.checkpoints(every_steps=6, keep=99)
    run.step = 1
    for _ in state.epochs(1):
        for (batch,) in data:
            run.backward(model(batch).mean())
            optimizer.step()
            other.step()
    return steps(run)


def test_every_steps_saves_at_the_next_boundary(tmp_path: Path) -> None:
    assert run_ranks(steps_twice, 1, folder=tmp_path) == [["13", "19", "21", "7"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_best_checkpoint_is_kept(ranks: int, tmp_path: Path) -> None:
    plan = {"keep": 1, "best": "accuracy", "direction": "maximize"}
    values = [0.1, 0.2, 0.9, float("nan"), 0.4, 0.9, 0.8, 0.95]
    for found, best in run_ranks(follows, ranks, plan, 3, values, folder=tmp_path):
        assert (found, best) == (["15", "30"], "step-000000015")
    # who goes on knows of it
    for found, best in run_ranks(follows, ranks, plan, 4, values, folder=tmp_path):
        assert (found, best) == (["40"], "step-000000040")


def reports_twice(run: Run) -> str:
    """The best report of the epoch is not its last."""
    model, optimizer, data, state = start(run, 2)
    run.checkpoints(best="accuracy", direction="maximize", keep=1)
    for epoch in state.epochs(3):
        for _ in steps_of(run, model, optimizer, data):
            pass
        run.report(2 * epoch - 1, accuracy=[0.5, 0.9, 0.1][epoch - 1])
        run.report(2 * epoch, loss=1.0)
    run.finish()
    return Path(run.folder, "checkpoints", "best").readlink().name


def test_report_without_the_best_metric_is_ignored(tmp_path: Path) -> None:
    assert run_ranks(reports_twice, 2, folder=tmp_path) == ["step-000000004"] * 2


def test_damaged_best_checkpoint_falls_back_to_the_next_best(tmp_path: Path) -> None:
    plan = {"best": "accuracy", "direction": "maximize"}
    run_ranks(follows, 1, plan, 2, [0.0, 0.5, 0.0, 0.9], folder=tmp_path)
    os.truncate(tmp_path / "checkpoints" / "step-000000020" / "rank-00000.safetensors", 9)
    (tmp_path / "metrics.jsonl").unlink()
    ((_, best),) = run_ranks(follows, 1, plan, 3, [0, 0, 0.1, 0.2, 0.3, 0.4], folder=tmp_path)
    assert best == "step-000000010"


def test_previous_best_is_ignored_if_the_direction_changes(tmp_path: Path) -> None:
    run_ranks(follows, 1, {"best": "accuracy", "direction": "maximize"}, 1, [0.8, 0.9], folder=tmp_path)
    plan = {"best": "accuracy", "direction": "minimize", "keep": 1}
    ((found, best),) = run_ranks(follows, 1, plan, 2, [0, 0, 0.95, 0.99], folder=tmp_path)
    assert (found, best) == (["15", "20"], "step-000000015")


def cannot_link(run: Run) -> list[str]:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpoints.point_to_best = refuse
    model, optimizer, data, state = start(run, 2)
    run.checkpoints(best="accuracy", direction="maximize", keep=1)
    for epoch in state.epochs(3):
        for _ in steps_of(run, model, optimizer, data):
            pass
        run.report(epoch, accuracy=[0.9, 0.1, 0.2][epoch - 1])
    return steps(run)


def test_best_checkpoint_is_kept_if_the_link_cannot_be_made(tmp_path: Path) -> None:
    assert run_ranks(cannot_link, 1, folder=tmp_path) == [["2", "6"]]


def test_minimize_keeps_the_lowest_value(tmp_path: Path) -> None:
    plan = {"keep": 1, "best": "accuracy", "direction": "minimize"}
    ((found, best),) = run_ranks(follows, 1, plan, 2, [0.5, 0.2, 0.9, 0.3], folder=tmp_path)
    assert (found, best) == (["10", "20"], "step-000000010")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"every_steps": 0}, "every_steps=0): expected 1, 2, ... or None"),
        ({"keep": 2.0}, "keep=2.0): expected 1, 2, ..."),
        ({"every_minutes": 0}, "every_minutes=0): expected more than 0, or None"),
        ({"every_minutes": float("nan")}, "every_minutes=nan): expected more than 0, or None"),
        ({"keep": 0}, "keep=0): expected 1, 2, ..."),
        ({"best": "loss"}, "best='loss', direction=None): expected direction 'minimize' or 'maximize'"),
        ({"direction": "up"}, "best=None, direction='up'): expected direction 'minimize' or 'maximize'"),
    ],
)
def test_invalid_checkpoint_plan_is_rejected(plan: dict[str, Any], words: str, run: Run) -> None:
    with pytest.raises(UserError) as caught:
        run.checkpoints(**plan)
    assert words in str(caught.value)


def test_unknown_best_metric_is_reported_once_with_suggestion(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.checkpoints(best="acuracy", direction="maximize")
    run.restore(model=nn.Linear(1, 1))
    run.report(1, accuracy=0.5)
    run.report(2, accuracy=0.6)
    run.close()
    assert capsys.readouterr().out.count("a report has no such metric (did you mean 'accuracy'?)") == 1


# -- all that a training keeps


class Counter:
    """What a user registers."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def trains_with_everything(run: Run, stop_at: int | None) -> str:
    """The whole state after two epochs, as text."""
    run.seed(5)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    model = run.wrap(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    counter = Counter()
    features = torch.randn(52, 4, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(features), batch_size=8, shuffle=True)
    objects = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}
    objects |= {"scaler": scaler, "counter": counter}
    state = run.restore(data=data, **objects)
    for epoch in state.epochs(3):
        for (batch,) in data:
            run.backward(scaler.scale(model(batch).square().mean()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(net)
            counter.seen += len(batch)
            if run.step == stop_at and run.rank == 1:
                run._loop_control.stop.asked = Stop.END
        run.report(epoch, seen=counter.seen)
    states = {name: value.state_dict() for name, value in objects.items()}
    torch.set_printoptions(precision=17, threshold=10**6)
    return f"{run.step} {states}"


@pytest.mark.parametrize("stop_at", [4, 6, 13])
def test_resume_restores_all_training_state_exactly(stop_at: int, tmp_path: Path) -> None:
    whole = run_ranks(trains_with_everything, 2, None, folder=tmp_path / "whole")
    stopped = run_ranks(trains_with_everything, 2, stop_at, folder=tmp_path / "parts")
    assert all(answer.startswith("RunStopped") for answer in stopped)
    rest = run_ranks(trains_with_everything, 2, None, folder=tmp_path / "parts")
    # the others' statistics of batch norm are nobody's
    assert rest[0] == whole[0]
    assert whole[0].startswith("21 ")


def test_checkpoint_record_names_its_format(tmp_path: Path) -> None:
    run_ranks(follows, 1, {}, 1, folder=tmp_path)
    (record,) = (tmp_path / "checkpoints").glob("step-*/rank-00000.json")
    assert json.loads(record.read_text())["format"] == checkpoints.FORMAT


# -- a step that is saved twice


def keeps_the_best_of_uncounted_steps(run: Run, epochs: int, values: list[float]) -> dict[str, Any]:
    """The weight grows by one an epoch, and nobody counts a step."""
    model = run.wrap(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(weight_of(model))
    state = run.restore(model=model)
    run.checkpoints(best="accuracy", direction="maximize", keep=2)
    began = weight(model)
    for epoch in state.epochs(epochs):
        with torch.no_grad():
            weight_of(model).add_(1)
        run.report(epoch, accuracy=values[epoch - 1])
    run.finish()
    found = complete_checkpoints(RunFolder(run.folder))
    best = Path(run.folder, "checkpoints", "best").resolve()
    stored = load_file(best / "rank-00000.safetensors")["model.weight"].item()
    return {"began": began, "names": [path.name for path in found], "best": best.name, "of best": stored}


def weight_of(model: nn.Module) -> torch.Tensor:
    return next(model.parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_best_checkpoint_of_a_step_is_not_overwritten(ranks: int, tmp_path: Path) -> None:
    values = [0.9, 0.1, 0.2, 0.3, 0.95, 0.4]
    for found in run_ranks(keeps_the_best_of_uncounted_steps, ranks, 4, values, folder=tmp_path):
        assert found == {
            "began": 0,
            "names": ["step-000000000", "step-000000000.3", "step-000000000.4"],
            "best": "step-000000000",
            "of best": 1,
        }
    # the newest one continues, and knows which is the best
    for found in run_ranks(keeps_the_best_of_uncounted_steps, ranks, 6, values, folder=tmp_path):
        assert found == {
            "began": 4,
            "names": ["step-000000000.5", "step-000000000.6"],
            "best": "step-000000000.5",
            "of best": 5,
        }
    os.truncate(tmp_path / "checkpoints" / "step-000000000.6" / "rank-00000.safetensors", 9)
    (found, *_) = run_ranks(keeps_the_best_of_uncounted_steps, ranks, 6, values, folder=tmp_path)
    assert (found["began"], found["best"]) == (5, "step-000000000.5")
