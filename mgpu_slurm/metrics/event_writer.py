"""Writes TensorBoard event files. Imports TensorBoard only when something is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

PREFIX = "events.out.tfevents."
"""Prefix of file names; a time follows. TensorBoard reads the files of a folder in the order of their names and never
returns to an earlier one."""


class EventWriter:
    """Appends to a new event file, which sorts after all existing ones even if the clock was set back."""

    def __init__(self, folder: Path, begins_at: int) -> None:
        """
        Args:
            begins_at: Step of the first point to come. Points of earlier files from that step on are void: they are
                from an attempt that died after its last checkpoint.

        Raises:
            OSError: The file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{PREFIX}{next_stamp(folder):010d}.{os.uname().nodename}.{os.getpid()}"
        self._descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._size = 0
        self._begins_at = begins_at

    def add(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Write one point of each scalar.

        Args:
            at: Seconds since 1970.

        Raises:
            OSError: Nothing was written; the call may be repeated.
        """
        events = [scalar_event(step, name, value, at) for name, value in values.items()]
        if not self._size:
            events = [*_first_events(self._begins_at, at), *events]
        self._append(encoded(events))

    def _append(self, data: bytes) -> None:
        place = 0
        try:
            while place < len(data):
                place += os.write(self._descriptor, data[place:])
        except OSError:
            # a partial record would hide everything after it
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._descriptor)


def _first_events(begins_at: int, at: float) -> list[Event]:
    """Return the version event and a SessionLog.START. TensorBoard takes the first such event for the run's start."""
    from tensorboard.compat.proto.event_pb2 import SessionLog

    return [first_event(at), _event(at, begins_at, session_log=SessionLog(status=SessionLog.START))]


def first_event(at: float) -> Event:
    return _event(at, file_version="brain.Event:2")


def scalar_event(step: int, name: str, value: float, at: float) -> Event:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return _event(at, step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))


def _event(at: float, step: int = 0, **what: Any) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=at, step=step, **what)


def encoded(events: Iterable[Event]) -> bytes:
    """Return the bytes of these events in a file."""
    from mgpu_slurm.metrics.event_frames import framed

    return b"".join(framed(event.SerializeToString()) for event in events)


def names(folder: Path) -> list[str]:
    """Return the names of the event files in a folder."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def next_stamp(folder: Path) -> int:
    """Return the time for a new file's name: now, or just after that of the newest file."""
    stamps = [name.removeprefix(PREFIX).partition(".")[0] for name in names(folder)]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])
