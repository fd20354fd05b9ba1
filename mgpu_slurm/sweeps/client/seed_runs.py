"""A trial that is trained with several seeds, in turn to each rung: which seed is next, and the means over all.

Each seed has a run of its own in the trial's folder, with its checkpoints. What it has reported and returned is read
from there, so that any worker can continue the trial.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from mgpu_slurm.core.files import read_json, read_jsonl
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study import outcomes

Metrics = Mapping[str, float]


class SeedRuns:
    """The runs of one trial."""

    def __init__(self, trial: RunFolder, seeds: Sequence[int], metric: str) -> None:
        """
        Args:
            metric: that by which trials are judged; only reports with it count.
        """
        self._folders = {seed: trial.of_seed(seed) for seed in seeds}
        self._metric = metric
        self.last: dict[int, dict[str, float]] = {seed: {} for seed in seeds}
        """The last value of each metric, by seed."""
        self._reports: dict[int, dict[int, Metrics]] = {seed: {} for seed in seeds}
        """The last value of each metric, by seed and progress of a report."""
        self._results: dict[int, Metrics] = {}
        """Metrics at the end of the runs that are complete."""
        for seed, folder in self._folders.items():
            for record in read_jsonl(folder.metrics):
                self.note(seed, record["progress"], record["metrics"])
            if (result := read_json(folder.result)) is not None:
                self._results[seed] = result["result"]

    def next(self, target: int | None) -> int | None:
        """Return the first seed whose run has not reached this progress; None if all have.

        Args:
            target: None for the end of the run.
        """
        for seed in self._folders:
            if seed not in self._results and (target is None or self._at(seed, target) is None):
                return seed
        return None

    def note(self, seed: int, progress: int, metrics: Metrics) -> bool:
        """Note a report, and return whether it is the first of this progress."""
        self.last[seed] |= metrics
        if self._metric not in metrics or progress in self._reports[seed]:
            return False
        self._reports[seed][progress] = dict(self.last[seed])
        return True

    def complete(self, seed: int, outcome: outcomes.Complete) -> None:
        """Note the end of a run; its result has the last value of each metric."""
        outcomes.write(self._folders[seed], outcome)
        self._results[seed] = outcome.result

    @property
    def has_ended(self) -> bool:
        """Whether all runs are complete."""
        return self._results.keys() == self._folders.keys()

    def have_reached(self, target: int) -> bool:
        """Return whether each seed has reported at this progress or later."""
        return all(self._at(seed, target) is not None for seed in self._folders)

    def means(self, target: int | None) -> dict[str, float]:
        """Return the means of the metrics that all seeds have there.

        Args:
            target: a progress; a seed whose run was shorter counts with its result. None for the end.
        """
        found = [(None if target is None else self._at(seed, target)) or self._results[seed] for seed in self._folders]
        names = [name for name in found[0] if all(name in each for each in found)]
        return {name: _mean([each[name] for each in found]) for name in names}

    def _at(self, seed: int, target: int) -> Metrics | None:
        """Return what a seed first reported at this progress or later."""
        reports = self._reports[seed]
        progress = min((each for each in reports if each >= target), default=None)
        return None if progress is None else reports[progress]


def _mean(values: Sequence[float]) -> float:
    # of infinite values of both signs there is none
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan
