"""Runs and a sweep with whatever may be in their files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.metrics.event_files import ended_run, scalar, write
from tests.reports.sweeps import make_sweep

EVIL = "</script></style><img src=x onerror=alert(1)>\"'&amp;"
STATES = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.COMPLETE]


def add_run(base: Path, name: str, points: list[tuple[int, int, dict[str, float]]], **spec: Any) -> RunFolder:
    run = RunFolder(ended_run(base / name, **spec))
    records.record_event(run, "started", attempt=1, time="2026-01-01T00:00:00.000+00:00", job_id="1", nodes=["<n>"])
    records.record_event(run, "ended", attempt=1, time="2026-01-01T00:01:00.000+00:00", exit_code=0)
    reporter = Reporter(run, 1)
    for progress, step, metrics in points:
        reporter.report(progress, step, metrics)
    reporter.close(0)
    return run


def hostile_runs(base: Path) -> list[Path]:
    usual = [(at, at * 10, {"loss": 1 / at, EVIL: at / 3}) for at in range(1, 30)]
    add_run(base, "usual", usual, config={f"key{place}": 0 for place in range(500)} | {EVIL: EVIL, "lr": 0.1})
    add_run(base, "other", usual, config={f"key{place}": place + 1 for place in range(500)} | {"lr": 10**400})
    values = (1.0, math.nan, math.inf, 1e308, -math.inf, 5e-324)
    add_run(base, "broken", [(at, at, {"loss": value}) for at, value in enumerate(values)])
    add_run(base, "nan", [(at, at, {"loss": math.nan}) for at in range(3)])
    add_run(base, "point-20260101-000000-abcd", [(1, 2**60, {"loss": 0.5, "only\x01\ud800": 1e308})])
    add_run(base, "late", [(2**53, 2**53 + 2, {"loss": 0.25}), (2**53 + 4, 2**53 + 6, {"loss": 0.125})])
    add_run(base, "silent", [])
    failed = add_run(base, "failed", [(1, 1, {"loss": 3.0})])
    records.update_state(failed, state="FAILED", reason=EVIL)
    records.record_event(failed, "started", attempt=2, time="2026-01-01T00:02:00.000+00:00", job_id="2", nodes=["n"])
    sweep = make_sweep(base, space={EVIL: {"choice": [EVIL, "b"]}, "x": {"float": [0.1, 1.0], "log": True}})
    for state, loss in zip(STATES, (3.0, 5.0, 2.0, 1e30), strict=True):
        trial = sweep.run("done", loss)
        sweep.trials[trial].report(loss, 1)
        sweep.study.tell(trial, loss if state == TrialState.COMPLETE else None, state)
    for name in (EVIL.replace("/", ""), "ü" * 100):
        write(base / name / "events.out.tfevents.1.h", [scalar("loss", 2**60 + step, 0.5) for step in (1, 2)])
    return sorted(base.iterdir())
