"""What a report costs: the command, its page, and what a browser does with it."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from benchmarks.measure import Estimate, median
from benchmarks.project import MGPU, Project, project
from benchmarks.report import Row, Section

ROUNDS = 5
METRICS = ("accuracy", "loss")
SEEDS = 4
"""Runs of a group."""
START = datetime(2026, 1, 1, tzinfo=timezone.utc)

SIZES = {200: (3.0, 5.0), 1000: (10.0, 8.0)}
"""CPU seconds and megabytes that a page of so many runs may take."""
STEPS = 1000

# frames are painted between the events, so the time of the tasks themselves is what a user waits for
_DRAG = """async () => {
    const slider = document.querySelector("#smooth"), times = [];
    for (let i = 1; i <= 10; i++) {
        slider.value = i / 11;
        const start = performance.now();
        slider.dispatchEvent(new Event("input"));
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        times.push(performance.now() - start);
    }
    return times;
}"""
_HOVER = """async () => {
    const canvas = document.querySelector(".drawing canvas:last-child");
    const box = canvas.getBoundingClientRect(), times = [];
    for (let i = 1; i <= 40; i++) {
        const start = performance.now();
        const clientX = box.left + box.width * i / 41, clientY = box.top + box.height * (0.3 + 0.4 * (i % 2));
        canvas.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY, bubbles: true}));
        times.push(performance.now() - start);
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    }
    return times;
}"""
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


def run() -> Section:
    rows: list[Row] = []
    with project() as made:
        for count, (seconds, megabytes) in SIZES.items():
            _make_runs(made.runs, count)
            page = made.base / f"report-{count}.html"
            command = [*MGPU, "report", str(made.runs), "-o", str(page)]
            taken = [_cpu(made, command) for _ in range(ROUNDS)]
            what = f"{count:,} runs x {STEPS:,} x {len(METRICS)} metrics"
            rows.append(Row(f"`mgpu-slurm report`, CPU, {what}", median(taken), "s", 2, seconds))
            size = page.stat().st_size / 1e6
            rows.append(Row(f"its page, {what}", Estimate(size, size, size, 1), "MB", 2, megabytes))
            if count == min(SIZES):
                rows += _in_a_browser(page, what)
    return Section("pages", _ABOUT, rows, _NOTES)


def _make_runs(runs: Path, count: int) -> None:
    """Write the records of runs that have ended, as many as are missing; groups differ in lr, runs in the seed."""
    for number in range(count):
        folder = runs / f"run-{number:04d}"
        if folder.exists():
            continue
        folder.mkdir(parents=True)
        lr = 10 ** (-1 - (number // SEEDS) % 40 / 20)
        spec = {"run": folder.name, "executor": "local", "resources": {}, "target": {"function": "train:train"}}
        (folder / "spec.yaml").write_text(json.dumps(spec | {"config": {"lr": lr, "seed": number % SEEDS}}))
        times = {"submitted": START, "started": START, "ended": START + timedelta(seconds=STEPS)}
        state = {"run": folder.name, "state": "COMPLETED", "executor": "local", "attempts": 1, "tasks": None}
        state |= {name: time.isoformat() for name, time in times.items()}
        (folder / "state.json").write_text(json.dumps(state))
        began = {"event": "started", "time": START.isoformat(), "attempt": 1, "job_id": str(number), "nodes": ["n1"]}
        ended = {"event": "ended", "time": times["ended"].isoformat(), "attempt": 1, "exit_code": 0}
        (folder / "attempts.jsonl").write_text(f"{json.dumps(began)}\n{json.dumps(ended)}\n")
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, STEPS + 1):
                file.write(json.dumps(_report(number, step, lr)) + "\n")


def _report(number: int, step: int, lr: float) -> dict[str, Any]:
    noise = math.sin(number * 12.9898 + step * 78.233) * 43758.5453 % 1 - 0.5
    loss = math.exp(-step * lr) + 0.05 + 0.02 * noise
    time = (START + timedelta(seconds=step - 0.001 * (number % 997))).isoformat()
    values = {"accuracy": 1 - loss / 2, "loss": loss}
    return {"progress": step, "step": 10 * step, "time": time, "attempt": 1, "metrics": values}


def _cpu(made: Project, command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=made.folder, env=made.environ, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _in_a_browser(page: Path, what: str) -> list[Row]:
    from tests import browser

    if not browser.is_there():
        return []
    paints, drags, hovers = [], [], []
    with tempfile.TemporaryDirectory() as folder, browser.started(Path(folder)) as started:
        for _ in range(ROUNDS):
            with browser.opened(started, page) as view:
                view.page.wait_for_timeout(1000)
                paints.append(float(view.page.evaluate(_PAINT)))
                drags += view.page.evaluate(_DRAG)
                hovers += view.page.evaluate(_HOVER)
    return [
        Row(f"first paint, {what}", median(paints), "ms", 0, 1000),
        Row(f"one step of smoothing, with the frame, {what}", median(drags), "ms", 1, 150),
        Row(f"one move of the pointer over curves, {what}", median(hovers), "ms", 1, 16),
    ]


_ABOUT = (
    f"Reports on runs whose records lie in the page cache: {STEPS:,} reports each, groups of {SEEDS} seeds. CPU is"
    " that of the whole command. The browser is a headless Chromium that renders without a GPU."
)
_NOTES = [
    "A page holds at most 1,000 points of each curve, and fewer if there are many curves.",
    "Without `make cluster-deps` there is no Chromium, and its figures are left out.",
]
