"""Choose the points of a long curve that a drawing needs."""

from __future__ import annotations

import numpy as np

from mgpu_slurm.metrics.event_layout import Floats, Integers

_EACH = 5
"""Maximum number of points that are kept of an interval."""


def decimated(values: Floats, most: int) -> Integers:
    """Return the indices of at most so many points of a curve, in order, by which it looks as it does with all.

    This is M4 (Jugel et al., M4: A Visualization-Oriented Time Series Data Aggregation, VLDB 2014): of each of many
    equally long intervals the first, last, lowest and highest point are kept, so no peak is lost; and here the first
    NaN, so that a gap remains one.

    Args:
        values: in the order of their steps.
        most: at least 5.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    width = -(-count // (most // _EACH))
    first = np.arange(0, count, width)
    # the last interval is filled up with its last point
    rows = np.append(values, np.full(len(first) * width - count, values[-1])).reshape(-1, width)
    is_nan = np.isnan(rows)
    chosen = [
        first,
        first + width - 1,
        first + np.where(is_nan, np.inf, rows).argmin(axis=1),
        first + np.where(is_nan, -np.inf, rows).argmax(axis=1),
        (first + is_nan.argmax(axis=1))[is_nan.any(axis=1)],
    ]
    return np.unique(np.minimum(np.concatenate(chosen), count - 1))
