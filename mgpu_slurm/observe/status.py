"""How runs stand, as a table for people and as facts for programs."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import sys
from collections import Counter
from datetime import datetime, timezone
from typing import Any

from mgpu_slurm.states import is_alive, overall

FACTS = (
    "run",
    "kind",
    "state",
    "job_id",
    "attempts",
    "nodes",
    "ranks",
    "step",
    "progress",
    "metrics",
    "submitted",
    "started",
    "ended",
    "reason",
    "group",
)
"""The names that `status --json` gives for each run; programs rely on them."""

HEADER = ["RUN", "STATE", "TRY", "RANKS", "STEP", "DONE", "METRICS", "AGE", "TIME", "REASON"]


def facts(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state.get(name) for name in FACTS} | {"group": _group(state["run"])}


def table(states: list[dict[str, Any]], width: int | None = None, whole: bool = False) -> str:
    """One line a run, or one a group, cut to the width of a terminal.

    Args:
        whole: a line for each run of a group too.
    """
    from tabulate import tabulate

    now = datetime.now(timezone.utc)
    # as a row among rows: tabulate pads what it knows to be a header
    rows = [HEADER]
    for group, members in itertools.groupby(states, key=lambda state: _group(state["run"])):
        if group is None:
            rows += [_row(state, now) for state in members]
        else:
            runs = list(members)
            rows += [*(_row(state, now) for state in runs if whole), _row(summary(group, runs), now)]
    text = tabulate(rows, tablefmt="plain", disable_numparse=True)
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    return "\n".join(line[:width].rstrip() for line in text.splitlines())


def _group(run: str) -> str | None:
    return run.rpartition("/")[0] or None


def summary(group: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a group: what its runs have in common, and the mean and spread of their metrics."""
    counts = Counter(state["state"] for state in runs)
    alive = any(is_alive(state) for state in counts)
    ends = [state["ended"] for state in runs if state["ended"]]
    return {
        "run": group,
        "state": overall(runs),
        "attempts": max(state["attempts"] for state in runs),
        "nodes": runs[0]["nodes"],
        "ranks": runs[0]["ranks"],
        "step": min(state["step"] for state in runs),
        "progress": min(state["progress"] for state in runs),
        "metrics": spread(runs),
        "submitted": runs[0]["submitted"],
        "started": min((state["started"] for state in runs if state["started"]), default=None),
        "ended": None if alive else max(ends, default=None),
        "reason": f"{len(runs)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.items()),
    }


def spread(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Mean and standard deviation of each metric, over the runs that have it."""
    values: dict[str, list[float]] = {}
    for state in runs:
        for name, value in (state.get("metrics") or {}).items():
            values.setdefault(name, []).append(value)
    return {name: _mean_and_deviation(found) for name, found in values.items()}


def _mean_and_deviation(values: list[float]) -> str:
    if not all(map(math.isfinite, values)):
        # there is no spread about one that has diverged
        return f"{sum(values):.4g}"
    mean = f"{statistics.fmean(values):.4g}"
    return mean if len(values) == 1 else f"{mean}±{statistics.stdev(values):.2g}"


def _row(state: dict[str, Any], now: datetime) -> list[str]:
    metrics = " ".join(f"{name}={_short(value)}" for name, value in (state.get("metrics") or {}).items())
    submitted = _time(state["submitted"])
    started, ended = _time(state.get("started")), _time(state.get("ended"))
    return [
        state["run"],
        state["state"],
        str(state["attempts"]),
        f"{state['nodes']}x{state['ranks'] // state['nodes']}",
        str(state["step"]),
        str(state["progress"]),
        metrics,
        duration((now - submitted).total_seconds()) if submitted else "",
        duration(((ended or now) - started).total_seconds()) if started else "",
        state["reason"],
    ]


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def duration(seconds: float) -> str:
    """A length of time in two letters' precision: `42s`, `3m10s`, `5h02m`, `3d04h`."""
    seconds = int(max(0, seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
