"""What was recorded of the use of nodes, as it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.usage_records import (
    GpuUse,
    RankEnd,
    SaveRecord,
    UsageSample,
    note_save,
    read_saves,
    read_usage,
)

TIME = "2026-11-28T12:00:00.000+00:00"


def folder_in(path: Path) -> RunFolder:
    folder = RunFolder(path / "run")
    folder.create()
    return folder


def write(folder: RunFolder, node: str, *lines: UsageSample | RankEnd, attempt: int = 1) -> None:
    folder.usage.mkdir(exist_ok=True)
    append_jsonl(folder.node_usage(attempt, node), *(line.to_json() for line in lines))


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    assert read_usage(folder) == []
    sample = UsageSample(time=TIME, cpu=1.5, wait=0.25, rss=7, peak=9, ranks=2, gpu=(GpuUse(0.5, 3, 90.0), GpuUse()))
    write(folder, "rack-1-n2", sample)
    write(folder, "n1", UsageSample(time=TIME), attempt=10)
    write(folder, "n1", UsageSample(time=TIME), attempt=2)
    folder.accounting.write_text("[]")
    found = read_usage(folder)
    assert [(each.attempt, each.node) for each in found] == [(1, "rack-1-n2"), (2, "n1"), (10, "n1")]
    assert found[0].samples == [sample]


@pytest.mark.parametrize(
    ("highest", "peak"),
    [
        # the process that the rank had started is the higher one, and both may have been there together
        (80, 130),
        # the rank has grown since it knew that
        (90, 90),
    ],
)
def test_end_of_a_rank_is_what_it_says_and_who_waited_for_it(tmp_path: Path, highest: int, peak: int) -> None:
    folder = folder_in(tmp_path)
    own = RankEnd(rank=0, pid=7, cpu=1.0, peak=50, child=80)
    write(folder, "n1", own, RankEnd(rank=0, pid=7, cpu=2.0, highest=highest))
    (found,) = read_usage(folder)
    assert found.ends == {0: RankEnd(rank=0, pid=7, cpu=2.0, peak=50, child=80, highest=highest)}
    assert found.peak == peak
    # one that was killed
    write(folder, "n1", RankEnd(rank=1, pid=8, highest=30))
    assert read_usage(folder)[0].peak == peak + 30


@pytest.mark.parametrize(
    ("child", "peak"),
    [
        # the sample has seen it
        (0, 100),
        (40, 100),
        # it has grown since
        (50, 110),
        # it is another one
        (51, 151),
    ],
)
def test_peak_has_processes_that_only_their_rank_knew(tmp_path: Path, child: int, peak: int) -> None:
    folder = folder_in(tmp_path)
    # another rank's process is none of its own
    seen = UsageSample(time=TIME, peak=100, below={"7": 40, "8": 90})
    write(folder, "n1", seen, UsageSample(time=TIME, peak=60), RankEnd(rank=0, pid=7, peak=30, child=child))
    assert read_usage(folder)[0].peak == peak
    # more than in any sample
    write(folder, "n1", RankEnd(rank=1, peak=90))
    assert read_usage(folder)[0].peak == peak + 20


def test_process_that_had_no_more_than_its_rank_may_have_had_that_before_it_started_its_program(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    write(folder, "n1", RankEnd(rank=0, peak=60, child=60))
    assert read_usage(folder)[0].peak == 60


def test_shared_memory_is_that_of_the_fullest_look(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    write(folder, "n1", UsageSample(rss=150))
    assert read_usage(folder)[0].shared is None
    write(folder, "n1", UsageSample(rss=10, pss=1), UsageSample(rss=100, pss=70), UsageSample(rss=120))
    (found,) = read_usage(folder)
    assert found.shared == 30


def test_cpu_time_is_that_of_the_samples_until_ranks_end(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    write(folder, "n1", UsageSample(cpu=1.0), UsageSample(cpu=2.0))
    assert read_usage(folder)[0].cpu == 3.0
    write(folder, "n1", RankEnd(rank=0, cpu=2.5), RankEnd(rank=1, cpu=1.0))
    assert read_usage(folder)[0].cpu == 3.5


def test_saves_are_kept_and_a_full_disk_costs_only_their_times(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    note_save(folder, 2, SaveRecord(step=8, begun=TIME, stood=0.5))
    (found,) = read_saves(folder)
    assert (found.step, found.attempt, found.begun, found.stood) == (8, 2, TIME, 0.5)
    assert found.time > TIME
    folder.saves.unlink()
    folder.saves.mkdir()
    note_save(folder, 2, SaveRecord(step=9))
