"""What runs used, from samples and SLURM's accounting."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.reports.usage import resource_use
from mgpu_slurm.reports.usage.resource_use import Accounted, Asked, used
from mgpu_slurm.reports.usage.run_times import AttemptTimes, milliseconds
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.usage_records import GpuUse, NodeUsage, RankEnd, UsageSample
from mgpu_slurm.slurm.step_accounting import AccountedStep

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
ASKED = Asked(nodes=1, ranks_per_node=2, gpus_per_node=2, cpus_per_task=4, mem=None, time=None)


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def sample(seconds: float, **values: Any) -> UsageSample:
    return UsageSample(time=at(seconds), **values)


def attempt(number: int, begin: float, end: float, job: str = "7") -> AttemptTimes:
    return AttemptTimes(number, job, ("n1",), milliseconds(at(begin)), milliseconds(at(end)), "completed")


def node(*samples: UsageSample, number: int = 1, name: str = "n1", ends: dict[int, RankEnd] | None = None) -> NodeUsage:
    return NodeUsage(number, name, samples, ends or {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("64G", 64 << 30),
        ("1500", 1500 << 20),
        ("1500MB", 1500 << 20),
        ("8k", 8 << 10),
        ("2T", 2 << 40),
        ("0", None),
        ("all", None),
    ],
)
def test_memory_is_read_as_sbatch_reads_it(text: str | None, expected: int | None) -> None:
    assert resource_use.memory_of(text) == expected


def test_cores_are_the_unit_without_gpus() -> None:
    asked = Asked.of(Resources(nodes=2, ntasks_per_node=3, cpus_per_task=4, time="1:00:00"))
    assert (asked.unit, asked.units_per_node, asked.time) == ("core", 12, 3600)
    asked = Asked.of(Resources(gpus_per_node=8, cpus_per_task=4))
    assert (asked.unit, asked.units_per_node, asked.ranks_per_node) == ("gpu", 8, 8)


def test_run_without_samples_has_its_times_only() -> None:
    found = used([attempt(1, 0, 10), attempt(2, 20, 50)], ASKED, [], [])
    assert (found.seconds, found.longest) == (40, 30)
    assert {value for name, value in vars(found).items() if name not in ("seconds", "longest")} == {None}


def test_cores_are_means_over_ranks_and_nodes() -> None:
    nodes = [node(sample(1), sample(11, cpu=40.0, wait=4.0)), node(sample(1), sample(11, cpu=20.0), name="n2")]
    found = used([attempt(1, 0, 20)], ASKED, nodes, [])
    assert found.cpu == 60.0
    # two nodes with two ranks each for 20 s
    assert found.cores == 60 / 80
    assert found.wait == 4 / 60
    assert found.cores_high == (40 + 4) / 10 / 2


def test_short_peak_of_cores_does_not_count() -> None:
    samples = [sample(10 * number, cpu=200.0 if number == 7 else 20.0) for number in range(41)]
    assert used([attempt(1, 0, 400)], ASKED, [node(*samples)], []).cores_high == 1.0


def test_gpus_are_means_over_time_though_later_samples_are_rarer() -> None:
    gpus = [(0, 0.5), (10, 0.5), (20, 0.5), (80, 0.9)]
    samples = [sample(time, gpu=(GpuUse(use, 100 + time, 300.0), GpuUse(None, 7))) for time, use in gpus]
    found = used([attempt(1, 0, 100)], ASKED, [node(*samples)], [])
    assert found.gpu == pytest.approx((20 * 0.5 + 60 * 0.9) / 80)
    assert (found.gpu_mem, found.watts, found.gpu_seconds) == (180, 300.0, 80.0)


def test_memory_is_that_of_the_fullest_node_in_any_attempt() -> None:
    nodes = [
        node(sample(1, peak=50, rss=50, pss=50)),
        node(sample(1, peak=70, rss=60, pss=45), number=2),
        node(sample(1, peak=60, rss=60, pss=40), number=2, name="n2"),
        # what is no attempt of the run, such as those of a copied folder
        node(sample(1, peak=999), number=9),
    ]
    attempts = [attempt(1, 0, 10), attempt(2, 20, 50)]
    found = used(attempts, ASKED, nodes, [])
    assert (found.mem, found.mem_shared) == (70, 70)
    found = used(attempts, ASKED, nodes[1:], [])
    assert (found.mem, found.mem_shared) == (70, 55)
    found = used(attempts, ASKED, [*nodes, node(sample(1, peak=1), name="n3")], [])
    # it is not known of the third one
    assert (found.mem, found.mem_shared) == (70, None)


def test_attempts_with_other_ranks_or_gpus_do_not_count() -> None:
    first = replace(attempt(1, 0, 1000), resources=Resources(gpus_per_node=8, cpus_per_task=4))
    second = replace(attempt(2, 2000, 2100, job="8"), resources=Resources(gpus_per_node=2, cpus_per_task=4, mem="9G"))
    nodes = [node(sample(1, peak=800), number=1), node(sample(1, peak=200), number=2)]
    steps = [AccountedStep("7", at(0), 10, 30.0, 900), AccountedStep("8", at(2000), 10, 30.0, 150)]
    found = used([first, second], ASKED, nodes, steps)
    assert (found.seconds, found.longest, found.mem) == (1100, 100, 200)
    # nothing is known of a run that was resumed with another request, and waits
    found = used([first], ASKED, nodes, steps)
    assert (found.seconds, found.longest, found.mem, found.cpu) == (1000, 0, None, None)


def test_larger_memory_of_samples_and_accounting_counts() -> None:
    step = AccountedStep("7", at(0), 10, 30.0, 80)
    attempts, nodes = [attempt(1, 0, 10)], [node(sample(1, peak=70, rss=70, pss=60), ends={0: RankEnd(cpu=5.0)})]
    assert used(attempts, ASKED, nodes, []).mem == 70
    found = used(attempts, ASKED, nodes, [step])
    assert (found.mem, found.mem_shared, found.cpu) == (80, 70, 5.0)
    found = used(attempts, ASKED, [], [step])
    assert (found.mem, found.mem_shared, found.cpu) == (80, None, 30.0)


def test_steps_of_another_job_with_the_same_id_are_not_those_of_a_run() -> None:
    def step(job: str, seconds: float) -> AccountedStep:
        # accounting prints the time of this machine's zone
        local = (START + timedelta(seconds=seconds)).astimezone().replace(tzinfo=None)
        return AccountedStep(job, local.isoformat(timespec="seconds"), 10, 1.0, 1)

    steps = [step("7", 5), step("7", -4000), step("7", 9000), step("8", 5), step("8", 1005)]
    assert resource_use.own_steps(steps, [attempt(1, 0, 10), attempt(2, 1000, 1020, job="8")]) == [steps[0], steps[4]]


def test_answer_of_accounting_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert resource_use.read_accounted(folder) == Accounted()
    found = Accounted(2, [AccountedStep("7", at(0), 10, 30.0, 80)])
    resource_use.keep_accounted(folder, found)
    assert resource_use.read_accounted(folder) == found
    for text in ("{", "[]", '{"attempts": 1}'):
        folder.accounting.write_text(text)
        assert resource_use.read_accounted(folder) == Accounted()
