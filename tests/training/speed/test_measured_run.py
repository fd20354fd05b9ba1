"""A run that measures its speed: it ends after some steps, of which the first do not count, and saves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.core.errors import RunMeasured, UserError
from mgpu_slurm.core.files import read_json
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.request.spec import Measurement
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.speed_records import Interval, SpeedRecord
from mgpu_slurm.training.run import Run
from mgpu_slurm.training.speed import gauges
from mgpu_slurm.training.speed.gauges import Gauges
from mgpu_slurm.training.speed.measured_run import MeasuredRun

MEASURED = Measurement(steps=6, warm_up=2)

Make = Callable[..., MeasuredRun]


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Make]:
    """Makes runs of one rank that measure their speed, and closes them."""
    made: list[MeasuredRun] = []

    def make(measurement: Measurement = MEASURED) -> MeasuredRun:
        made.append(MeasuredRun(measurement, RankInfo(), tmp_path, torch.device("cpu"), 1, StopFlag()))
        return made[-1]

    yield make
    for run in made:
        run.close()


def train(run: Run, epochs: int, batches: int = 4) -> None:
    model = run.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = run.loader(TensorDataset(torch.randn(8 * batches, 4)), batch_size=8)
    run.checkpoints(every_steps=1)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    for epoch in state.epochs(epochs):
        for (inputs,) in data:
            run.backward(model(inputs).square().mean())
            run.update(optimizer)
        run.report(epoch, loss=0.5)


def record_in(folder: Path) -> SpeedRecord:
    record = read_json(RunFolder(folder).speed)
    assert record is not None
    return SpeedRecord.from_json(record)


def test_run_ends_at_its_last_step_over_several_reports_and_saves_nothing(measured: Make, tmp_path: Path) -> None:
    run = measured()
    with pytest.raises(RunMeasured) as ended:
        train(run, epochs=1000)
    assert (ended.value.code, ended.value.reason) == (0, "measured 6 steps: stopped at step 8")
    record = record_in(tmp_path)
    (own,) = record.ranks
    assert (record.warm_up, own.steps, own.samples) == (2, 6, 48)
    assert own.waited + own.forward + own.backward < own.seconds
    assert not RunFolder(tmp_path).checkpoints.exists()


def test_steps_of_the_warm_up_do_not_count(measured: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a thousand seconds each, and one of them is before a report."""
    taken = iter([*[1000.0] * 5, *[1.0] * 6])

    def step_done(own: Gauges) -> None:
        own._now += Interval(seconds=next(taken), steps=1)

    monkeypatch.setattr(Gauges, "step_done", step_done)
    with pytest.raises(RunMeasured):
        train(measured(Measurement(steps=6, warm_up=5)), epochs=1000)
    assert record_in(tmp_path).ranks[0].seconds == 6.0


def test_code_between_steps_counts_but_evaluations_do_not(
    measured: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(gauges.time, "perf_counter", lambda: now[0])
    run = measured()
    model = run.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(64, 4))

    def job() -> None:
        for (inputs,) in run.loader(data, batch_size=8):
            run.backward(model(inputs).square().mean())
            run.update(optimizer)
            now[0] += 1
            if run.step == 5:
                for _ in run.shard(data):
                    now[0] += 1000

    with pytest.raises(RunMeasured):
        job()
    # before steps 4, 5, 7 and 8; steps 3 and 6 begin with the fetch of their batch
    assert record_in(tmp_path).ranks[0].seconds == 4.0


def test_shorter_job_is_measured_if_it_has_a_few_steps(measured: Make, tmp_path: Path) -> None:
    run = measured()
    train(run, epochs=1, batches=5)
    run.finish()
    assert record_in(tmp_path).ranks[0].steps == 3


def test_too_few_steps_are_an_error(measured: Make, tmp_path: Path) -> None:
    run = measured()
    train(run, epochs=1, batches=4)
    with pytest.raises(UserError, match="ended after 4 steps, of which 2 are for warm-up: give it more data"):
        run.finish()
    assert not RunFolder(tmp_path).speed.exists()


def test_job_without_steps_is_an_error(measured: Make) -> None:
    with pytest.raises(UserError, match=r"the job takes none by run\.update or a torch optimizer"):
        measured().finish()


def test_job_with_a_loader_of_its_own_is_an_error(measured: Make) -> None:
    run = measured()
    weights = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weights], lr=0.01)
    for _ in range(MEASURED.last_step - 1):
        run.update(optimizer)
    with pytest.raises(UserError, match=r"the job's batches do not come from run\.loader"):
        run.update(optimizer)


def test_job_that_catches_everything_ends_at_its_next_step(measured: Make, tmp_path: Path) -> None:
    run = measured()
    with pytest.raises(RunMeasured):
        train(run, epochs=1000)
    with pytest.raises(RunMeasured):
        run.update(torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=0.01))
    run.finish()
    assert (run.step, record_in(tmp_path).ranks[0].steps) == (9, 6)


def test_intervals_add_up_but_their_peaks_do_not() -> None:
    first = Interval(1.0, 2, 3, 4, 5.0, 6.0, 7.0, allocated=80, reserved=90)
    second = Interval(10.0, 20, 30, 40, 50.0, 60.0, 70.0, allocated=8, reserved=900)
    assert first + second == Interval(11.0, 22, 33, 44, 55.0, 66.0, 77.0, allocated=80, reserved=900)
