"""Runs keep apart on a page, and only repetitions of each other are averaged."""

from __future__ import annotations

from typing import Any

import numpy as np

from mgpu_slurm.reports.facts.report_facts import Facts, MetricFacts, Piece, RunFacts
from mgpu_slurm.reports.facts.series import Series
from mgpu_slurm.reports.page.run_charts import curves, repeated
from mgpu_slurm.reports.page.shown import Shown, arranged
from mgpu_slurm.reports.page.sweep_charts import covered
from mgpu_slurm.reports.usage.ledger import Ledger
from tests.reports.page.trees import by_class, tree_of


def shown(*runs: RunFacts) -> list[Shown]:
    return arranged(Facts("2026-01-01T00:00:00", "1", "t", "loss", list(runs), [], Ledger(), "core", [], []))


def run(name: str, group: str | None = None, kind: Any = "run", value: float = 1.0, **config: Any) -> RunFacts:
    steps = np.arange(1.0, 4.0)
    values = np.asarray([value, np.nan, value])
    metrics = {"loss": MetricFacts(value, value, "minimize", True)}
    points = {"loss": Series(steps, steps, steps, values)}
    return RunFacts(name, kind, group, "COMPLETED", "", config=config, metrics=metrics, series=points)


def test_names_are_short_unless_two_runs_would_have_the_same() -> None:
    first, second = "train-20261125-161913-6fdb", "train-20261125-161914-0a1b"
    assert [each.name for each in shown(run(first), run(f"{first}/trials/3/seeds/7"))] == [
        "train",
        "train · 3 · seed 7",
    ]
    assert [each.name for each in shown(run(first), run(second))] == [first, second]


def test_only_runs_that_differ_in_their_seed_repeat_each_other() -> None:
    found = shown(
        *(run(f"g/{seed}", "g", lr=0.1, seed=seed) for seed in range(2)),
        *(run(f"g/{2 + seed}", "g", lr=0.5, seed=seed) for seed in range(2)),
        run("g/4", "g", lr=0.9, seed=0),
        *(run(f"logs/{name}", "logs", "foreign") for name in "ab"),
        *(run(f"s/trials/{number}", "s", "trial", lr=0.1) for number in range(2)),
        *(run(f"s/trials/9/seeds/{seed}", "s", "trial", lr=0.1, seed=seed) for seed in range(2)),
    )
    groups = [[each.facts.run for each in group] for group in repeated(found).values()]
    assert groups == [["g/0", "g/1"], ["g/2", "g/3"], ["s/trials/9/seeds/0", "s/trials/9/seeds/1"]]


def test_band_has_a_gap_at_a_value_that_is_not_a_number() -> None:
    found = shown(*(run(f"g/{seed}", "g", seed=seed, value=1.0 + seed) for seed in range(2)))
    chart = tree_of(str(curves("c", "loss", found).svg()))
    # two stretches of one point each
    assert not by_class(chart, "band", "path")
    (mean,) = by_class(chart, "mean", "path")
    assert mean.get("d", "").count("M") == 2


def test_time_with_a_trial_counts_once_if_there_are_two() -> None:
    assert covered([Piece(0, 0.0, 10.0), Piece(1, 5.0, 8.0), Piece(2, 20.0, 21.0)]) == 11.0
    assert covered([]) == 0.0
