"""How the speed of a job grows with its ranks, and where the rest of the time goes.

In an ideal step, each rank is as fast as those of the smallest size. A real step is divided into these parts, as means
over the ranks:

- `data`: waits for batches of the loader.
- `compute`: the forward pass of the fastest rank, and as much of the backward pass as if that had grown in the same
  proportion since the smallest size.
- `communication`: the rest of the backward pass, on the rank that spends the least time in it.
- `stragglers`: what ranks take longer in both passes: slow ranks in the forward pass, and those that wait for a slow
  rank in the backward pass.
- `compute_and_communication`: both passes, if ranks wait for each other in either, as for a sharded model.
- `other`: the rest of a step, such as the optimizer and the code between two steps.

The same part of the smallest size's step, shortened like the ideal step, is subtracted from each. So the differences
add up to the lost time; the one of a part that became faster is negative.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.registry import current_state
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.speed_records import Interval, SpeedRecord
from mgpu_slurm.submission.scaling_runs import SizeRun

HEADER = ("NODES", "RANKS", "STEPS", "BATCH", "MS/STEP", "SAMPLES/S", "SPEED-UP", "EFFICIENCY")


@dataclass(frozen=True)
class Size:
    """What the ranks of one size measured, or why they did not."""

    nodes: int
    layout: Layout = field(default_factory=Layout)
    ranks: Sequence[Interval] = ()
    """Empty if nothing was measured."""
    run: str | None = None
    state: str = ""
    problem: str = ""
    """Why nothing was measured, in one line."""

    @property
    def world_size(self) -> int:
        return self.layout.data * self.layout.ranks_per_batch

    def _each(self, name: str) -> list[float]:
        return [getattr(rank, name) / rank.steps for rank in self.ranks]

    def mean(self, name: str) -> float:
        """Return the mean over the ranks of a value of their intervals, for each step."""
        return statistics.fmean(self._each(name))

    def total(self, name: str) -> float:
        """Return the sum for each step; ranks that share a batch count it once."""
        return self.mean(name) * len(self.ranks) / self.layout.ranks_per_batch

    def least(self, name: str) -> float:
        """Return the value of the rank that has the least, for each step."""
        return min(self._each(name))

    @property
    def passes(self) -> float:
        """Mean seconds of the forward and backward passes of a step."""
        return self.mean("forward") + self.mean("backward")

    @property
    def fastest_passes(self) -> float:
        """Seconds of both passes, each on the rank that spends the least time in it."""
        return self.least("forward") + self.least("backward")


@dataclass(frozen=True)
class Row:
    """A size that was measured, next to the smallest one."""

    size: Size
    speed_up: float
    efficiency: float
    """Part of the speed that as many ranks had if they were as fast as those of the smallest size."""
    ideal: float
    """Seconds of a step at that speed."""
    lost: dict[str, float] = field(default_factory=dict)
    """Seconds of a step beyond that, by where they go."""

    def to_json(self) -> dict[str, Any]:
        size = self.size
        seconds = size.mean("seconds")
        return {
            "steps": int(size.ranks[0].steps),
            "batch": size.total("samples"),
            "step_seconds": seconds,
            "samples_per_second": size.total("samples") / seconds,
            "tokens_per_second": size.total("tokens") / seconds or None,
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "ideal_seconds": self.ideal,
            "lost_seconds": self.lost,
        }


def sizes_of(runs: Iterable[SizeRun]) -> list[Size]:
    """Return what runs have measured."""
    return [_size_of(run) for run in runs]


def _size_of(run: SizeRun) -> Size:
    if run.plan is None or run.folder is None:
        return Size(run.nodes, problem=str(run.error or "not submitted"))
    spec, state = run.plan.spec, current_state.state(run.folder)
    layout = spec.parallelism.layout(spec.resources.ranks, spec.resources.ranks_per_node)
    found = read_json(run.folder.speed)
    if state.state == states.COMPLETED and found is not None:
        return Size(run.nodes, layout, SpeedRecord.from_json(found).ranks, spec.run, state.state)
    without_reason = "interrupted" if states.is_alive(state.state) else "ended before its steps were measured"
    problem = str(run.error or state.reason or without_reason)
    return Size(run.nodes, layout, (), spec.run, state.state, problem)


def rows(sizes: Sequence[Size]) -> list[Row]:
    """Compare the sizes that were measured with the smallest of them."""
    measured = [size for size in sizes if size.ranks]
    return [_row(measured[0], size) for size in measured]


def _row(base: Size, size: Size) -> Row:
    seconds = size.mean("seconds")
    speed_up = size.total("samples") / seconds / (base.total("samples") / base.mean("seconds"))
    efficiency = speed_up * base.world_size / size.world_size
    return Row(size, speed_up, efficiency, seconds * efficiency, _lost(base, size, seconds * efficiency))


def _lost(base: Size, size: Size, ideal: float) -> dict[str, float]:
    """Return the seconds of a step beyond the ideal ones, by where they go: see the beginning of this module."""
    share = ideal / base.mean("seconds")
    found = {"data": size.mean("waited") - share * base.mean("waited")}
    if size.layout.exchanges_in_backward and base.least("forward") and size.least("forward"):
        computed = size.least("forward") / base.least("forward") * base.fastest_passes
        found["compute"] = computed - share * base.fastest_passes
        found["communication"] = size.fastest_passes - computed
        found["stragglers"] = size.passes - size.fastest_passes - share * (base.passes - base.fastest_passes)
    elif size.passes:
        found["compute_and_communication"] = size.passes - share * base.passes
    return found | {"other": size.mean("seconds") - ideal - sum(found.values())}


@dataclass(frozen=True)
class Scaling:
    """All sizes of a job, to be shown."""

    target: str
    warm_up: int
    scaled: str | None
    """The config value that grew with the nodes; None for strong scaling."""
    sizes: Sequence[Size]

    @property
    def is_complete(self) -> bool:
        """Whether all sizes were measured."""
        return all(size.ranks for size in self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return the facts for programs."""
        found = {row.size.nodes: row.to_json() for row in rows(self.sizes)}
        return {
            "target": self.target,
            "scaling": "strong" if self.scaled is None else "weak",
            "scaled": self.scaled,
            "warm_up": self.warm_up,
            "sizes": [_facts(size) | found.get(size.nodes, {}) for size in self.sizes],
        }

    def lines(self) -> list[str]:
        """Return the lines to show: a table of the speed, one of the lost time, and why sizes failed."""
        strong, weak = (
            "strong scaling: all sizes divide the same batch",
            f"weak scaling: {self.scaled} grows with the nodes",
        )
        told = [f"scaling of {self.target}, after {counted(self.warm_up, 'step')} of warm-up"]
        told += [strong if self.scaled is None else weak]
        found = rows(self.sizes)
        cells = {row.size.nodes: _cells(row) for row in found}
        told += ["", *_table([HEADER, *(cells.get(size.nodes) or _cells_of_failed(size) for size in self.sizes)])]
        if len(found) > 1:
            first = counted(found[0].size.nodes, "node")
            told += ["", f"lost in each step, compared with {first}, in ms and as part of the ideal step"]
            told += _table(_lost_cells(found[1:]))
        failed = [_failure(size) for size in self.sizes if not size.ranks]
        return told + (["", *failed] if failed else [])


