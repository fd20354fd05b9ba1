"""Traces of steps: which steps they have, and that no failure of the profiler ends a training."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.request import profile_window
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.speed import profiling as recording
from mgpu_slurm.training.speed.profiling import Profiling, profiling

Made = Callable[[str], Profiling]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    def make(window: str) -> Profiling:
        monkeypatch.setenv(profile_window.VARIABLE, window)
        found = profiling(RankInfo(), RunFolder(tmp_path), attempt=1)
        assert found is not None
        return found

    return make


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(recording.log_lines, "warn", texts.append)
    return texts


def train(recorded: Profiling, steps: range) -> None:
    model = nn.Linear(4, 1)
    for step in steps:
        recorded.fetched(step - 1)
        # a batch of as many samples as the number of the step
        model(torch.ones(step, 4)).sum().backward()
        with torch.profiler.record_function(f"step {step}"):
            recorded.step_done(step)


def recorded_steps(tmp_path: Path) -> tuple[int, int, list[str]]:
    """Return the numbers of steps and of forward passes in the trace, and the names of the ends of steps."""
    events = json.loads(gzip.decompress(RunFolder(tmp_path).trace(1, 0).read_bytes()))["traceEvents"]
    names = [each["name"] for each in events if each.get("ph") == "X"]
    ends = [name for name in names if name.startswith("step ")]
    return sum(name.startswith("ProfilerStep#") for name in names), names.count("aten::addmm"), ends


@pytest.mark.parametrize(
    ("window", "steps", "recorded"),
    [
        ("4-6", range(1, 9), 3),
        ("1-2", range(1, 9), 2),
        ("2", range(1, 9), 1),
        # resumed within the window
        ("4-6", range(6, 9), 1),
        ("4-6", range(4, 9), 3),
        ("1-3", range(2, 9), 2),
        ("6", range(6, 9), 1),
    ],
)
def test_steps_of_the_window_are_recorded(
    made: Made, window: str, steps: range, recorded: int, tmp_path: Path, said: list[str]
) -> None:
    own = made(window)
    train(own, steps)
    own.close()
    assert said == []
    assert recorded_steps(tmp_path)[:2] == (recorded, recorded)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["1-0.json.gz"]


@pytest.mark.parametrize("window", ["1-3", "4-6"])
def test_run_that_is_past_the_window_records_nothing(made: Made, window: str, tmp_path: Path, said: list[str]) -> None:
    own = made(window)
    train(own, range(20, 24))
    own.close()
    assert (said, (tmp_path / "profile").exists()) == ([], False)


@pytest.mark.parametrize("window", ["4-6", "9-10"])
def test_run_that_ends_before_the_end_of_the_window_leaves_no_trace_and_says_so(
    made: Made, tmp_path: Path, said: list[str], window: str
) -> None:
    own = made(window)
    train(own, range(1, 6))
    own.close()
    assert said == [f"--profile {window}: nothing was recorded: the attempt ended after step 5"]
    assert not (tmp_path / "profile").exists()
    # the profiler is free for the next run of this process
    train(made("1"), range(1, 2))
    assert recorded_steps(tmp_path)[0] == 1


def test_profiler_of_the_job_itself_is_left_alone(made: Made, tmp_path: Path, said: list[str]) -> None:
    with torch.profiler.profile() as of_the_job:
        train(made("2-3"), range(1, 6))
    assert len(said) == 1
    assert "training continues" in said[0]
    assert sum(each.key == "aten::addmm" and each.count for each in of_the_job.key_averages()) == 5


def test_trace_that_cannot_be_written_is_a_warning(made: Made, tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "profile").write_text("in its place")
    train(made("2-3"), range(1, 6))
    assert len(said) == 1
    assert said[0].startswith("--profile: FileExistsError")


def test_job_without_a_loader_is_recorded_after_its_first_step(made: Made, tmp_path: Path, said: list[str]) -> None:
    own = made("1-3")
    for step in range(1, 5):
        own.step_done(step)
    assert said == []
    assert recorded_steps(tmp_path)[0] == 2


def test_other_ranks_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)
    monkeypatch.setenv(profile_window.VARIABLE, "1-2@0")
    assert profiling(second, RunFolder(tmp_path), attempt=1) is None
    monkeypatch.delenv(profile_window.VARIABLE)
    assert profiling(RankInfo(), RunFolder(tmp_path), attempt=1) is None
