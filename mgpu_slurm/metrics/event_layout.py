"""Find the time, step, tag and value in event records: of many at once, or of a single one with protobuf.

Records with one scalar of the same length and layout form the rows of an array, and their parts are its columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

FLOAT, DOUBLE = 1, 2
"""DT_FLOAT and DT_DOUBLE of TensorBoard's types.proto."""


@dataclass(frozen=True)
class Layout:
    """Positions of the parts of a record with one scalar; None for a part that is 0 and therefore not written."""

    time: int | None
    step: tuple[int, int] | None
    tag: tuple[int, int]
    value: int
    is_double: bool

    def variable(self, length: int) -> NDArray[np.bool_]:
        """Return a mask of the bytes in which records of this layout may differ."""
        found = np.zeros(length, bool)
        value = (self.value, self.value + (8 if self.is_double else 4))
        time = None if self.time is None else (self.time, self.time + 8)
        for part in (time, self.step, self.tag, value):
            if part is not None:
                found[part[0] : part[1]] = True
        return found

    def is_alike(self, rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which records, one per row, have the layout of the first one."""
        fixed = ~self.variable(rows.shape[1])
        alike: NDArray[np.bool_] = (rows[:, fixed] == rows[0, fixed]).all(axis=1)
        if self.step is not None:
            # the highest bit of each byte of a varint tells whether another byte follows
            goes_on = rows[:, slice(*self.step)] & 0x80
            alike &= (goes_on == goes_on[0]).all(axis=1)
        return alike

    def times(self, rows: NDArray[np.uint8]) -> Floats:
        return np.zeros(len(rows)) if self.time is None else _numbers(rows, self.time, "<f8")

    def values(self, rows: NDArray[np.uint8]) -> Floats:
        return _numbers(rows, self.value, "<f8" if self.is_double else "<f4")

    def steps(self, rows: NDArray[np.uint8]) -> Integers:
        steps = np.zeros(len(rows), np.uint64)
        if self.step is not None:
            for place, column in enumerate(range(*self.step)):
                steps |= (rows[:, column] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        return steps.view(np.int64)


def layout_of(record: bytes) -> Layout | None:
    """Return the layout of an event with one scalar; None for any other event, or if the layout is uncertain."""
    try:
        found = _taken_apart(record)
    except (IndexError, KeyError, ValueError):
        return None
    # the result has to agree with protobuf
    read = scalars(parse(record), {})
    if found is None or read is None or len(read) != 1:
        return None
    rows = np.frombuffer(record, np.uint8)[None]
    ((tag, step, value, time),) = read
    floats = [found.times(rows)[0], found.values(rows)[0]]
    same = (record[slice(*found.tag)], found.steps(rows)[0]) == (tag, step)
    return found if same and np.array_equal(floats, [time, value], equal_nan=True) else None


def _numbers(rows: NDArray[np.uint8], start: int, kind: str) -> Floats:
    size = np.dtype(kind).itemsize
    numbers: Floats = np.ascontiguousarray(rows[:, start : start + size]).view(kind)[:, 0].astype(np.float64)
    return numbers


def _taken_apart(record: bytes) -> Layout | None:
    """Return the layout of a record. The field numbers are those of TensorBoard's event, summary and tensor.proto.

    Raises:
        KeyError: A part is missing.
        IndexError, ValueError: The record is not a message of this kind.
    """
    event = _fields(record, 0, len(record))
    summary = _fields(record, *event.pop(5))
    value = _fields(record, *summary.pop(1))
    time, step = event.pop(1, None), event.pop(2, None)
    tag = value.pop(1)
    # metadata of the tag
    value.pop(9, None)
    number, is_double = value.pop(2, None), False
    if number is None:
        number, is_double = _of_tensor(record, *value.pop(8))
    if event or summary or value:
        return None
    return Layout(None if time is None else time[0], step, tag, number[0], is_double)


def _of_tensor(record: bytes, start: int, stop: int) -> tuple[tuple[int, int], bool]:
    """Return the position of a tensor's number, and whether it is a float64."""
    tensor = _fields(record, start, stop)
    kind = record[tensor.pop(1)[0]]
    tensor.pop(2, None)
    number = tensor.pop(4, None) or tensor.pop({FLOAT: 5, DOUBLE: 6}[kind])
    if tensor or number[1] - number[0] != {FLOAT: 4, DOUBLE: 8}[kind]:
        raise ValueError("more than one number")
    return number, kind == DOUBLE


def _fields(record: bytes, start: int, stop: int) -> dict[int, tuple[int, int]]:
    """Return where the content of each field of a protobuf message starts and stops, by field number.

    Raises:
        IndexError, ValueError: It is not a message, or a field occurs twice.
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
    """Return a varint (base 128, lowest digit first) and the position after it."""
    number = shift = 0
    while record[start] & 0x80:
        number |= (record[start] & 0x7F) << shift
        start, shift = start + 1, shift + 7
    return number | record[start] << shift, start + 1


def parse(record: bytes) -> Any:
    """Return the event in a record; None if it is not an event."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        return Event.FromString(record)
    except DecodeError:
        return None


def scalars(event: Any, others: dict[bytes, Any]) -> list[tuple[bytes, int, float, float]] | None:
    """Return tag, step, value and time of an event's scalars; None if there is no event.

    Args:
        others: Receives the tags that belong to another plugin, with that plugin's data.
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
    """Return the number in a tensor; None if it is not a single float."""
    tensor = value.tensor
    if not value.HasField("tensor") or tensor.dtype not in (FLOAT, DOUBLE) or tensor.tensor_shape.dim:
        return None
    if tensor.tensor_content:
        kind = np.dtype("<f4" if tensor.dtype == FLOAT else "<f8")
        whole = len(tensor.tensor_content) == kind.itemsize
        return float(np.frombuffer(tensor.tensor_content, kind)[0]) if whole else None
    numbers = tensor.float_val if tensor.dtype == FLOAT else tensor.double_val
    return float(numbers[0]) if len(numbers) == 1 else None


def hyperparameters(content: bytes) -> dict[str, object]:
    """Return the hyperparameters of an HParams session start; empty for the plugin's other messages."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    try:
        start = HParamsPluginData.FromString(content).session_start_info
    except DecodeError:
        return {}
    return {name: MessageToDict(value) for name, value in start.hparams.items()}
