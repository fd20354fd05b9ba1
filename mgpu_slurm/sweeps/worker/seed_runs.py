"""A trial that is trained with several seeds, in turn to each rung: which seed is next, and the means over all.

Each seed has a run of its own in the trial's folder, with its checkpoints. What it has reported and returned is read
from there, so that any worker can continue the trial.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mgpu_slurm.core.files import read_json, read_jsonl
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study import outcomes

Metrics = Mapping[str, float]


class SeedRuns:
    """The runs of one trial."""

    def __init__(self, trial: RunFolder, seeds: Sequence[int]) -> None:
        self._folders = {seed: trial.of_seed(seed) for seed in seeds}
        self._reports: dict[int, dict[int, Metrics]] = {seed: {} for seed in seeds}
        """Metrics by seed and progress, as first reported."""
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

    def note(self, seed: int, progress: int, metrics: Metrics) -> None:
        """Note a report."""
        self._reports[seed].setdefault(progress, metrics)

    def complete(self, seed: int, metrics: Metrics, outcome: outcomes.Complete) -> None:
        """Note the end of a run, with the last value of each metric."""
        outcomes.write(self._folders[seed], outcome)
        self._results[seed] = metrics

    def means(self, target: int | None) -> dict[str, float]:
        """Return the means of the metrics that all seeds have there; `next` has returned None."""
        found = [self._results[seed] if target is None else self._at(seed, target) for seed in self._folders]
        known = [each for each in found if each is not None]
        names = [name for name in known[0] if all(name in each for each in known)]
        return {name: statistics.fmean(each[name] for each in known) for name in names}

    def _at(self, seed: int, target: int) -> Metrics | None:
        """Return what a seed first reported at this progress or later; of a shorter run, its result."""
        reports = self._reports[seed]
        progress = min((each for each in reports if each >= target), default=None)
        return self._results.get(seed) if progress is None else reports[progress]
