"""Divide the layers of a model into consecutive stages of similar size."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_slurm.core.errors import UserError


def cut(sizes: Sequence[int], stages: int) -> list[range]:
    """Divide layers into stages such that the largest stage is as small as possible.

    Args:
        sizes: the number of parameters of each layer.

    Raises:
        UserError: there are more stages than layers with parameters.
    """
    with_parameters = sum(size > 0 for size in sizes)
    if stages > with_parameters:
        raise UserError(
            f"run.pipeline: {with_parameters} layers with parameters cannot form {stages} stages: use --pipeline"
            f" {with_parameters} or less, or divide the layers"
        )
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle, stages)) <= stages:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, low, stages)


def _filled(sizes: Sequence[int], limit: int, stages: int) -> list[range]:
    """Fill stages one after the other up to a number of parameters, but leave a layer with parameters for each stage.

    Returns:
        at least `stages` stages, and more if the limit is too low.
    """
    found: list[range] = []
    start = total = 0
    left = sum(size > 0 for size in sizes)
    for index, size in enumerate(sizes):
        # the layers from here on have to fill the stages after this one
        is_needed = size > 0 and left <= stages - len(found) - 1
        if total and size and (total + size > limit or is_needed):
            found.append(range(start, index))
            start, total = index, 0
        total += size
        left -= size > 0
    return [*found, range(start, len(sizes))]
