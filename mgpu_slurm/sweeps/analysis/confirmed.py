"""Which differences between the best trials are real: their confirmation, compared seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies

CONFIDENCE = 0.95
"""Probability with which all intervals of a confirmation contain their true differences."""


@dataclass(frozen=True)
class Confirmed:
    """A trial that was trained again with several seeds."""

    number: int
    """Its number in the sweep."""
    params: Values
    values: Mapping[int, float]
    """The values of the metric by seed."""
    mean: float
    difference: float = 0.0
    """By how much its mean is worse than that of the best one; 0 for the best one."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Where the true difference is."""

    @property
    def is_worse(self) -> bool:
        """Whether the difference is real: its interval does not contain 0."""
        return self.interval[0] > 0


@dataclass(frozen=True)
class Confirmation:
    """The confirmation of a sweep so far."""

    study: str
    metric: str
    seeds: Sequence[int]
    left: int
    """Number of trials that are still to be trained again."""
    without_result: int
    """Number of those that failed, or have no value."""
    trials: Sequence[Confirmed]
    """Those that were trained with all seeds, best first."""

    def lines(self) -> list[str]:
        """Return a table for people."""
        from tabulate import tabulate

        rows = [
            [
                str(each.number),
                f"{each.mean:.6g}",
                f"{each.difference:.3g} ({each.interval[0]:.3g} to {each.interval[1]:.3g})" if place else "",
                ("worse" if each.is_worse else "may be as good") if place else self._of_the_best(),
            ]
            for place, each in enumerate(self.trials)
        ]
        header = ["TRIAL", f"mean {self.metric}", f"WORSE BY ({CONFIDENCE:.0%} interval)", ""]
        so_far = f"; {counted(self.left, 'trial')} left" if self.left else ""
        so_far += f"; {counted(self.without_result, 'trial')} without a result" if self.without_result else ""
        table = tabulate(rows, header, tablefmt="plain", disable_numparse=True).splitlines() if rows else []
        seeds = ", ".join(map(str, self.seeds))
        return [f"confirmed with seeds {seeds}, as study {self.study}{so_far}", *(line.rstrip() for line in table)]

    def _of_the_best(self) -> str:
        return "best" if len(self.trials) > 1 else "the only one: nothing to compare it with"

    def to_json(self) -> dict[str, object]:
        trials = [asdict(each) | {"is_worse": each.is_worse} for each in self.trials]
        counts = {"left": self.left, "without_result": self.without_result}
        return {"study": self.study, "seeds": list(self.seeds), **counts, "trials": trials}


def confirmed(folder: RunFolder) -> Confirmation | None:
    """Return the confirmation of a sweep; None if there is none yet."""
    own = sweep_state.confirmation_folder(folder)
    if not own.sweep.exists() or not sweep_state.is_confirmation(own):
        return None
    sweep, again = sweep_file.load(folder.sweep), sweep_file.load(own.sweep)
    ranked = summary.ranked(summary.own_trials(studies.load(sweep, folder.journal)), sweep)
    numbers = [(trial.number, summary.parameters(trial, sweep)) for trial in ranked]
    found = []
    trials = summary.own_trials(studies.load(again, own.journal))
    for trial in summary.ranked(trials, again):
        params = summary.parameters(trial, again)
        values = _by_seed(own.of_trial(trial.number), again)
        number = next((number for number, known in numbers if known == params), None)
        if number is not None and len(values) == again.seeds:
            found.append(Confirmed(number, params, values, statistics.fmean(values.values())))
    left = sum(not trial.state.is_finished() for trial in trials)
    without = len(trials) - left - len(found)
    trained = compared(found, is_maximized=sweep.direction == "maximize")
    return Confirmation(own.run, sweep.metric, again.seed_values, left, without, trained)


def compared(trials: Sequence[Confirmed], is_maximized: bool) -> list[Confirmed]:
    """Return trials with their differences to the best one, which is the first.

    The differences are paired by seed. The intervals are Student's, and hold together for all pairs (Bonferroni's
    correction), as any trial could have come out best.
    """
    made, pairs = list(trials[:1]), math.comb(len(trials), 2)
    for each in trials[1:]:
        sign = -1 if is_maximized else 1
        paired = [sign * (value - trials[0].values[seed]) for seed, value in each.values.items()]
        difference = statistics.fmean(paired)
        half = _quantile(pairs, len(paired) - 1) * statistics.stdev(paired) / math.sqrt(len(paired))
        made.append(replace(each, difference=difference, interval=(difference - half, difference + half)))
    return made


def _quantile(intervals: int, degrees: int) -> float:
    """Return how many standard errors each of so many intervals extends to both sides.

    Args:
        degrees: degrees of freedom.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    return float(t.ppf(1 - (1 - CONFIDENCE) / intervals / 2, degrees))


def _by_seed(trial: RunFolder, sweep: Sweep) -> dict[int, float]:
    """Return the values of the metric by seed, of the runs that are complete."""
    found = {seed: read_json(trial.of_seed(seed).result) for seed in sweep.seed_values}
    return {seed: record["result"][sweep.metric] for seed, record in found.items() if record is not None}
