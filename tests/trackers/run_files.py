"""The files of a run that has reported, made without training anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report


def make_run(path: Path, sinks: Sequence[str] = (), **config: Any) -> RunFolder:
    """Return the folder of a run that has started."""
    folder = RunFolder(path)
    folder.create()
    spec = Spec(
        run=path.name,
        target=Target(function="train:train"),
        executor="local",
        resources=Resources(),
        config=config,
        sinks=tuple(sinks),
        project="/home/me/project",
        submitted="2026-11-01T12:00:00.000+00:00",
    )
    spec.write(folder)
    records.record_event(folder, "started", attempt=1)
    records.update_state(folder, run=path.name, state="RUNNING", attempts=1, started="2026-11-01T12:00:01.000+00:00")
    return folder


def report(progress: int, attempt: int = 1, step: int | None = None, **metrics: float) -> Report:
    """Return a report; three steps for each unit of progress, and a loss that tells the attempt."""
    step = 3 * progress if step is None else step
    time = f"2026-11-01T12:{progress:02d}:{attempt:02d}.250+00:00"
    return Report(progress, step, time, attempt, metrics or {"loss": attempt + 1 / 2**progress})


def add(folder: RunFolder, *reports: Report) -> None:
    for each in reports:
        append_jsonl(folder.metrics, asdict(each))


def save(folder: RunFolder, progress: int, number: int = 1) -> None:
    """Add a checkpoint, as far as trackers read it."""
    path = folder.checkpoint(3 * progress, number)
    path.mkdir(parents=True)
    facts = {"step": 3 * progress, "progress": progress}
    (path / "rank-00000.json").write_text(json.dumps({"shared": {"facts": facts}}))
