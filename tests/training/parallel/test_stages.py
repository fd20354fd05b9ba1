from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.training.parallel.stages import cut


def smallest_largest(sizes: Sequence[int], stages: int) -> int:
    """Return the size of the largest stage of the best division, by trying all."""
    best = sum(sizes)
    for cuts in itertools.combinations(range(1, len(sizes)), stages - 1):
        edges = [0, *cuts, len(sizes)]
        sums = [sum(sizes[low:high]) for low, high in itertools.pairwise(edges)]
        if all(sums):
            best = min(best, max(sums))
    return best


def test_largest_stage_is_as_small_as_possible() -> None:
    numbers = random.Random(0)
    for _ in range(1000):
        sizes = [numbers.choice([0, 0, 1, 2, 3, 10, 50]) for _ in range(numbers.randint(1, 8))]
        with_parameters = sum(size > 0 for size in sizes)
        if not with_parameters:
            continue
        stages = numbers.randint(1, with_parameters)
        found = cut(sizes, stages)
        assert [index for part in found for index in part] == list(range(len(sizes)))
        sums = [sum(sizes[index] for index in part) for part in found]
        assert len(sums) == stages
        assert all(sums), (sizes, found)
        assert max(sums) == smallest_largest(sizes, stages), (sizes, found)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"^run\.pipeline: 2 layers with parameters cannot form 3 stages: use --pipe"):
        cut([5, 0, 5], 3)
