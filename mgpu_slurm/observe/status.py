"""How runs stand, as a table for people and as facts for programs."""

from __future__ import annotations

import shutil
from datetime import datetime, timezone
from typing import Any

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
)
"""The names that `status --json` gives for each run; programs rely on them."""

HEADER = ["RUN", "STATE", "TRY", "RANKS", "STEP", "DONE", "METRICS", "AGE", "TIME", "REASON"]


def facts(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state.get(name) for name in FACTS}


def table(states: list[dict[str, Any]], width: int | None = None) -> str:
    """One line a run, cut to the terminal's width."""
    from tabulate import tabulate

    now = datetime.now(timezone.utc)
    # as a row among rows: tabulate pads what it knows to be a header
    rows = [HEADER, *(_row(state, now) for state in states)]
    text = tabulate(rows, tablefmt="plain", disable_numparse=True)
    width = width or shutil.get_terminal_size((160, 24)).columns
    return "\n".join(line[:width].rstrip() for line in text.splitlines())


def _row(state: dict[str, Any], now: datetime) -> list[str]:
    metrics = " ".join(f"{name}={value:.4g}" for name, value in (state.get("metrics") or {}).items())
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
        span((now - submitted).total_seconds()) if submitted else "",
        span(((ended or now) - started).total_seconds()) if started else "",
        state["reason"],
    ]


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def span(seconds: float) -> str:
    """A length of time in two letters' precision: `42s`, `3m10s`, `5h02m`, `3d04h`."""
    seconds = int(max(0, seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
