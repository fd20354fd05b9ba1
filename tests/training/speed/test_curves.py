"""Where the time of steps goes, by rank: what is measured, what is shown, and which rank is named."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from mgpu_slurm.core.files import read_json, read_jsonl
from mgpu_slurm.reports.live import status
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.speed_records import Interval
from mgpu_slurm.training import reporting
from mgpu_slurm.training.run import Run
from mgpu_slurm.training.speed import data_waits, gauges
from mgpu_slurm.training.speed.curves import Stragglers, curves
from mgpu_slurm.training.speed.gauges import Gauges
from mgpu_slurm.training.speed.gpu_sampler import GpuSample, GpuSampler
from tests.ranks import run_ranks

USUAL = Interval(seconds=10.0, steps=100, samples=3200, waited=0.2, forward=3.0, backward=6.0)
COPIES = Layout(replicas=4)


def ranks_with(**changes: float) -> list[Interval]:
    """Return four ranks, of which the third differs."""
    return [USUAL, USUAL, replace(USUAL, **changes), USUAL]


class TestCurves:
    def test_figures_are_those_of_all_ranks(self) -> None:
        slow = replace(USUAL, waited=2.5, backward=3.5, samples=3000, tokens=96000)
        assert curves([USUAL, slow], Layout(replicas=2)) == pytest.approx(
            {
                "speed/step_seconds": 0.1,
                "speed/samples_per_second": 620.0,
                "speed/data_wait": 0.25,
                "speed/forward": 0.3,
                "speed/tokens_per_second": 9600.0,
                # the first rank waits 2.5 s longer in its backward passes
                "speed/communication_wait": 0.125,
            }
        )

    def test_memory_is_that_of_the_fullest_gpu(self) -> None:
        found = curves([replace(USUAL, allocated=3 << 30, reserved=4 << 30), USUAL], Layout(replicas=2))
        assert (found["memory/peak_allocated_gib"], found["memory/peak_reserved_gib"]) == (3.0, 4.0)

    def test_ranks_that_share_a_batch_count_it_once(self) -> None:
        found = curves([USUAL, USUAL], Layout(tensor=2))
        assert found["speed/samples_per_second"] == 320.0
        assert "speed/communication_wait" not in found

    def test_report_without_a_step_has_no_figures(self) -> None:
        assert curves([USUAL, Interval()], Layout(replicas=2)) == {}


class TestStragglers:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"waited": 2.5}, "it waits for its data for 25 ms, they for 2 ms"),
            ({"forward": 5.0}, "it is in its forward pass for 50 ms, they for 30 ms"),
        ],
    )
    def test_slow_rank_is_named_once_after_three_reports(self, changes: dict[str, float], words: str) -> None:
        stragglers = Stragglers(COPIES)
        said = [stragglers.see(ranks_with(**changes)) for _ in range(6)]
        assert said == [None, None, f"rank 2 holds up the others: of each step of 100 ms, {words}", None, None, None]

    def test_rank_that_is_slow_now_and_then_is_not_named(self) -> None:
        stragglers = Stragglers(COPIES)
        slow, even = ranks_with(waited=2.5), ranks_with()
        assert [stragglers.see(each) for each in (slow, slow, even, slow, slow, even) * 5] == [None] * 30

    def test_different_ranks_in_turn_are_not_named(self) -> None:
        stragglers = Stragglers(COPIES)
        in_turn = [ranks_with(waited=2.5)[turn:] + ranks_with(waited=2.5)[:turn] for turn in range(4)] * 5
        assert [stragglers.see(each) for each in in_turn] == [None] * 20

    def test_forward_of_a_sharded_model_is_not_judged(self) -> None:
        """Ranks wait for each other in it."""
        stragglers = Stragglers(Layout(strategy="fsdp", shards=4))
        assert [stragglers.see(ranks_with(forward=8.0)) for _ in range(5)] == [None] * 5

    def test_no_rank_of_an_evenly_loaded_job_is_named(self) -> None:
        """Recorded from four ranks on a machine with two cores, in epochs of eight steps."""
        reports = json.loads((Path(__file__).parent / "even_job.json").read_text())
        assert len(reports) == 100
        stragglers = Stragglers(COPIES)
        assert [stragglers.see([Interval(*numbers) for numbers in ranks]) for ranks in reports] == [None] * 100

    def test_recorded_job_with_a_slow_rank_is_recognized(self) -> None:
        """The same reports, as if one rank had waited for its data for a fifth of each step."""
        reports = json.loads((Path(__file__).parent / "even_job.json").read_text())[:3]
        stragglers, said = Stragglers(COPIES), None
        for numbers in reports:
            ranks = [Interval(*own) for own in numbers]
            ranks[3].waited += 0.2 * ranks[3].seconds
            said = stragglers.see(ranks)
        assert said is not None
        assert said.startswith("rank 3 holds up the others")


class TestGauges:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The time, which each look advances by a second."""
        now = [0.0]

        def look() -> float:
            now[0] += 1
            return now[0]

        monkeypatch.setattr(gauges.time, "perf_counter", look)
        return now

    def test_time_of_a_step_is_divided(self, clock: list[float]) -> None:
        measured = Gauges(torch.device("cpu"))
        for _ in range(2):
            fetch = measured.fetch_begins()
            clock[0] += 10
            measured.fetched(fetch, 8, (torch.zeros(8, 16, dtype=torch.long), torch.zeros(8)))
            clock[0] += 100
            measured.backward_begins()
            clock[0] += 1000
            measured.backward_ends()
            measured.step_done()
            measured.evaluates()
            clock[0] += 10_000
        found = measured.take()
        assert found == Interval(2 * 1115.0, 2, 16, 256, 2 * 11.0, 2 * 101.0, 2 * 1001.0)
        assert measured.take() == Interval()

    def test_time_between_steps_counts_unless_it_is_an_evaluation_or_a_report(self, clock: list[float]) -> None:
        measured = Gauges(torch.device("cpu"))

        def step(before: float) -> None:
            clock[0] += before
            measured.fetched(measured.fetch_begins(), 8, {})
            measured.step_done()

        step(before=100)
        # a job that reads its loss
        step(before=100)
        measured.evaluates()
        step(before=100)
        # a step looks at the clock four times, and begins with the first of them
        found = measured.take()
        assert (found.steps, found.seconds) == (3, 3 + 104 + 3)
        step(before=100)
        assert measured.take().seconds == 3

    def test_micro_batches_of_a_step_add_up(self, clock: list[float]) -> None:
        measured = Gauges(torch.device("cpu"))
        measured.fetched(measured.fetch_begins(), 8, {})
        for _ in range(3):
            clock[0] += 100
            measured.backward_begins()
            measured.backward_ends()
        measured.step_done()
        found = measured.take()
        assert (found.steps, found.samples, found.forward, found.backward) == (1, 8, 303.0, 3.0)


