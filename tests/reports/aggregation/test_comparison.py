"""Two groups are compared by runs with the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.reports.aggregation.comparison import compare
from mgpu_slurm.run_folder.layout import RunFolder
from tests.metrics.event_files import ended_run

NOISE = np.random.default_rng(7).normal(size=(8, 2))


def made(folder: Path, lr: float, shift: float, seeds: range, last: int = 2) -> str:
    """Runs of some seeds; those of a seed have noise in common."""
    for seed in seeds:
        path = ended_run(folder / str(seed), config={"lr": lr, "seed": seed})
        reporter = Reporter(RunFolder(path), attempt=1)
        for step in range(1, last + 1):
            value = 10 * NOISE[seed, 0] + shift + 0.1 * NOISE[seed, 1] * shift + step
            reporter.report(step, step, {"loss": value, "accuracy": -value})
        reporter.close(0)
    return str(folder)


def test_pairs_by_seed_and_takes_the_last_common_step(tmp_path: Path) -> None:
    words = [made(tmp_path / "a", 0.1, 1.0, range(6)), made(tmp_path / "b", 0.5, 2.0, range(1, 8), last=5)]
    found = compare(words)
    loss, accuracy = found.differences
    a = np.asarray([10 * NOISE[seed, 0] + 1.0 + 0.1 * NOISE[seed, 1] + 2 for seed in range(1, 6)])
    b = np.asarray([10 * NOISE[seed, 0] + 2.0 + 0.2 * NOISE[seed, 1] + 2 for seed in range(1, 6)])
    expected = ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    assert (loss.step, loss.pairs) == (2, 5)
    assert (loss.a, loss.b, loss.difference) == pytest.approx((a.mean(), b.mean(), (a - b).mean()))
    assert (loss.low, loss.high) == pytest.approx((interval.low, interval.high))
    # a one-sided test's p-value, as the prior is flat
    assert 1 - loss.p_a_better == pytest.approx(ttest_rel(a, b, alternative="less").pvalue, abs=1e-12)
    assert loss.p_a_better > 0.999
    # higher is better, and all signs are changed
    assert accuracy.p_a_better == pytest.approx(loss.p_a_better)
    assert (accuracy.lower_is_better, loss.lower_is_better) == (False, True)
    (note,) = found.notes
    assert note.startswith("without a partner of the same seed: ")
    assert len(note.split(",")) == 3
    assert compare(words[::-1]).differences[0].p_a_better == pytest.approx(1 - loss.p_a_better)


def test_two_values_of_a_key_are_compared(tmp_path: Path) -> None:
    made(tmp_path / "a", 0.1, 1.0, range(3))
    made(tmp_path / "b", 0.5, 2.0, range(3))
    found = compare([str(tmp_path)], by=["lr"])
    assert (found.a, found.b) == ("lr=0.1", "lr=0.5")
    assert found.lines()[2].split() == [
        *["METRIC", "AT", "PAIRS", "A", "B", "A", "-", "B", "95%", "INTERVAL"],
        *["BETTER", "IF", "P(A", "IS", "BETTER)"],
    ]


def test_equal_runs_are_equally_good(tmp_path: Path) -> None:
    words = [made(tmp_path / name, lr, 1.0, range(3)) for name, lr in (("a", 0.1), ("b", 0.5))]
    assert [(each.difference, each.p_a_better) for each in compare(words).differences] == [(0, 0.5)] * 2


def test_what_cannot_be_paired_is_refused(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", 0.1, 1.0, range(3)), made(tmp_path / "b", 0.5, 1.0, range(2, 5))
    with pytest.raises(UserError, match=r"have 1 seed in common: two at least are needed, such as of `--seeds 3`"):
        compare([a, b])
    with pytest.raises(UserError, match=r"--compare: 1 group found: name two groups, or one with `--by KEY`"):
        compare([a])
    with pytest.raises(UserError, match=r"has two runs with seed 2: name runs of one config"):
        compare([str(tmp_path), a])
