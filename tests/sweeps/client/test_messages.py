from __future__ import annotations

import json

import numpy as np
import pytest

from mgpu_slurm.rank.communication import codec
from mgpu_slurm.sweeps.client.messages import Assignment, Leave, as_plain, from_plain


@pytest.mark.parametrize(
    "order",
    [
        None,
        Leave(75, "the time limit is near"),
        Assignment(
            3, 2, "study", {"lr": 0.1, "size": 2**70, "layers": [8, {1: None}], "rate": np.float64(1e-3)}, ("a", "b c")
        ),
    ],
)
def test_order_round_trips_through_the_rank_codec(order: Assignment | Leave | None) -> None:
    state, tensors = codec.split(as_plain(order), "order")
    assert not tensors
    assert from_plain(codec.joined(json.loads(json.dumps(state)), {})) == order
