"""Reads single TensorBoard event messages with protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT, DOUBLE = 1, 2
"""DT_FLOAT and DT_DOUBLE of TensorBoard's types.proto."""


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
