"""Batches of any make, moved to the device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from mgpu_slurm.data.batching.nests import leaves_of, to_device

ROWS = 6
DEVICE = torch.device("meta")
"""One that no tensor is on by itself."""


class BatchEncoding(UserDict):  # type: ignore[type-arg]
    """Hugging Face's, as far as its shape goes."""

    def __init__(self, data: Any, encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


@dataclasses.dataclass(frozen=True)
class Example:
    images: torch.Tensor
    names: list[str]
    scale: float = 1.0
    count: int = dataclasses.field(default=0, init=False)


class Graph:
    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class MovesItself(Graph):
    def to(self, device: torch.device) -> None:  # type: ignore[override]
        self.nodes = self.nodes.to(device)


Pair = namedtuple("Pair", ["images", "labels"])

ROW = torch.arange(ROWS)


def all_tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, PackedSequence):
        # the sizes stay where they are
        return [batch.data]
    return [batch.nodes] if isinstance(batch, Graph) else leaves_of(batch)


@pytest.mark.parametrize(
    "batch",
    [
        ROW,
        [ROW, (ROW, {"a": ROW})],
        Pair(ROW, ROW),
        OrderedDict(a=ROW),
        defaultdict(list, a=ROW),
        BatchEncoding({"ids": ROW, "mask": ROW}, "fast"),
        MappingProxyType({"a": ROW}),
        Example(ROW, ["a"] * ROWS),
        Graph(ROW),
        pack_sequence([ROW, ROW[:3]]),
        torch.max(ROW.reshape(2, 3), dim=1),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_to_device_moves_every_tensor_and_keeps_the_container_type(batch: Any) -> None:
    moved = to_device(batch, DEVICE)
    assert type(moved) is type(batch)
    assert {tensor.device for tensor in all_tensors(moved)} == {DEVICE}


def test_object_that_moves_in_place_is_returned() -> None:
    batch = MovesItself(ROW)
    assert to_device([batch], DEVICE) == [batch]
    assert batch.nodes.device == DEVICE


def test_to_device_keeps_everything_else_in_a_container() -> None:
    assert to_device(BatchEncoding({"ids": ROW}, "fast"), DEVICE).encodings == "fast"
    assert to_device(defaultdict(list, a=ROW), DEVICE).default_factory is list
    moved = to_device(Example(ROW, ["a"], 3.0), DEVICE)
    assert (moved.names, moved.scale) == (["a"], 3.0)
    assert to_device(["a", None, 3], DEVICE) == ["a", None, 3]
