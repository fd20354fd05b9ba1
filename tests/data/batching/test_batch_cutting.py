"""Batches of any make, cut between samples or refused by their type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batching.batch_cutting import Cutter
from tests.data.batching.test_nests import ROW, ROWS, BatchEncoding, Example, Graph, Pair

IMAGES = [torch.full((3, 4 + i, 5), float(i)) for i in range(ROWS)]
BOXES = [torch.full((1 + i % 4, 4), float(i)) for i in range(ROWS)]


def pieces(batch: Any, parts: int = 2, rows: int | None = None) -> list[Any]:
    cutter = Cutter()
    return [piece for piece, _ in cutter.split(batch, cutter.rows(batch, rows), parts)]


def equal(one: Any, other: Any) -> bool:
    return str(one) == str(other) and type(one) is type(other)


TEXTS = list("abcdef")


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        ([ROW, ROW], [ROW[:3], ROW[:3]]),
        (Pair(ROW, ROW), Pair(ROW[:3], ROW[:3])),
        # images and boxes of a detector: a list has an entry for each image
        (IMAGES, IMAGES[:3]),
        ((IMAGES, BOXES), (IMAGES[:3], BOXES[:3])),
        ([ROW, [{"boxes": each} for each in BOXES]], [ROW[:3], [{"boxes": each} for each in BOXES[:3]]]),
        ({"text": TEXTS, "label": ROW}, {"text": TEXTS[:3], "label": ROW[:3]}),
        (TEXTS, TEXTS[:3]),
        ({"x": ROW, "heat": torch.tensor(0.5), "mode": "a"}, {"x": ROW[:3], "heat": torch.tensor(0.5), "mode": "a"}),
        (BatchEncoding({"ids": ROW}, "fast"), BatchEncoding({"ids": ROW[:3]}, "fast")),
        (Example(ROW, TEXTS), Example(ROW[:3], TEXTS[:3])),
        ((ROW.numpy(), ROW), (ROW.numpy()[:3], ROW[:3])),
        ((ROW, (224, 224)), (ROW[:3], (224, 224))),
        # as `zip(*samples)` makes them
        (((torch.ones(3, 5, 5),) * ROWS, tuple(range(ROWS))), ((torch.ones(3, 5, 5),) * 3, (0, 1, 2))),
        # of as many fields as samples
        ([ROW] * ROWS, [ROW[:3]] * ROWS),
    ],
)  # fmt: skip
def test_batch_is_split_between_samples(batch: Any, first: Any) -> None:
    one, other = pieces(batch)
    assert equal(one, first)
    assert not equal(other, first)


def test_three_colour_images_are_distinguished_from_three_fields() -> None:
    three = IMAGES[:3]
    # by the size that the loader knows, by what else is in the batch, and by batches before
    assert len(pieces([torch.ones(3, 5, 5)] * 8, rows=8)[0]) == 4
    images, targets = pieces((three, [{"boxes": each} for each in BOXES[:3]]), parts=3)[0]
    assert equal(images, three[:1])
    assert len(targets) == 1
    with pytest.raises(UserError, match=r"3 entries with 3 rows each, which may be samples or fields"):
        pieces(three, parts=3, rows=3)
    cutter = Cutter()
    assert cutter.rows(IMAGES, ROWS) == ROWS
    assert equal(cutter.cut(three, 3, 0, 1), three[:1])
    # fields that are no images
    assert len(pieces([torch.ones(3, 5)] * 3, parts=3, rows=3)[0]) == 3
    cutter = Cutter()
    assert cutter.rows((ROW, BOXES)) == ROWS
    ambiguous = (ROW[:2], [torch.ones(2, 4)] * 2)
    assert len(cutter.cut(ambiguous, 2, 0, 1)[1]) == 1
    with pytest.raises(UserError, match=r"2 entries with 2 rows each.*: stack the samples, or give the fields by name"):
        pieces(ambiguous)


PAIRS = [(torch.full((3, 5, 5), float(i)), i) for i in range(ROWS)]
DICTS = [{"ids": torch.full((3,), i), "label": torch.tensor(i)} for i in range(ROWS)]


@pytest.mark.parametrize("batch", [PAIRS, DICTS], ids=["pairs", "dicts"])
def test_list_of_samples_is_split_or_rejected_if_ambiguous(batch: list[Any]) -> None:
    assert equal(pieces(batch, rows=ROWS)[0], batch[:3])
    # nobody says how many samples there are, or there are as many as each of them has rows
    for samples, expected in ((batch, None), (batch[:3], None), (batch[:3], 3)):
        with pytest.raises(UserError, match=r"a list in it has [36] .* may be samples or fields: stack the samples"):
            pieces(samples, rows=expected)
    cutter = Cutter()
    assert cutter.rows(batch, ROWS) == ROWS
    assert equal(cutter.cut(batch[:3], 3, 0, 1), batch[:1])


def test_list_of_dicts_of_fields_is_split_within_each_dict() -> None:
    assert equal(pieces([{"x": ROW}])[0], [{"x": ROW[:3]}])
    views = [{"x": ROW}, {"x": ROW}]
    assert equal(pieces(views, rows=ROWS)[0], [{"x": ROW[:3]}] * 2)
    # no samples: they are not alike
    assert equal(pieces([{"x": ROW}, {"y": ROW}])[0], [{"x": ROW[:3]}, {"y": ROW[:3]}])


def test_rank_with_fewer_samples_makes_the_same_number_of_parts() -> None:
    cutter = Cutter()
    parts = cutter.split((ROW[:2], TEXTS[:2]), 2, 3)
    assert [weight for _, weight in parts] == [0.0, 0.5, 0.5]
    assert [len(rows) for (rows, _), _ in parts] == [len(texts) for (_, texts), _ in parts] == [1, 1, 1]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((ROW, Graph(ROW)), "Graph is not a tensor, array, tuple"),
        ((ROW, pack_sequence([ROW])), "PackedSequence is not a tensor"),
        ((ROW, torch.ones(4)), r"tuple cannot be split between samples: Tensor of shape \[6\] in a batch of 4 samples"),
        ({"scale": torch.tensor(1.0), "name": "a"}, "dict cannot .*: nothing in it has an entry for each sample"),
        (np.ones(()), "ndarray cannot be split"),
        (torch.eye(ROWS).to_sparse(), "a sparse tensor has no rows to cut: make it dense"),
        ((torch.eye(ROWS).to_sparse(), ROW), "a sparse tensor has no rows to cut"),
        (torch.nested.nested_tensor([ROW, ROW[:3]], layout=torch.jagged), "a nested tensor has no rows to cut"),
    ],
)
def test_batch_that_cannot_be_split_is_named_in_the_error(batch: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        pieces(batch)
