"""Reads the scalars of TensorBoard's event files: every point, and fast.

Thousands of points that one call wrote differ in a few bytes only. So records of one length are laid side by side, the
first of them is taken apart once, and from those that are built like it time, step and value are taken as columns.
What is built otherwise is read one by one by protobuf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_slurm.metrics.event_frames import Records, find_records

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

BATCH_BYTES = 256 * 2**20
"""Files that are looked at together; the larger, the more records there are side by side."""

LONGEST = 512
"""Bytes of a record; a longer one is no plain scalar."""

TRIES = 8
"""Records of one length that are taken apart in vain before the rest of that length is read one by one."""

_FLOAT, _DOUBLE = 1, 2
"""Of tensorboard's types.proto: DT_FLOAT and DT_DOUBLE."""


@dataclass(frozen=True)
class Points:
    """What one file says of one tag, in the order in which it was written."""

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
    """The time of its first record, which its writer makes when it opens the file."""
    scalars: dict[str, Points] = field(default_factory=dict)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    """Records, by their number, before which all from a step on is void (SessionLog.START), and that step."""
    config: dict[str, Any] = field(default_factory=dict)
    """Hyperparameters, where the HParams plugin's session start is in the file."""
    damaged: int = 0
    """Places where one or more records could not be read."""


def read_files(paths: Sequence[Path]) -> list[EventFile]:
    """The scalars of event files.

    Float32 and float64 scalars are read, as `simple_value` and as tensors. A damaged record is skipped and counted, and
    one that a writer has not finished is left out.

    Raises:
        OSError: a file cannot be read.
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
    found = [find_records(data) for data in contents]
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
    """Of the files, one behind the other."""
    file: Integers
    """The place of each record's file among them."""
    number: Integers
    """The number of each record in its file."""
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
        start=_joined([np.asarray(each.starts, np.int64) + base for each, base in zip(found, bases, strict=True)]),
        length=_joined([np.asarray(each.lengths, np.int64) for each in found]),
    )


def _joined(parts: list[Integers]) -> Integers:
    return np.concatenate(parts)


class _Columns:
    """The points of some files, in the order in which they are found, until they are sorted."""

    def __init__(self, files: list[EventFile], table: _Table) -> None:
        self._files = files
        self._table = table
        self._tags: dict[bytes, int] = {}
        self._parts: list[tuple[Integers, Integers, Integers, Floats, Floats]] = []
        self._single: list[tuple[int, int, int, float, float]] = []
        self.not_scalars: set[tuple[int, int]] = set()
        """Files and tags whose tensors belong to another plugin, as only the first of them has to say."""

    def tag(self, name: bytes) -> int:
        return self._tags.setdefault(name, len(self._tags))

    def add(self, places: Integers, tags: Integers, steps: Integers, values: Floats, times: Floats) -> None:
        self._parts.append((places, tags, steps, values, times))
        files = self._table.file[places]
        # of the first records of files only few are points
        for place in np.flatnonzero(self._table.number[places] == 0):
            self._files[files[place]].started = float(times[place])

    def add_one(self, place: int, tag: int, step: int, value: float, time: float) -> None:
        self._single.append((place, tag, step, value, time))

    def hand_out(self) -> None:
        """Gives each file its points, tag by tag, in the order in which they were written."""
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


# -- records that are built alike


@dataclass(frozen=True)
class _Layout:
    """Where in a record with one scalar its parts are; None for what is 0 and therefore not written."""

    time: int | None
    step: tuple[int, int] | None
    tag: tuple[int, int]
    value: int
    is_double: bool

    def variable(self, length: int) -> NDArray[np.bool_]:
        """The bytes in which records that are built alike differ."""
        found = np.zeros(length, bool)
        value = (self.value, self.value + (8 if self.is_double else 4))
        time = None if self.time is None else (self.time, self.time + 8)
        for part in (time, self.step, self.tag, value):
            if part is not None:
                found[part[0] : part[1]] = True
        return found


