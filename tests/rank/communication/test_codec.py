"""Any state that training libraries keep comes back equal through JSON and named tensors, and nothing else goes in."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.communication.codec import joined, split


def through_json(state: Any) -> Any:
    plain, tensors = split(state, "s")
    return joined(json.loads(json.dumps(plain)), tensors)


KEYS = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.none()
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


@given(STATES)
def test_round_trip(state: Any) -> None:
    # NaN is not equal to itself, and -0.0 is to 0.0: the texts tell them apart
    assert repr(through_json(state)) == repr(state)


@pytest.mark.parametrize(
    "state",
    [
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({3: 2, 5: 1}),
        {3, 1},
        frozenset({2}),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        {"!": 1, "of": {"!": "tuple", "of": []}},
        np.float32(0.1),
        random.getstate(),
    ],
    ids=lambda state: type(state).__name__,
)
def test_round_trip_keeps_types(state: Any) -> None:
    found = through_json(state)
    assert type(found) is type(state)
    assert found == state


def test_defaultdict_becomes_a_dict() -> None:
    found = through_json(defaultdict(list, {"a": [1]}))
    assert type(found) is dict
    assert found == {"a": [1]}


@pytest.mark.parametrize("values", [np.arange(6, dtype=np.uint8).reshape(2, 3), np.array(1.5), np.array([True])])
def test_arrays_keep_dtype_and_shape(values: Any) -> None:
    found = through_json([values])[0]
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert (found == values).all()


def test_training_continues_exactly_after_a_round_trip() -> None:
    def made() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return [
            model,
            optimizer,
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            torch.amp.GradScaler("cpu"),
        ]

    def train(parts: list[Any], steps: int) -> list[float]:
        model, optimizer, scheduler, plateau, scaler = parts
        losses = []
        for _ in range(steps):
            loss = model(torch.linspace(0, 1, 20).reshape(5, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            plateau.step(loss.item())
            losses.append(loss.item())
        return losses

    undisturbed = train(made(), 6)
    first = made()
    losses = train(first, 3)
    second = made()
    for part, before in zip(second, first, strict=True):
        part.load_state_dict(through_json(before.state_dict()))
    assert losses + train(second, 3) == undisturbed
    assert math.isfinite(undisturbed[-1])


def test_tensors_with_colliding_names_are_kept_apart() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    found = through_json(state)
    assert [found["a.b"].item(), found["a"]["b"].item(), found[1].item(), found["1"].item()] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", [object(), lambda: None, np.array(["text"]), np.array([object()])])
def test_unsupported_value_is_rejected_with_its_path(value: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.layers\.1 is of type .* convert it to these$"):
        split({"layers": [1, value]}, "model")
