"""A decimated curve keeps what one sees: its ends, its peaks and its gaps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from mgpu_slurm.reports.aggregation.decimation import decimated

VALUES = some.lists(some.floats(width=32), min_size=1, max_size=300)


@given(VALUES, some.integers(5, 120))
def test_keeps_the_ends_the_extremes_and_a_gap(values: list[float], most: int) -> None:
    curve = np.asarray(values)
    kept = decimated(curve, most)
    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(curve) - 1)
    if not np.isnan(curve).all():
        assert np.nanmin(curve[kept]) == np.nanmin(curve)
        assert np.nanmax(curve[kept]) == np.nanmax(curve)
    assert np.isnan(curve[kept]).any() == np.isnan(curve).any()


def test_every_peak_of_its_own_interval_is_kept() -> None:
    curve = np.zeros(100_000)
    peaks = np.arange(500, 100_000, 1000)
    curve[peaks] = 1 + np.arange(len(peaks))
    assert set(peaks) <= set(decimated(curve, 1000).tolist())


def test_short_curve_is_kept_whole() -> None:
    assert decimated(np.arange(7.0), 7).tolist() == list(range(7))
