"""TensorBoard's event files, as they are written here. Needs TensorBoard only once something is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

PREFIX = "events.out.tfevents."
"""Of their names; a time follows, and TensorBoard reads the files of a folder in the order of their names. It never
returns to an earlier one."""


class EventWriter:
    """Appends to a new event file, which is read after all that are there, also where a clock was set back since."""

    def __init__(self, folder: Path, begins_at: int) -> None:
        """
        Args:
            begins_at: the step of the first point that is to come. What earlier files have of that step and of later
                ones is void: an attempt that died after its last checkpoint left it behind.

        Raises:
            OSError: there is no such file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{PREFIX}{next_stamp(folder):010d}.{os.uname().nodename}.{os.getpid()}"
        self._descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._size = 0
        self._begins_at = begins_at

    def add(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Writes one point of each scalar.

        Args:
            at: seconds since 1970.

        Raises:
            OSError: nothing of it is written, and it may be tried again.
        """
        events = [_scalar(step, name, value, at) for name, value in values.items()]
        if not self._size:
            events = [*_first_events(self._begins_at, at), *events]
        self._append(encoded(events))

    def _append(self, data: bytes) -> None:
        place = 0
        try:
            while place < len(data):
                place += os.write(self._descriptor, data[place:])
        except OSError:
            # a part of a record would hide all that comes after it
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._descriptor)


def _first_events(begins_at: int, at: float) -> list[Event]:
    """The version, and that this is a start: of a run's restarts TensorBoard takes the first that says so for its
    beginning."""
    from tensorboard.compat.proto.event_pb2 import SessionLog

    return [first_event(at), _event(at, begins_at, session_log=SessionLog(status=SessionLog.START))]


def first_event(at: float) -> Event:
    return _event(at, file_version="brain.Event:2")


def _scalar(step: int, name: str, value: float, at: float) -> Event:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return _event(at, step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))


def _event(at: float, step: int = 0, **what: Any) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=at, step=step, **what)


def encoded(events: Iterable[Event]) -> bytes:
    """As they stand in a file."""
    from mgpu_slurm.metrics.event_frames import framed

    return b"".join(framed(event.SerializeToString()) for event in events)


def names(folder: Path) -> list[str]:
    """Of the event files in a folder."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def next_stamp(folder: Path) -> int:
    """The time to be in a new file's name: now, or behind that of the newest one."""
    stamps = [name.removeprefix(PREFIX).partition(".")[0] for name in names(folder)]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])