def _read_side_by_side(table: _Table, columns: _Columns) -> Iterator[int]:
    """Reads what is built alike; yields the records that are not."""
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
    """Reads records of one length, a row each; yields those that are to be read one by one."""
    tries = TRIES
    while len(places):
        layout = _layout(rows[0].tobytes())
        if layout is None:
            yield int(places[0])
            rows, places, tries = rows[1:], places[1:], tries - 1
            if not tries:
                yield from places.tolist()
                return
            continue
        alike = _is_alike(rows, layout)
        if alike.all():
            _take(rows, places, layout, columns)
            return
        _take(rows[alike], places[alike], layout, columns)
        rows, places = rows[~alike], places[~alike]


def _is_alike(rows: NDArray[np.uint8], layout: _Layout) -> NDArray[np.bool_]:
    """Which rows are built like the first one."""
    fixed = ~layout.variable(rows.shape[1])
    alike: NDArray[np.bool_] = (rows[:, fixed] == rows[0, fixed]).all(axis=1)
    if layout.step is not None:
        # the bytes of a number in base 128 go on where the highest bit is set
        goes_on = rows[:, slice(*layout.step)] & 0x80
        alike &= (goes_on == goes_on[0]).all(axis=1)
    return alike


def _take(rows: NDArray[np.uint8], places: Integers, layout: _Layout, columns: _Columns) -> None:
    values = _numbers(rows, layout.value, "<f8" if layout.is_double else "<f4")
    times = np.zeros(len(rows)) if layout.time is None else _numbers(rows, layout.time, "<f8")
    columns.add(places, _tags(rows, layout, columns), _steps(rows, layout), values, times)


def _numbers(rows: NDArray[np.uint8], start: int, kind: str) -> Floats:
    size = np.dtype(kind).itemsize
    numbers: Floats = np.ascontiguousarray(rows[:, start : start + size]).view(kind)[:, 0].astype(np.float64)
    return numbers


