"""Reads all points of the scalars in TensorBoard's event files, fast.

Thousands of points written by the same call differ only in a few bytes. So records of the same length are stacked, the
first one is parsed, and time, step and value of all records with its layout are read as columns. Records with another
layout are read one by one with protobuf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_slurm.metrics.event_frames import LONGEST, Records, find_records
from mgpu_slurm.metrics.event_layout import Floats, Integers, Layout, hyperparameters, layout_of, parse, scalars

BATCH_BYTES = 256 * 2**20
"""Size of the files that are read together; the larger, the more records are stacked."""

TRIES = 8
"""Records of one length for which no layout is found before the rest of that length is read one by one."""


@dataclass(frozen=True)
class Points:
    """The points of one tag in one file, in the order in which they were written."""

    steps: Integers
    values: Floats
    times: Floats
    """Seconds since 1970."""
    records: Integers
    """The number of each point's record in the file."""


@dataclass
class EventFile:
    """The scalars of one file."""

    path: Path
    started: float = math.inf
    """Time of its first record, which the writer adds when it opens the file."""
    scalars: dict[str, Points] = field(default_factory=dict)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    """Number and step of each SessionLog.START record: all points before it, from that step on, are void."""
    config: dict[str, object] = field(default_factory=dict)
    """Hyperparameters, if the file has the HParams plugin's session start."""
    damaged: int = 0
    """Places where one or more records could not be read."""

    @property
    def ended(self) -> float:
        """Time of its last point; that of its first record if it has none."""
        return max([float(points.times.max()) for points in self.scalars.values()], default=self.started)


def read_files(paths: Sequence[Path]) -> list[EventFile]:
    """Return the scalars of event files.

    Reads float32 and float64 scalars, stored as `simple_value` or as tensors. Damaged records are skipped and counted;
    an unfinished last record is ignored.

    Raises:
        OSError: A file cannot be read.
    """
    found: list[EventFile] = []
    batch: list[bytes] = []
    for path in paths:
        batch.append(path.read_bytes())
        found.append(EventFile(path))
        if sum(map(len, batch)) >= BATCH_BYTES:
            _read_batch(found[len(found) - len(batch) :], batch)
            batch = []
    if batch:
        _read_batch(found[len(found) - len(batch) :], batch)
    return found


def _read_batch(files: list[EventFile], contents: list[bytes]) -> None:
    found = find_records(contents)
    for file, records in zip(files, found, strict=True):
        file.damaged = records.damaged
    table = _table(contents, found)
    columns = _Columns(files, table)
    for place in _read_side_by_side(table, columns):
        _read_one(files[table.file[place]], table, place, columns)
    columns.hand_out()


@dataclass(frozen=True)
class _Table:
    """All records of some files."""

    data: bytes
    """Concatenated content of the files."""
    file: Integers
    """Index of each record's file."""
    number: Integers
    """Number of each record in its file."""
    start: Integers
    length: Integers

    def record(self, place: int) -> bytes:
        start = int(self.start[place])
        return self.data[start : start + int(self.length[place])]


def _table(contents: list[bytes], found: list[Records]) -> _Table:
    counts = [len(records.starts) for records in found]
    bases = np.cumsum([0, *map(len, contents[:-1])])
    return _Table(
        data=b"".join(contents),
        file=np.repeat(np.arange(len(found)), counts),
        number=_joined([np.arange(count) for count in counts]),
        start=_joined([each.starts + base for each, base in zip(found, bases, strict=True)]),
        length=_joined([each.lengths for each in found]),
    )


def _joined(parts: list[Integers]) -> Integers:
    return np.concatenate(parts)


