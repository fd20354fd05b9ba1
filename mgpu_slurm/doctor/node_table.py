"""Lines for people about the nodes of a partition: a table, what is wrong with which node, and the nodes to exclude."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mgpu_slurm.core.formatting import counted, cut, human_size, without_empty_columns
from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.doctor.check_results import wrapped
from mgpu_slurm.doctor.node_reports import NodeFacts, NodeReport, exclude, megahertz, per_second, teraflops

HEADER = ["NODE", "STATE", "DRIVER", "GPUS", "CLOCK", "MATMUL", "FREE", "WRITE", "MEMORY", "NETWORK"]

_SAID_ONCE = ("DRIVER", "GPUS", "MEMORY")
"""Columns that are said once instead of on each line if the table is too wide and all nodes have the same there."""
_LEFT_OUT_FIRST = ("MEMORY", "DRIVER", "FREE", "MATMUL", "CLOCK", "GPUS", "WRITE")
"""Columns that are left out of a table that is still too wide, in this order. `--json` has all."""
_ORDER = ("broken", "slow", "unchecked", "down")


def lines(reports: Sequence[NodeReport], width: int = sys.maxsize) -> list[str]:
    """Return the table, the reasons, and as the last line the option that avoids slow and broken nodes.

    Args:
        width: of the terminal.
    """
    return [*_table(reports, width), *_reasons(reports, width), "", _last_line(reports)]


def _table(reports: Sequence[NodeReport], width: int) -> list[str]:
    rows = without_empty_columns([HEADER, *map(_row, reports)])
    said: list[str] = []
    if _widest(rows) > width:
        rows, said = _same_once(rows)
    for name in _LEFT_OUT_FIRST:
        if _widest(rows) > width and name in rows[0]:
            rows = _without(rows, name)
    return [*said, *(cut(line, width) for line in _aligned(rows))]


def _row(report: NodeReport) -> list[str]:
    facts = report.seen.facts or NodeFacts()
    state = report.seen.node.state if report.verdict == "down" else report.verdict
    return [
        report.name,
        state,
        facts.driver,
        _gpus(facts),
        megahertz(facts.clock),
        teraflops(facts.flops),
        "" if facts.free is None else human_size(facts.free),
        per_second(facts.write),
        human_size(facts.memory) if facts.memory else "",
        per_second(report.network),
    ]


def _gpus(facts: NodeFacts) -> str:
    names = [gpu.name.removeprefix("NVIDIA ") for gpu in facts.gpus]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _same_once(rows: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Return the table without columns that have one value only, and a line with these values."""
    said = []
    for name in _SAID_ONCE:
        place = rows[0].index(name) if name in rows[0] else None
        values = {row[place] for row in rows[1:] if row[place]} if place is not None else set()
        if len(values) == 1:
            said.append(f"{name.lower()} {values.pop()}")
            rows = _without(rows, name)
    return rows, [f"on all that were checked: {', '.join(said)}"] if said else []


def _without(rows: list[list[str]], name: str) -> list[list[str]]:
    place = rows[0].index(name)
    return [row[:place] + row[place + 1 :] for row in rows]


def _widest(rows: list[list[str]]) -> int:
    return max(map(len, _aligned(rows)))


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]


def _reasons(reports: Sequence[NodeReport], width: int) -> list[str]:
    """Return a line for each reason, with all nodes that have it; the worst first."""
    found: list[str] = []
    for verdict in _ORDER:
        nodes: dict[str, list[str]] = {}
        for report in reports:
            if report.verdict == verdict:
                for why in report.why:
                    nodes.setdefault(why, []).append(report.name)
        for why, names in nodes.items():
            found += wrapped(f"{compress(names)}: {why}", f"{verdict:<11}", width)
    return ["", *found] if found else []


def _last_line(reports: Sequence[NodeReport]) -> str:
    if avoided := exclude(reports):
        return f"--exclude {avoided}"
    checked = sum(report.is_checked for report in reports)
    found = ", none of them slow or broken" if checked else ""
    return f"{checked} of {counted(len(reports), 'node')} checked{found}"