def _steps(rows: NDArray[np.uint8], layout: _Layout) -> Integers:
    steps = np.zeros(len(rows), np.uint64)
    if layout.step is not None:
        for place, column in enumerate(range(*layout.step)):
            steps |= (rows[:, column] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return steps.view(np.int64)


def _tags(rows: NDArray[np.uint8], layout: _Layout, columns: _Columns) -> Integers:
    names = np.ascontiguousarray(rows[:, slice(*layout.tag)])
    if (names == names[0]).all():
        return np.full(len(rows), columns.tag(names[0].tobytes()))
    text, size = names.tobytes(), names.shape[1]
    return np.asarray([columns.tag(text[start : start + size]) for start in range(0, len(text), size)], np.int64)


def _layout(record: bytes) -> _Layout | None:
    """The layout of an event with one scalar; None for any other, and for what is not sure to be read right."""
    try:
        found = _taken_apart(record)
    except (IndexError, KeyError, ValueError):
        return None
    # protobuf has the last word on what a record says
    read = _points(_event(record), {})
    if found is None or read is None or len(read) != 1:
        return None
    rows = np.frombuffer(record, np.uint8)[None]
    ((tag, step, value, time),) = read
    times = 0.0 if found.time is None else _numbers(rows, found.time, "<f8")[0]
    values = _numbers(rows, found.value, "<f8" if found.is_double else "<f4")[0]
    same = (record[slice(*found.tag)], _steps(rows, found)[0]) == (tag, step)
    return found if same and np.array_equal([times, values], [time, value], equal_nan=True) else None


def _taken_apart(record: bytes) -> _Layout | None:
    """See event.proto, summary.proto and tensor.proto of tensorboard for the numbers.

    Raises:
        KeyError: a part is not there.
        IndexError, ValueError: it is no message of this kind.
    """
    event = _fields(record, 0, len(record))
    summary = _fields(record, *event.pop(5))
    value = _fields(record, *summary.pop(1))
    time, step = event.pop(1, None), event.pop(2, None)
    tag = value.pop(1)
    # what belongs to a tag as a whole
    value.pop(9, None)
    number, is_double = value.pop(2, None), False
    if number is None:
        number, is_double = _of_tensor(record, *value.pop(8))
    if event or summary or value:
        return None
    return _Layout(None if time is None else time[0], step, tag, number[0], is_double)


def _of_tensor(record: bytes, start: int, stop: int) -> tuple[tuple[int, int], bool]:
    """Where the number of a tensor is, and whether it is a float64."""
    tensor = _fields(record, start, stop)
    kind = record[tensor.pop(1)[0]]
    tensor.pop(2, None)
    number = tensor.pop(4, None) or tensor.pop({_FLOAT: 5, _DOUBLE: 6}[kind])
    if tensor or number[1] - number[0] != {_FLOAT: 4, _DOUBLE: 8}[kind]:
        raise ValueError("more than one number")
    return number, kind == _DOUBLE


def _fields(record: bytes, start: int, stop: int) -> dict[int, tuple[int, int]]:
    """The fields of a protobuf message, by number: where the content of each starts and stops.

    Raises:
        IndexError, ValueError: it is no message, or a field is there twice.
    """
    found: dict[int, tuple[int, int]] = {}
    while start < stop:
        key, start = _varint(record, start)
        number, kind = key >> 3, key & 7
        if kind == 2:
            size, start = _varint(record, start)
        else:
            size = _varint(record, start)[1] - start if kind == 0 else {1: 8, 5: 4}.get(kind, stop)
        if number in found or start + size > stop:
            raise ValueError(f"field {number}")
        found[number] = (start, start + size)
        start += size
    return found


def _varint(record: bytes, start: int) -> tuple[int, int]:
    """A number in base 128, lowest digit first, and where the next thing starts."""
    number = shift = 0
    while record[start] & 0x80:
        number |= (record[start] & 0x7F) << shift
        start, shift = start + 1, shift + 7
    return number | record[start] << shift, start + 1


# -- all other records, one by one


def _read_one(file: EventFile, table: _Table, place: int, columns: _Columns) -> None:
    event = _event(table.record(place))
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
    for tag, step, value, time in _points(event, others) or ():
        columns.add_one(place, columns.tag(tag), step, value, time)
    for tag, plugin in others.items():
        columns.not_scalars.add((owner, columns.tag(tag)))
        if plugin.plugin_name == "hparams":
            file.config |= _hyperparameters(plugin.content)


def _event(record: bytes) -> Any:
    """None where it is no event."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        return Event.FromString(record)
    except DecodeError:
        return None


def _points(event: Any, others: dict[bytes, Any]) -> list[tuple[bytes, int, float, float]] | None:
    """Tag, step, value and time of an event's scalars; None where there is anything else in it.

    Args:
        others: gets the tags that belong to another plugin, with what that says of them.
    """
    if event is None:
        return None
    found = []
    for value in event.summary.value:
        tag = (value.tag or value.node_name).encode()
        plugin = value.metadata.plugin_data
        if plugin.plugin_name not in ("", "scalars") and not value.HasField("simple_value"):
            others[tag] = plugin
            continue
        number = value.simple_value if value.HasField("simple_value") else _number(value)
        if number is not None:
            found.append((tag, event.step, number, event.wall_time))
    return found


def _number(value: Any) -> float | None:
    """The number of a tensor that is one."""
    tensor = value.tensor
    if not value.HasField("tensor") or tensor.dtype not in (_FLOAT, _DOUBLE) or tensor.tensor_shape.dim:
        return None
    if tensor.tensor_content:
        kind = np.dtype("<f4" if tensor.dtype == _FLOAT else "<f8")
        whole = len(tensor.tensor_content) == kind.itemsize
        return float(np.frombuffer(tensor.tensor_content, kind)[0]) if whole else None
    numbers = tensor.float_val if tensor.dtype == _FLOAT else tensor.double_val
    return float(numbers[0]) if len(numbers) == 1 else None


def _hyperparameters(content: bytes) -> dict[str, Any]:
    """Of a session start that the HParams plugin wrote; none for its other messages."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    try:
        start = HParamsPluginData.FromString(content).session_start_info
    except DecodeError:
        return {}
    return {name: MessageToDict(value) for name, value in start.hparams.items()}
