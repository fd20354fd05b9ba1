"""Advice on what to ask for: when there is some, and which."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from mgpu_slurm.reports.usage.advice import Advice, RunFacts, advice_for
from mgpu_slurm.reports.usage.ledger import Ledger
from mgpu_slurm.reports.usage.resource_use import Asked, Used

GIB = 1 << 30
HOUR = 3600
RUN = RunFacts(
    run="train",
    state="COMPLETED",
    asked=Asked(nodes=1, ranks_per_node=1, gpus_per_node=1, cpus_per_task=8, mem=64 * GIB, time=4 * HOUR),
    used=Used(
        seconds=3 * HOUR,
        longest=3 * HOUR,
        cores=6.0,
        cores_high=7.5,
        wait=0.0,
        mem=50 * GIB,
        mem_shared=50 * GIB,
        gpu=0.8,
        gpu_seconds=3 * HOUR,
    ),
    ledger=Ledger(training=Fraction(3 * HOUR)),
)
"""A run that has used what it asked for."""


def using(**changes: Any) -> RunFacts:
    return replace(RUN, used=replace(RUN.used, **changes))


def asking(**changes: Any) -> RunFacts:
    return replace(RUN, asked=replace(RUN.asked, **changes))


def flags(run: RunFacts) -> list[str]:
    return [each.flags or each.kind for each in advice_for([run])]


def test_run_that_used_what_it_asked_for_needs_no_advice() -> None:
    assert flags(RUN) == []


def test_run_of_an_older_version_needs_no_advice_on_what_was_not_measured() -> None:
    assert flags(replace(RUN, used=Used(seconds=3 * HOUR, longest=3 * HOUR))) == []


@pytest.mark.parametrize(
    ("asked", "peak", "expected"),
    [
        (64, 10.0, ["--mem 13G"]),
        (64, 10.1, ["--mem 14G"]),
        (64, 31.9, ["--mem 42G"]),
        (64, 32.0, []),
        (64, 57.0, []),
        # near the limit it is more, not less
        (64, 58.0, ["--mem 76G"]),
        (64, 70.0, ["--mem 91G"]),
        # nothing smaller is left
        (1, 0.2, []),
        (2, 0.9, []),
    ],
)
def test_memory_is_advised_where_less_than_half_or_almost_all_was_used(
    asked: int, peak: float, expected: list[str]
) -> None:
    run = using(mem=round(peak * GIB), mem_shared=round(peak * GIB))
    assert flags(replace(run, asked=replace(run.asked, mem=asked * GIB))) == expected


def test_memory_goes_by_what_processes_share_once() -> None:
    assert flags(using(mem=50 * GIB, mem_shared=20 * GIB)) == ["--mem 26G"]


def test_memory_that_processes_may_share_is_no_reason_for_more() -> None:
    assert flags(using(mem=60 * GIB, mem_shared=None)) == []
    assert flags(using(mem=20 * GIB, mem_shared=None)) == ["--mem 26G"]


@pytest.mark.parametrize("peak", [None, 10 * GIB])
def test_run_that_ran_out_of_memory_needs_more_than_it_had(peak: int | None) -> None:
    run = replace(using(mem=peak, mem_shared=peak), state="OUT_OF_MEMORY")
    assert flags(run) == ["--mem 84G"]


def test_memory_that_was_left_to_the_cluster_is_no_advice() -> None:
    assert flags(asking(mem=None)) == []


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(HOUR, ["--time 1:30:00"]), (HOUR + 1, ["--time 1:35:00"]), (30, ["--time 0:05:00"]), (2 * HOUR, [])],
)
def test_time_is_advised_where_less_than_half_was_needed(longest: float, expected: list[str]) -> None:
    assert flags(using(longest=longest)) == expected


def test_time_of_a_run_that_failed_or_of_a_worker_is_no_advice() -> None:
    assert flags(replace(using(longest=60.0), state="FAILED")) == []
    assert flags(replace(using(longest=60.0), is_worker=True)) == []


def test_time_that_would_not_be_shorter_is_no_advice() -> None:
    run = using(longest=100.0)
    assert flags(replace(run, asked=replace(run.asked, time=300))) == []


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({"cores": 3.0, "cores_high": 4.2}, ["--cpus-per-task 5"]),
        ({"cores": 0.1, "cores_high": 0.2}, ["--cpus-per-task 1"]),
        # busy for a part of the time only
        ({"cores": 3.0, "cores_high": 7.9}, []),
        # on a node that others use, too
        ({"cores": 3.0, "cores_high": 4.2, "wait": 0.2}, []),
        ({"cores": 3.0, "cores_high": 4.2, "wait": None}, []),
        ({"cores": 3.8, "cores_high": 4.2, "wait": 0.08}, []),
        # too short to know
        ({"cores": 3.0, "cores_high": 4.2, "seconds": 300.0}, []),
    ],
)
def test_cores_are_advised_where_less_than_half_was_busy_or_waited_for(
    used: dict[str, Any], expected: list[str]
) -> None:
    assert flags(using(**used)) == expected


@pytest.mark.parametrize(
    ("wait", "kind", "words"),
    [
        (None, "gpu", "--profile 10-13"),
        (0.4, "loader", "waited for batches for 40% of a step"),
        (0.05, "batch", "larger batches may help"),
    ],
)
def test_idle_gpu_is_named_with_its_likely_cause(wait: float | None, kind: str, words: str) -> None:
    (found,) = advice_for([replace(using(gpu=0.2), data_wait=wait)])
    assert (found.kind, found.flags) == (kind, "")
    assert found.why.startswith("GPUs computed for 20% of the time")
    assert words in found.why


def test_idle_gpus_with_different_causes_are_not_one_advice() -> None:
    runs = [replace(using(gpu=0.2), run=f"run{place}", data_wait=wait) for place, wait in enumerate((0.6, 0.0, 0.5))]
    assert [(each.kind, [*each.runs]) for each in advice_for(runs)] == [
        ("loader", ["run0", "run2"]),
        ("batch", ["run1"]),
    ]


def test_less_memory_is_not_advised_after_a_run_that_failed_at_once() -> None:
    run = replace(using(seconds=4.0, mem=GIB // 3, mem_shared=GIB // 3), state="FAILED")
    assert flags(run) == []
    assert flags(replace(run, state="COMPLETED"))[0] == "--mem 1G"
    # one that failed late has shown what it needs
    assert flags(replace(run, used=replace(run.used, seconds=3 * HOUR))) == ["--mem 1G"]


def test_gpu_that_was_hardly_seen_is_no_advice() -> None:
    assert flags(using(gpu=0.2, gpu_seconds=500.0)) == []
    assert flags(using(gpu=0.3)) == []


def test_worker_without_trials_and_long_starts_are_named() -> None:
    idle = Ledger(training=Fraction(80), between_trials=Fraction(20))
    assert flags(replace(RUN, ledger=idle, is_worker=True)) == ["workers"]
    assert flags(replace(RUN, ledger=Ledger(training=Fraction(80), starting=Fraction(20)))) == ["starting"]
    assert flags(replace(using(seconds=60.0), ledger=idle, is_worker=True)) == []


def test_runs_with_the_same_advice_are_together() -> None:
    runs = [replace(using(mem_shared=size * GIB), run=name) for name, size in (("a", 10), ("b", 20), ("c", 10))]
    assert advice_for(runs) == [
        Advice("memory", ("a", "c"), "--mem 13G", "a node needed 10.0 GiB of 64.0 GiB"),
        Advice("memory", ("b",), "--mem 26G", "a node needed 20.0 GiB of 64.0 GiB"),
    ]