class Sampler:
    """Has always seen the same."""

    def take(self) -> GpuSample:
        return GpuSample(utilization=0.5, power=300.0, memory=2.0 * 2**30)


def test_use_of_gpus_is_among_the_curves() -> None:
    measured: Any = Gauges(torch.device("cpu"), cast(GpuSampler, Sampler()))
    measured.fetched(measured.fetch_begins(), 8, {})
    measured.step_done()
    found = curves([measured.take()], Layout())
    assert {name: value for name, value in found.items() if name.startswith("gpu/")} == {
        "gpu/utilization": 0.5,
        "gpu/power_watts": 300.0,
        "gpu/memory_gib": 2.0,
    }


class Event:
    """An event of a GPU that takes a second for each of what it is told, after all that came before."""

    told = 0

    def __init__(self, **_: object) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = Event.told

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class TestGaugesOfGpu:
    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> Gauges:
        monkeypatch.setattr(torch.cuda, "Event", Event)
        for name in ("max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda _: 0)
        # the rank itself needs no time
        monkeypatch.setattr(gauges.time, "perf_counter", lambda: 0.0)
        monkeypatch.setattr(Event, "told", 0)
        return Gauges(torch.device("cuda", 0))

    @staticmethod
    def step(measured: Gauges) -> None:
        measured.fetched(measured.fetch_begins(), 8, {})
        Event.told += 1
        measured.backward_begins()
        Event.told += 2
        measured.backward_ends()
        Event.told += 1
        measured.step_done()

    def test_time_that_a_gpu_needs_after_the_last_step_counts(self, measured: Gauges) -> None:
        for _ in range(3):
            self.step(measured)
        # an evaluation
        measured.evaluates()
        Event.told += 100
        self.step(measured)
        found = measured.take()
        assert (found.seconds, found.steps, found.forward, found.backward) == (16.0, 4, 4.0, 8.0)

    @pytest.mark.parametrize("idle", [0, 3, 8])
    def test_gpu_that_computes_does_not_wait_for_data(
        self, measured: Gauges, monkeypatch: pytest.MonkeyPatch, idle: int
    ) -> None:
        """
        Args:
            idle: seconds in which it has nothing to do between all that it was told before and the batch, which its
                rank gets after 5 s.
        """
        for _ in range(2 * data_waits.MOST_EVENTS):
            fetch = measured.fetch_begins()
            monkeypatch.setattr(gauges.time, "perf_counter", lambda begun=fetch.begun: begun + 5.0)
            Event.told += idle
            measured.fetched(fetch, 8, {})
            measured.step_done()
        assert measured.take().waited == pytest.approx(2 * data_waits.MOST_EVENTS * idle)

    def test_passes_beyond_the_largest_number_of_events_take_as_long_as_the_others(self, measured: Gauges) -> None:
        steps = data_waits.MOST_EVENTS + 50
        for _ in range(steps):
            self.step(measured)
        found = measured.take()
        assert (found.forward, found.backward) == (pytest.approx(steps), pytest.approx(2 * steps))


class Slow(Dataset[torch.Tensor]):
    """Takes a while for each sample on the last rank."""

    def __init__(self, rank: int) -> None:
        self._seconds = 0.02 * rank

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.full((8,), float(index))


def train(run: Run, folder: Path) -> list[str]:
    """Return the warnings of a training whose last rank waits for its data."""
    said: list[str] = []
    reporting.log_lines.warn = said.append
    model = run.wrap(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = run.loader(Slow(run.rank), batch_size=8)
    for epoch in range(1, 9):
        for inputs in data:
            run.backward(model(inputs).square().mean())
            run.update(optimizer)
        run.report(epoch, loss=0.5)
    run.close()
    return said


def test_real_training_shows_its_curves_and_names_the_slow_rank(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    said, others = run_ranks(train, 2, tmp_path, folder=tmp_path)
    # rank 0 speaks for all
    assert others == []
    (sentence,) = [each for each in said if "it waits for its data for" in each]
    assert sentence.startswith("rank 1 holds up the others: of each step of ")
    lines = [*read_jsonl(tmp_path / "metrics.jsonl")]
    assert [line["metrics"] for line in lines] == [{"loss": 0.5}] * 8
    shown = lines[-1]["curves"]
    assert shown["speed/data_wait"] > 0.3
    assert shown["speed/samples_per_second"] == pytest.approx(8 / shown["speed/step_seconds"], rel=1e-6)
    assert (read_json(tmp_path / "state.json") or {})["curves"] == shown
    (events,) = (tmp_path / "tensorboard").glob("events*")
    assert all(tag.encode() in events.read_bytes() for tag in shown)
    (line,) = status._model_lines(RunFolder(tmp_path), is_named=False)
    assert re.fullmatch(
        r"speed     [\d.]+ m?s a step  [\d,.]+ samples/s  waits for data \d+%  for other ranks \d+%", line
    )


def train_in_parts(run: Run) -> None:
    model = run.wrap(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run._parts.size.limit = 2
    for (inputs,) in run.loader(TensorDataset(torch.ones(8, 8)), batch_size=8):
        run.gradients(lambda part: model(part).square().mean(), inputs)
        run.update(optimizer)
    run.report(1, loss=0.5)
    run.close()


def test_size_of_micro_batches_is_among_the_curves(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    run_ranks(train_in_parts, 1, folder=tmp_path)
    (line,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert line["curves"]["memory/micro_batch"] == 2.0
