"""Charts of runs, as they are drawn from facts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree.ElementTree import Element

import pytest

from mgpu_slurm.reports.page import run_charts
from mgpu_slurm.run_folder.usage_records import GpuUse, NodeUsage, UsageSample
from tests.reports.page.trees import by_class, tree_of

GIB = 1 << 30


def node(name: str, *samples: Sequence[GpuUse]) -> NodeUsage:
    """Return a node that was sampled every ten seconds."""
    times = [f"2026-11-28T12:{10 * place // 60:02d}:{10 * place % 60:02d}+00:00" for place in range(len(samples))]
    found = [
        UsageSample(time=time, cpu=20.0, rss=GIB, peak=GIB, ranks=2, gpu=tuple(gpus))
        for time, gpus in zip(times, samples, strict=True)
    ]
    return NodeUsage(1, name, found, {})


def points(root: Element, cls: str) -> list[tuple[float, float]]:
    """Return the points of a line, as shares of the width and height that it takes."""
    (line,) = by_class(root, cls, "path")
    at, found = (0.0, 0.0), []
    for letter, x, y in re.findall(r"([MLl])(-?[\d.]+)[ ]?(-?[\d.]+)", line.get("d", "")):
        at = (float(x), float(y)) if letter in "ML" else (at[0] + float(x), at[1] + float(y))
        found.append(at)
    return found


def test_gpus_over_time_are_those_of_the_fullest_node() -> None:
    busy = [GpuUse(0.5, 2 * GIB, 300.0), GpuUse(1.0, 4 * GIB, 300.0)]
    idle = [GpuUse(0.0, 2 * GIB, 90.0), GpuUse(0.0, 2 * GIB, 90.0)]
    small = node("n1", *[[GpuUse(0.25, GIB, None)]] * 4)
    # a sample without an answer has nothing to show
    large = node("n2", busy, [GpuUse()], idle, busy)
    chart = run_charts.gpu_usage("gpus-0", "run", [small, large])
    assert chart is not None
    root = tree_of(f"<div>{chart.svg()}</div>")
    assert "2 GPUs of n2, computing for up to 75% of the time, with up to 4.0 GiB of memory on one." in chart.svg()
    (first, middle, last), memory = points(root, "busy"), points(root, "memory")
    assert first[1] == pytest.approx(last[1])
    assert first[1] < middle[1]
    # 0, 20 and 30 seconds after the first sample
    assert (middle[0] - first[0]) / (last[0] - first[0]) == pytest.approx(2 / 3, abs=0.01)
    assert memory[0][1] == pytest.approx(memory[2][1])
    assert memory[0][1] < memory[1][1]


def test_usage_is_drawn_without_gpus() -> None:
    nodes = [node("n1", (), (), (), ())]
    assert run_charts.gpu_usage("gpus-0", "run", nodes) is None
    chart = run_charts.usage("usage-0", "run", nodes, cores=4)
    assert chart is not None
    assert "Up to 2 cores busy on n1, and 1.0 GiB of memory." in chart.svg()
    assert len(points(tree_of(f"<div>{chart.svg()}</div>"), "busy")) == 3


@pytest.mark.parametrize("nodes", [[], [node("n1")], [node("n1", *[[GpuUse(0.5, GIB)]] * 2)]])
def test_few_samples_are_not_drawn(nodes: list[NodeUsage]) -> None:
    assert run_charts.usage("usage-0", "run", nodes, cores=None) is None
    assert run_charts.gpu_usage("gpus-0", "run", nodes) is None
