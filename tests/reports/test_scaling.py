"""How the speed of a job grows with its ranks, and that the lost time is attributed to what took it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_slurm.reports.scaling import Row, Scaling, Size, rows
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder.speed_records import Interval

ALONE = Interval(seconds=10.0, steps=100, samples=6400, waited=0.5, forward=3.0, backward=6.0)
"""One rank: 100 ms a step, of which 5 for data, 30 forward, 60 backward and 5 for the rest."""


def size(nodes: int, ranks: Sequence[Interval], layout: Layout | None = None) -> Size:
    return Size(nodes, layout or Layout(replicas=len(ranks)), ranks, f"train-{nodes}n", "COMPLETED")


def changed(**changes: float) -> Interval:
    """Return the steps of a rank that takes longer in some part; in seconds for all 100 steps."""
    longer = {name: getattr(ALONE, name) + seconds for name, seconds in changes.items()}
    return replace(ALONE, **({"seconds": ALONE.seconds + sum(changes.values())} | longer))


def compared(*ranks: Interval, layout: Layout | None = None) -> Row:
    """Return the row of two nodes whose ranks have a batch as large as the one of a single rank: weak scaling."""
    return rows([size(1, [ALONE]), size(2, ranks, layout)])[1]


def milliseconds(row: Row) -> dict[str, float]:
    """Return the lost time of a step by what took it, without parts that took none."""
    found = {name: round(1e3 * seconds, 6) for name, seconds in row.lost.items()}
    return {name: value for name, value in found.items() if value}


def test_ranks_as_fast_as_the_first_one_lose_nothing() -> None:
    row = compared(ALONE, ALONE)
    assert (row.speed_up, row.efficiency, row.ideal) == (2.0, 1.0, 0.1)
    assert milliseconds(row) == {}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # each rank exchanges gradients for 10 ms
        ([changed(backward=1.0)] * 2, {"communication": 10.0}),
        # both passes take a third longer: 30 and 60 ms
        ([changed(forward=1.0, backward=2.0)] * 2, {"compute": 30.0}),
        ([changed(waited=1.0)] * 2, {"data": 10.0}),
        # the optimizer, or code of the job
        ([changed(seconds=1.0)] * 2, {"other": 10.0}),
        # one rank is slow, for which the other waits in the backward pass
        ([changed(forward=2.0), changed(backward=2.0)], {"stragglers": 20.0}),
        # the same, but it waits for its data, which is half of the time of two ranks
        ([changed(waited=2.0), changed(backward=2.0)], {"data": 10.0, "stragglers": 10.0}),
    ],
    ids=["communication", "compute", "data", "other", "slow-rank", "slow-data-of-one-rank"],
)
def test_lost_time_is_attributed_to_what_took_it(ranks: list[Interval], expected: dict[str, float]) -> None:
    assert milliseconds(compared(*ranks)) == expected


def test_smaller_shares_of_a_batch_should_take_less_time() -> None:
    """Strong scaling: each of two ranks has half of the samples, and their passes take as long as before."""
    half = replace(ALONE, samples=3200, seconds=9.75, waited=0.25)
    row = compared(half, half)
    assert (row.speed_up, row.efficiency) == pytest.approx((10 / 9.75, 10 / 9.75 / 2))
    assert row.ideal == pytest.approx(0.05)
    # half of 90 ms, and of the rest of the step
    assert milliseconds(row) == {"compute": 45.0, "other": 2.5}


def test_smallest_size_may_exchange_gradients_too() -> None:
    base, larger = size(1, [changed(backward=1.0)] * 2), size(2, [changed(backward=2.0)] * 4)
    row = rows([base, larger])[1]
    assert row.speed_up == pytest.approx(2 * 11 / 12)
    assert row.efficiency == pytest.approx(11 / 12)
    assert milliseconds(row) == {"communication": 10.0}


def test_passes_of_a_sharded_model_are_not_divided() -> None:
    """Ranks wait for each other in both of them."""
    row = compared(changed(forward=1.0), changed(backward=1.0), layout=Layout(strategy="fsdp", shards=2))
    assert milliseconds(row) == {"compute_and_communication": 10.0}


def test_ranks_that_share_a_batch_count_it_once() -> None:
    row = compared(ALONE, ALONE, layout=Layout(tensor=2))
    assert (row.speed_up, row.efficiency) == (1.0, 0.5)
    assert row.to_json()["batch"] == 64


def test_job_whose_passes_are_not_measured_has_other_parts_only() -> None:
    """One that calls `loss.backward()` itself."""
    plain = replace(ALONE, forward=0.0, backward=0.0)
    row = rows([size(1, [plain]), size(2, [replace(plain, seconds=12.0, waited=1.0)] * 2)])[1]
    assert row.lost == pytest.approx({"data": 0.005, "other": 0.015})


def recorded() -> list[Size]:
    """Return the sizes of jobs/digits.py with a batch of 64 on each rank, recorded on a machine with two cores."""
    found = json.loads((Path(__file__).parent / "scaling_job.json").read_text())
    return [size(int(nodes), [Interval(*numbers) for numbers in ranks]) for nodes, ranks in found.items()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parts_of_a_recorded_job_add_up_to_the_lost_time(strategy: str) -> None:
    sizes = recorded()
    if strategy == "fsdp":
        sizes = [replace(each, layout=Layout(strategy="fsdp", shards=len(each.ranks))) for each in sizes]
    found = rows(sizes)
    assert [row.size.nodes for row in found] == [1, 2, 4]
    for row in found:
        lost = row.size.mean("seconds") - row.ideal
        assert sum(row.lost.values()) == pytest.approx(lost, abs=1e-12)
        assert row.efficiency == pytest.approx(row.ideal / row.size.mean("seconds"))
    # four ranks share two cores
    assert found[2].lost["data"] < 0.1 * sum(found[2].lost.values())


def scaling(*sizes: Size, scaled: str | None = None) -> Scaling:
    return Scaling("train.py:train", 5, scaled, sizes)


def test_tables_fit_into_80_columns() -> None:
    lines = scaling(*recorded(), scaled="batch_size").lines()
    assert lines == [
        "scaling of train.py:train, after 5 steps of warm-up",
        "weak scaling: batch_size grows with the nodes",
        "",
        "NODES  RANKS  STEPS  BATCH  MS/STEP  SAMPLES/S  SPEED-UP  EFFICIENCY",
        "    1      1     20  62.25     13.0      4,802      1.00        100%",
        "    2      2     20  118.1     29.3      4,033      0.84         42%",
        "    4      4     20  236.2     47.5      4,971      1.04         26%",
        "",
        "lost in each step, compared with 1 node, in ms and as part of the ideal step",
        "NODES       LOST     DATA  COMPUTE  COMMUNICATION  STRAGGLERS   OTHER",
        "    2  17.0 138%  -0.1 0%  3.9 32%       10.1 82%     2.9 24%  0.1 1%",
        "    4  35.2 286%   0.2 2%  7.3 60%      20.1 163%     7.5 61%  0.1 1%",
    ]
    assert max(map(len, lines)) <= 80


def test_size_that_failed_has_a_row_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mgpu-slurm"])
    failed = Size(2, Layout(replicas=2), (), "train-2n", "FAILED", "rank 0 on n1 failed: ValueError: no data")
    refused = Size(4, problem="sbatch: error: Node count specification invalid")
    found = scaling(size(1, [ALONE]), failed, refused)
    assert found.lines()[1:] == [
        "strong scaling: all sizes divide the same batch",
        "",
        "NODES  RANKS  STEPS  BATCH  MS/STEP  SAMPLES/S  SPEED-UP  EFFICIENCY",
        "    1      1    100     64      100        640      1.00        100%",
        "    2      2      -      -        -          -         -           -",
        "    4      -      -      -        -          -         -           -",
        "",
        "2 nodes: FAILED: rank 0 on n1 failed: ValueError: no data (see `mgpu-slurm why train-2n`)",
        "4 nodes: sbatch: error: Node count specification invalid",
    ]
    assert not found.is_complete
    facts = found.to_json()["sizes"]
    assert [each["problem"] for each in facts] == [None, failed.problem, refused.problem]
    assert ["speed_up" in each for each in facts] == [True, False, False]


def test_smallest_size_that_was_measured_is_the_one_to_compare_with() -> None:
    failed = Size(1, Layout(), (), "train-1n", "FAILED", "out of memory")
    lines = scaling(failed, size(2, [ALONE] * 2), size(4, [changed(backward=1.0)] * 4)).lines()
    assert "lost in each step, compared with 2 nodes, in ms and as part of the ideal step" in lines


def test_faster_part_is_negative_and_nothing_is_minus_zero() -> None:
    barely = changed(waited=-0.0001, forward=-1.0, backward=-2.0)
    lines = scaling(size(1, [ALONE]), size(2, [barely, barely])).lines()
    assert lines[-1].split() == ["2", "-30.0", "-30%", "0.0", "0%", "-30.0", "-30%", *["0.0", "0%"] * 3]
