"""What a sweep's trials say about its file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import optuna
import pytest
from optuna.study import Study
from optuna.trial import TrialState, create_trial

from mgpu_slurm.sweeps.analysis.hints import hints, interval_of_correlation, rank_correlation
from mgpu_slurm.sweeps.search import space_parser, sweep_file
from mgpu_slurm.sweeps.search.parameters import wider
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study.snapshots import SECONDS, UNTIL
from mgpu_slurm.sweeps.study.summary import summarize
from tests.sweeps.sweeps import VALUES

SPACE = {"lr": {"float": [1e-4, 1.0], "log": True}, "n": {"int": [1, 100]}, "c": {"choice": ["a", "b"]}}


def sweep_of(**values: object) -> Sweep:
    return sweep_file.parse(VALUES | {"space": SPACE, "trials": 200} | values, "test")


def study_of(points: Sequence[tuple[float, int]]) -> Study:
    """Return a study of complete trials, the first the best."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    distributions = {each.name: each.distribution for each in space_parser.parse(SPACE, "test").parameters}
    for place, (lr, n) in enumerate(points):
        params = {"lr": lr, "n": n, "c": "a"}
        study.add_trial(create_trial(value=-float(place), params=params, distributions=distributions))
    return study


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ((1.0, 50), ["the best values are at the upper end of the range of lr: widen it"]),
        ((1.2e-4, 50), ["the best values are at the lower end of the range of lr: widen it"]),
        # on a logarithmic scale it is in the middle
        ((0.01, 1), ["the best values are at the lower end of the range of n: widen it"]),
        ((0.01, 50), []),
    ],
)
def test_range_that_ends_at_the_best_values_is_named(best: tuple[float, int], said: list[str]) -> None:
    others = [(0.01, 50)] * 7
    study = study_of([best] * 3 + others)
    assert hints(study, sweep_of()) == said
    # as the file has it that `efficiency` reads
    narrow = summarize(study, sweep_of()).narrow or {}
    assert [wider(*each) for each in narrow.items()] == said
    # one of them is elsewhere
    assert hints(study_of([best, best, (0.02, 40), *others]), sweep_of()) == []


def test_few_trials_say_nothing() -> None:
    assert hints(study_of([(1.0, 50)] * 5), sweep_of()) == []


class TestRungs:
    def told(self, pairs: Sequence[tuple[float, float]], **pruner: object) -> list[str]:
        study = optuna.create_study(direction="maximize")
        for number in range(8 * len(pairs)):
            hedged, first = pairs[number // 8], number % 8 == 7
            reports = {1: hedged[0], 3: 0.0, 9: hedged[1]} if first else {1: 0.0}
            attributes = {SECONDS: 1.0} | ({UNTIL: 2} if first else {})
            study.add_trial(
                create_trial(state=TrialState.WAITING, intermediate_values=reports, system_attrs=attributes)
            )
        made = {"name": "asha", "max_resource": 27} | pruner
        return hints(study, sweep_of(pruner=made, sampler="tpe"))

    def test_correlation_of_hedged_trials_is_told(self) -> None:
        (said,) = self.told([(place, place + (place % 2)) for place in range(12)])
        assert said.startswith("ranks at progress 1 and 9 correlate by 0.")
        assert said.endswith("12 hedged trials)")

    def test_warning_if_the_interval_includes_zero(self) -> None:
        (said,) = self.told([(place, (place * 5) % 12) for place in range(12)])
        assert said.endswith("12 hedged trials): progress 1 may mislead: raise min_resource")

    def test_fewer_than_ten_say_nothing(self) -> None:
        assert self.told([(place, place) for place in range(9)]) == []

    def test_sweep_without_hedged_trials_says_nothing(self) -> None:
        assert self.told([(place, place) for place in range(12)], hedge=False) == []


def test_rank_correlation_of_known_data() -> None:
    """Values by scipy.stats.spearmanr 1.17."""
    assert rank_correlation([(1, 10), (2, 20), (3, 15), (4, 40)]) == pytest.approx(0.8)
    assert rank_correlation([(1, 5), (2, 5), (3, 7), (4, 1)]) == pytest.approx(-0.31622776601683794)
    assert rank_correlation([(1, 5), (2, 5)]) == 0
    draw = np.random.default_rng(1)
    for _ in range(20):
        low, high = interval_of_correlation(float(draw.uniform(-0.9, 0.9)), 20)
        assert -1 < low < high < 1
    assert interval_of_correlation(1.0, 20) == (1.0, 1.0)
    center, width = math.atanh(0.5), 1.96 * math.sqrt(1.125 / 17)
    assert interval_of_correlation(0.5, 20) == pytest.approx((math.tanh(center - width), math.tanh(center + width)))