class _Columns:
    """The points of some files in the order of discovery, before they are sorted."""

    def __init__(self, files: list[EventFile], table: _Table) -> None:
        self._files = files
        self._table = table
        self._tags: dict[bytes, int] = {}
        self._parts: list[tuple[Integers, Integers, Integers, Floats, Floats]] = []
        self._single: list[tuple[int, int, int, float, float]] = []
        self.not_scalars: set[tuple[int, int]] = set()
        """Files and tags whose tensors belong to another plugin, which only the first tensor has to state."""

    def tag(self, name: bytes) -> int:
        return self._tags.setdefault(name, len(self._tags))

    def add(self, places: Integers, tags: Integers, steps: Integers, values: Floats, times: Floats) -> None:
        self._parts.append((places, tags, steps, values, times))
        files = self._table.file[places]
        # few files begin with a point
        for place in np.flatnonzero(self._table.number[places] == 0):
            self._files[files[place]].started = float(times[place])

    def add_one(self, place: int, tag: int, step: int, value: float, time: float) -> None:
        self._single.append((place, tag, step, value, time))

    def hand_out(self) -> None:
        """Assign each file its points by tag, in the order in which they were written."""
        for file in self._files:
            file.restarts.sort()
        if self._single:
            places, tags, steps, values, times = zip(*self._single, strict=True)
            whole = np.asarray([places, tags, steps], np.int64)
            self._parts.append((whole[0], whole[1], whole[2], np.asarray(values), np.asarray(times)))
        if self._parts:
            self._sort(*(np.concatenate(column) for column in zip(*self._parts, strict=True)))

    def _sort(self, places: Integers, tags: Integers, steps: Integers, values: Floats, times: Floats) -> None:
        files = self._table.file[places]
        order = np.lexsort((places, tags, files))
        files, tags = files[order], tags[order]
        starts = np.flatnonzero((np.diff(files, prepend=-1) != 0) | (np.diff(tags, prepend=-1) != 0))
        names = [name.decode(errors="replace") for name in self._tags]
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
            file, tag, chosen = int(files[start]), int(tags[start]), order[start:stop]
            if (file, tag) not in self.not_scalars:
                numbers = self._table.number[places[chosen]]
                self._files[file].scalars[names[tag]] = Points(steps[chosen], values[chosen], times[chosen], numbers)


# -- records with a common layout


def _read_side_by_side(table: _Table, columns: _Columns) -> Iterator[int]:
    """Read the records that share a layout; yield the others."""
    order = np.argsort(table.length, kind="stable")
    lengths, counts = np.unique(table.length, return_counts=True)
    data = np.frombuffer(table.data, np.uint8)
    ends = np.cumsum(counts).tolist()
    for length, count, end in zip(lengths.tolist(), counts.tolist(), ends, strict=True):
        places = order[end - count : end]
        if length > LONGEST or length == 0:
            yield from places.tolist()
            continue
        rows = np.lib.stride_tricks.sliding_window_view(data, length)[table.start[places]]
        yield from _read_rows(rows, places, columns)


def _read_rows(rows: NDArray[np.uint8], places: Integers, columns: _Columns) -> Iterator[int]:
    """Read records of one length, one per row; yield those that have to be read one by one."""
    tries = TRIES
    while len(places):
        layout = layout_of(rows[0].tobytes())
        if layout is None:
            yield int(places[0])
            rows, places, tries = rows[1:], places[1:], tries - 1
            if not tries:
                yield from places.tolist()
                return
            continue
        alike = layout.is_alike(rows)
        if alike.all():
            _take(rows, places, layout, columns)
            return
        _take(rows[alike], places[alike], layout, columns)
        rows, places = rows[~alike], places[~alike]


def _take(rows: NDArray[np.uint8], places: Integers, layout: Layout, columns: _Columns) -> None:
    tags = _tags(rows, layout, columns)
    columns.add(places, tags, layout.steps(rows), layout.values(rows), layout.times(rows))


def _tags(rows: NDArray[np.uint8], layout: Layout, columns: _Columns) -> Integers:
    names = np.ascontiguousarray(rows[:, slice(*layout.tag)])
    if (names == names[0]).all():
        return np.full(len(rows), columns.tag(names[0].tobytes()))
    text, size = names.tobytes(), names.shape[1]
    return np.asarray([columns.tag(text[start : start + size]) for start in range(0, len(text), size)], np.int64)


# -- all other records, one by one


def _read_one(file: EventFile, table: _Table, place: int, columns: _Columns) -> None:
    event = parse(table.record(place))
    if event is None:
        file.damaged += 1
        return
    number, owner = int(table.number[place]), int(table.file[place])
    if number == 0:
        file.started = event.wall_time
    # SessionLog.START
    if event.HasField("session_log") and event.session_log.status == 1:
        file.restarts.append((number, event.step))
    others: dict[bytes, Any] = {}
    for tag, step, value, time in scalars(event, others) or ():
        columns.add_one(place, columns.tag(tag), step, value, time)
    for tag, plugin in others.items():
        columns.not_scalars.add((owner, columns.tag(tag)))
        if plugin.plugin_name == "hparams":
            file.config |= hyperparameters(plugin.content)
