"""How nodes are judged by what they measured, and the table that people see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mgpu_slurm.doctor import node_table
from mgpu_slurm.doctor.node_reports import GpuFacts, Meeting, NodeFacts, NodeReport, Seen, exclude, judge
from mgpu_slurm.doctor.node_survey import Checked
from mgpu_slurm.slurm.partition_nodes import Node

H200, V100 = "NVIDIA H200", "Tesla V100-SXM2-32GB"
GB = 10**9


def facts(model: str = H200, **changes: Any) -> NodeFacts:
    gpu = GpuFacts(model, clock=1980, highest_clock=1980, flops=700e12)
    usual = NodeFacts("550.54.15", (gpu,) * 8, "/tmp", 812 * GB, 2e9, 2000 * GB)
    return replace(usual, **changes)


def with_gpus(**changes: Any) -> NodeFacts:
    """A node of which one GPU is different."""
    gpus = facts().gpus
    return facts(gpus=(*gpus[1:], replace(gpus[0], **changes)))


def seen(name: str, known: NodeFacts | None, **more: Any) -> Seen:
    return Seen(Node(name, "idle"), known, **more)


def judged(*known: NodeFacts, meetings: tuple[Meeting, ...] = ()) -> list[NodeReport]:
    return judge([seen(f"n{number}", each) for number, each in enumerate(known, start=1)], meetings)


def verdicts(reports: list[NodeReport]) -> list[str]:
    return [report.verdict for report in reports]


def met(first: str, second: str, rate: float | None, problem: str = "") -> Meeting:
    return Meeting((first, second), rate, problem)


def test_equal_nodes_are_ok_and_nothing_is_excluded() -> None:
    reports = judged(facts(), facts(), facts(), meetings=(met("n1", "n2", 1e9), met("n2", "n3", 1.1e9)))
    assert verdicts(reports) == ["ok"] * 3
    assert [report.network for report in reports] == [1e9, 1.1e9, 1.1e9]
    assert exclude(reports) == ""
    assert node_table.lines(reports)[-1] == "3 of 3 nodes checked, none of them slow or broken"


def test_check_of_no_node_has_failed() -> None:
    reports = judge([seen("n1", None, unchecked="its task did not start in time")], [])
    assert node_table.lines(reports)[-1] == "0 of 1 node checked"
    assert Checked(reports, is_interrupted=False).has_failed
    assert not Checked(judged(facts()), is_interrupted=False).has_failed


def test_slow_node_is_named_with_its_value_and_the_median_of_its_kind() -> None:
    for slow, why in (
        (with_gpus(clock=1200), "GPU clock 1200 MHz, the median of nodes with NVIDIA H200 is 1980 MHz"),
        (
            with_gpus(flops=500e12),
            "matrix products at 500 TFLOP/s, the median of nodes with NVIDIA H200 is 700 TFLOP/s",
        ),
        (facts(write=0.3e9), "writes to /tmp at 300 MB/s, the median of nodes with NVIDIA H200 is 2.0 GB/s"),
    ):
        reports = judged(facts(), slow, facts())
        assert [(report.verdict, report.why) for report in reports] == [("ok", ()), ("slow", (why,)), ("ok", ())]
        assert exclude(reports) == "n2"


def test_usual_differences_between_nodes_are_not_slow() -> None:
    reports = judged(facts(), with_gpus(clock=1900, flops=650e12), facts(write=1.1e9), facts(write=9e9))
    assert verdicts(reports) == ["ok"] * 4


def test_nodes_are_compared_with_those_of_the_same_gpus_only() -> None:
    older = facts(V100, gpus=(GpuFacts(V100, 1530, 1530, 100e12),) * 4)
    assert verdicts(judged(facts(), facts(), facts(), older, older)) == ["ok"] * 5
    # without GPUs, disk and network are all that there is to compare
    bare = facts(gpus=(), driver="")
    assert verdicts(judged(bare, replace(bare, write=0.5e9), bare)) == ["ok", "slow", "ok"]


def test_slow_partner_is_not_held_against_a_node() -> None:
    meetings = (met("n1", "n2", 1e8), met("n3", "n4", 1e9), met("n1", "n3", 1e9), met("n2", "n4", 1e8))
    reports = judged(*[facts()] * 4, meetings=meetings)
    assert verdicts(reports) == ["ok", "slow", "ok", "ok"]
    assert reports[1].why == ("network to n1 and n4 at 100 MB/s, the median of nodes with NVIDIA H200 is 1.0 GB/s",)


def test_node_that_reaches_no_other_is_broken_but_not_its_partners() -> None:
    meetings = (met("n1", "n2", None, "timed out"), met("n2", "n3", None, "timed out"), met("n1", "n3", 1e9))
    reports = judged(facts(), facts(), facts(), meetings=meetings)
    assert verdicts(reports) == ["slow", "broken", "slow"]
    assert reports[1].why == ("no connection to n1: timed out", "no connection to n3: timed out")
    # which of the two is to blame is unknown
    assert verdicts(judged(facts(), facts(), meetings=meetings[:1])) == ["broken", "broken"]


def test_node_that_failed_meanwhile_says_nothing_about_its_partner() -> None:
    lost = seen("n2", facts(), failure="its task ended as NODE_FAIL")
    reports = judge([seen("n1", facts()), lost], [met("n1", "n2", None, "Connection reset by peer")])
    assert [(report.verdict, report.why) for report in reports] == [
        ("ok", ()),
        ("broken", ("its task ended as NODE_FAIL",)),
    ]


def many() -> list[NodeReport]:
    drained = Node("gpu-a004", "drained", "fan replaced (root, 2026-11-29T12:43:55)")
    return judge(
        [
            seen("gpu-a001", facts()),
            seen("gpu-a002", with_gpus(clock=1200, flops=420e12)),
            seen("gpu-a003", facts(write=None, free=None, broken=("cannot write to /tmp: No space left on device",))),
            Seen(drained),
            seen("gpu-a005", None, failure="its task ended as NODE_FAIL: a node failed"),
            seen("gpu-a006", None, failure="its task ended as NODE_FAIL: a node failed"),
            Seen(Node("gpu-a007", "allocated"), unchecked="allocated, its task did not start in time (Resources)"),
            seen("gpu-a008", facts()),
        ],
        [met("gpu-a001", "gpu-a002", 2.1e9), met("gpu-a003", "gpu-a008", 2.2e9)],
    )


def test_table_has_a_line_for_each_node_then_the_reasons_then_what_to_paste() -> None:
    assert node_table.lines(many()) == [
        "NODE      STATE      DRIVER     GPUS    CLOCK     MATMUL       FREE    WRITE     MEMORY  NETWORK",
        "gpu-a001  ok         550.54.15  8 H200  1980 MHz  700 TFLOP/s  812 GB  2.0 GB/s  2.0 TB  2.1 GB/s",
        "gpu-a002  slow       550.54.15  8 H200  1200 MHz  420 TFLOP/s  812 GB  2.0 GB/s  2.0 TB  2.1 GB/s",
        "gpu-a003  broken     550.54.15  8 H200  1980 MHz  700 TFLOP/s                    2.0 TB  2.2 GB/s",
        "gpu-a004  drained",
        "gpu-a005  broken",
        "gpu-a006  broken",
        "gpu-a007  unchecked",
        "gpu-a008  ok         550.54.15  8 H200  1980 MHz  700 TFLOP/s  812 GB  2.0 GB/s  2.0 TB  2.2 GB/s",
        "",
        "broken     gpu-a003: cannot write to /tmp: No space left on device",
        "broken     gpu-a[005-006]: its task ended as NODE_FAIL: a node failed",
        "slow       gpu-a002: GPU clock 1200 MHz, the median of nodes with NVIDIA H200 is 1980 MHz",
        "slow       gpu-a002: matrix products at 420 TFLOP/s, the median of nodes with NVIDIA H200 is 700 TFLOP/s",
        "unchecked  gpu-a007: allocated, its task did not start in time (Resources)",
        "down       gpu-a004: drained: fan replaced (root, 2026-11-29T12:43:55)",
        "",
        "--exclude gpu-a[002-003],gpu-a[005-006]",
    ]


def test_narrow_table_says_once_what_all_nodes_have() -> None:
    found = node_table.lines(many(), 80)
    assert found[:3] == [
        "on all that were checked: driver 550.54.15, gpus 8 H200, memory 2.0 TB",
        "NODE      STATE      CLOCK     MATMUL       FREE    WRITE     NETWORK",
        "gpu-a001  ok         1980 MHz  700 TFLOP/s  812 GB  2.0 GB/s  2.1 GB/s",
    ]
    assert max(map(len, found)) <= 80
    assert found[-1] == "--exclude gpu-a[002-003],gpu-a[005-006]"
    assert node_table.lines(many(), 60)[1].split() == ["NODE", "STATE", "CLOCK", "WRITE", "NETWORK"]


def test_cluster_without_gpus_has_no_columns_for_them() -> None:
    (header, *_) = node_table.lines(judged(facts(gpus=(), driver="")))
    assert header.split() == ["NODE", "STATE", "FREE", "WRITE", "MEMORY"]


def test_json_has_the_facts_of_the_table() -> None:
    first, _, _, drained, *_ = (report.to_json() for report in many())
    assert (first["node"], first["verdict"], first["network"], first["partners"]) == (
        "gpu-a001",
        "ok",
        2.1e9,
        ["gpu-a002"],
    )
    assert first["facts"]["gpus"][0] == {"name": H200, "clock": 1980, "highest_clock": 1980, "flops": 700e12}
    assert NodeFacts.from_plain(first["facts"]) == facts()
    assert (drained["verdict"], drained["slurm_state"], drained["facts"]) == ("down", "drained", None)
    assert drained["slurm_reason"] == "fan replaced (root, 2026-11-29T12:43:55)"
