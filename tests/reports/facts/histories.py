"""Random reports of a run's attempts, and which of them count."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from typing import Any

from hypothesis import strategies as some

Attempts = list[list[tuple[int, dict[str, float]]]]
"""The reports of each attempt: progress and metrics."""

BEGIN = 1_800_000_000.0
NAMES = ("loss", "accuracy", "</script>", "ü" * 100)


def line(progress: int, metrics: dict[str, float], attempt: int = 1, seconds: float = 0.0, **changes: Any) -> str:
    time = datetime.fromtimestamp(BEGIN + seconds, timezone.utc).isoformat()
    return json.dumps(
        {"progress": progress, "step": progress * 10, "time": time, "attempt": attempt, "metrics": metrics} | changes
    )


@some.composite
def attempts(draw: some.DrawFn) -> Attempts:
    """The reports of each attempt, by increasing progress from any place on."""
    metrics = some.dictionaries(some.sampled_from(NAMES), some.floats(), max_size=3)
    progress = some.lists(some.integers(0, 30), unique=True, max_size=8).map(sorted)
    return [
        [(at, draw(metrics)) for at in draw(progress)]
        for _ in range(draw(some.integers(0, 4)))
    ]  # fmt: skip


def kept(history: Attempts) -> list[tuple[int, dict[str, float]]]:
    """The reports that no later attempt has begun before."""
    firsts = [min((at for at, _ in reports), default=math.inf) for reports in history]
    return [
        (at, metrics)
        for place, reports in enumerate(history)
        for at, metrics in reports
        if at < min(firsts[place + 1 :], default=math.inf)
    ]


def lines(history: Attempts, random: Any) -> list[str]:
    """The lines of `metrics.jsonl`: an old process may still write when the next attempt has begun."""
    writers = [attempt for attempt, reports in enumerate(history, 1) for _ in reports]
    random.shuffle(writers)
    waiting = {attempt: iter(reports) for attempt, reports in enumerate(history, 1)}
    return [line(*next(waiting[attempt]), attempt=attempt) for attempt in writers]
