"""Runs and event files for tests: written by hand, and read by TensorBoard's own reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util import tensor_util

from mgpu_slurm.metrics.event_frames import framed

Point = tuple[int, bytes, float]
"""Step, value bit by bit, and time."""


def scalar(tag: str, step: int, value: float, time: float = 0.0) -> Event:
    return Event(wall_time=time, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def opened(time: float) -> Event:
    """What every writer writes first."""
    return Event(wall_time=time, file_version="brain.Event:2")


def restarted(step: int) -> Event:
    return Event(step=step, session_log=SessionLog(status=SessionLog.START))


def write(path: Path, events: Iterable[Event]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(framed(event.SerializeToString()) for event in events))
    return path


def bits(value: float) -> bytes:
    """NaN is equal to itself in these."""
    return struct.pack("<d", value)


def read_by_tensorboard(path: Path) -> dict[str, list[Point]]:
    """All scalars, as TensorBoard reads them; those in tensors too."""
    everything = {"scalars": 0, "tensors": 0}
    reader = EventAccumulator(str(path), size_guidance=everything, purge_orphaned_data=False).Reload()
    found = {}
    for tag in reader.Tags()["scalars"]:
        found[tag] = [(point.step, bits(point.value), point.wall_time) for point in reader.Scalars(tag)]
    plugins = {tag: metadata.plugin_data.plugin_name for tag, metadata in reader.summary_metadata.items()}
    for tag in reader.Tags()["tensors"]:
        if plugins.get(tag, "") in ("", "scalars"):
            numbers = [(point, tensor_util.make_ndarray(point.tensor_proto)) for point in reader.Tensors(tag)]
            found[tag] = [(p.step, bits(float(number)), p.wall_time) for p, number in numbers if number.shape == ()]
    return {tag: points for tag, points in found.items() if points}


def ended_run(folder: Path, tasks: int | None = None, **spec: Any) -> Path:
    """The folder of a local run that has ended, or of a group of as many."""
    folder.mkdir(parents=True)
    run = folder.name
    whole = {"run": run, "executor": "local", "resources": {}, "target": {"function": "train:train"}, "tasks": tasks}
    (folder / "spec.yaml").write_text(
        json.dumps({key: value for key, value in (whole | spec).items() if value is not None})
    )
    state = {"run": run, "state": "COMPLETED", "executor": "local", "submitted": "2026-01-01T00:00:00+00:00"}
    (folder / "state.json").write_text(json.dumps(state | {"tasks": tasks}))
    return folder
