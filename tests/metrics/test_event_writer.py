"""Event files as they are written, read by TensorBoard itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mgpu_slurm.metrics import event_writer
from mgpu_slurm.metrics.event_writer import EventWriter


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard shows them."""
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return {name: [(event.step, event.value) for event in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


def write(folder: Path, begins_at: int, *steps: int, value: float = 1.0) -> EventWriter:
    writer = EventWriter(folder, begins_at)
    for step in steps:
        writer.add(step, {"loss": value, "a/b": value + step}, at=1e9 + step)
    return writer


def test_tensorboard_reads_the_written_values_and_times(tmp_path: Path) -> None:
    write(tmp_path / "new", 0, 1, 2)
    assert points(tmp_path / "new") == {"loss": [(1, 1.0), (2, 1.0)], "a/b": [(1, 2.0), (2, 3.0)]}
    shown = EventAccumulator(str(tmp_path / "new"))
    shown.Reload()
    assert [event.wall_time for event in shown.Scalars("loss")] == [1e9 + 1, 1e9 + 2]


@pytest.mark.parametrize("now", [2e9, 1e9], ids=["later", "clock set back"])
def test_later_writer_replaces_points_from_its_first_step(
    tmp_path: Path, now: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5e9)
    write(tmp_path, 0, 1, 2, 3)
    monkeypatch.setattr(time, "time", lambda: now)
    write(tmp_path, 2, 2, 3, 4, value=5.0)
    assert points(tmp_path)["loss"] == [(1, 1.0), (2, 5.0), (3, 5.0), (4, 5.0)]


def test_writers_started_in_the_same_second_use_separate_files(tmp_path: Path) -> None:
    for begins_at in range(3):
        write(tmp_path, begins_at, begins_at)
    assert len(event_writer.names(tmp_path)) == 3
    assert points(tmp_path)["loss"] == [(0, 1.0), (1, 1.0), (2, 1.0)]


def test_partial_write_to_a_full_disk_is_undone_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the file size: the system writes as much as fits, and then fails."""
    import resource
    import signal

    writer = write(tmp_path, 0, 1)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.add(2, {"loss": 1.0}, at=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.stat().st_size == size
    writer.add(2, {"loss": 1.0}, at=1.0)
    assert points(tmp_path)["loss"] == [(1, 1.0), (2, 1.0)]