def _facts(size: Size) -> dict[str, Any]:
    return {
        "nodes": size.nodes,
        "ranks": size.world_size if size.run is not None else None,
        "run": size.run,
        "state": size.state or None,
        "problem": size.problem or None,
    }


def _cells(row: Row) -> tuple[str, ...]:
    size, facts = row.size, row.to_json()
    return (
        str(size.nodes),
        str(size.world_size),
        str(facts["steps"]),
        f"{facts['batch']:,.4g}" if facts["batch"] < 1000 else f"{facts['batch']:,.0f}",
        _milliseconds(facts["step_seconds"]),
        _rate(facts["samples_per_second"]),
        f"{row.speed_up:.2f}",
        f"{row.efficiency:.0%}",
    )


def _cells_of_failed(size: Size) -> tuple[str, ...]:
    facts = _facts(size)
    return (str(size.nodes), str(facts["ranks"] or "-"), *["-"] * (len(HEADER) - 2))


def _lost_cells(found: Sequence[Row]) -> list[tuple[str, ...]]:
    # not all layouts have the same parts
    names = dict.fromkeys(name for row in found for name in row.lost if name != "other")
    header = ("NODES", "LOST", *(name.replace("_and_", "+").upper() for name in names), "OTHER")
    cells = [header]
    for row in found:
        parts = [row.lost.get(name) for name in (*names, "other")]
        values = [sum(row.lost.values()), *parts]
        cells.append((str(row.size.nodes), *("-" if each is None else _part(each, row.ideal) for each in values)))
    return cells


def _part(seconds: float, ideal: float) -> str:
    # not -0%
    return f"{_milliseconds(seconds)} {round(100 * seconds / ideal)}%"


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    # not -0.0
    return f"{round(value, 1) + 0.0:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    from tabulate import tabulate

    # the header is a row like the others: tabulate pads headers
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, stralign="right")
    return [line.rstrip() for line in text.splitlines()]


def _failure(size: Size) -> str:
    told = ": ".join(filter(None, (counted(size.nodes, "node"), size.state, size.problem)))
    has_ended = size.run is not None and not states.is_alive(size.state)
    return f"{told} (see `{program()} why {size.run}`)" if has_ended else told
