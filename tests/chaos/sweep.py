"""A sweep of the same training: each of its trials is to end as if nothing had come over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.study import trial_queue as studies
from tests.chaos.job import EPOCHS, STEPS_OF_EPOCH
from tests.chaos.training import RANKS, Trained, Training

RATES = (0.003, 0.01, 0.03, 0.1)
"""Of which each trial has one; together they take as many steps as a training alone."""

STUDY = "study"


class Sweep(Training):
    """One worker trains trial after trial."""

    what = "sweep"

    def start(self, words: Sequence[str] = (), **config: Any) -> None:
        epochs = EPOCHS // len(RATES)
        if "dies_at" in config:
            # in each of them, late enough for a checkpoint to resume from, and early enough for another save
            config["dies_at"] = config["dies_at"] % STEPS_OF_EPOCH + STEPS_OF_EPOCH
        sweep = {
            "study": STUDY,
            "job": "train",
            "metric": "loss",
            "direction": "minimize",
            "sampler": "grid",
            "space": {"lr": {"choice": list(RATES)}},
            "resources": {"nodes": RANKS, "gpus-per-node": 0},
            "fixed": {"ledger": str(self.ledger), "epochs": epochs} | config,
        }
        self.project.write("sweep.yaml", yaml.safe_dump(sweep | _as_values(words)))
        executor = self.project.executor
        done = self.project.call("sweep", "sweep.yaml", "--executor", executor, "--no-follow")
        assert done.returncode == 0, done.stdout + done.stderr
        self.path = self.project.runs / STUDY

    @property
    def worker(self) -> RunFolder:
        return self.submitted.of_task(0)

    @property
    def facts(self) -> dict[str, Any]:
        (facts,) = self.project.json("status", STUDY)
        return {**facts, "attempts": sum(worker["attempts"] for worker in facts["workers"])}

    def parts(self) -> dict[str, Trained]:
        """Each complete trial."""
        folder = self.submitted
        trials = studies.load(sweep_file.load(folder.sweep), folder.journal).trials
        return {
            f"{trial.params['lr']:g}{'' if trial.state.name == 'COMPLETE' else f' {trial.state.name}'}": self._trial(
                folder.of_trial(trial.number).path
            )
            for trial in trials
        }

    def current(self) -> Trained:
        begun = sorted(self.ledger.glob("*/*-0.jsonl"), key=lambda path: path.stat().st_mtime)
        return self._trial(self.submitted.of_trial(int(begun[-1].parent.name) if begun else 0).path)

    def has_resumed(self, facts: dict[str, Any]) -> bool:
        """Return whether its worker or a trial was started again; a trial may not have come to a checkpoint yet, and
        `checks` looks at the others."""
        return facts["attempts"] > 1 or any(part.starts() for part in self.parts().values())

    def step(self) -> int:
        """Of all trials together."""
        return sum(self._trial(Path(own.name)).steps() for own in self.ledger.iterdir())

    def _trial(self, path: Path) -> Trained:
        return Trained(path, self.ledger / path.name)


def _as_values(words: Sequence[str]) -> dict[str, Any]:
    """Options of `submit` as a sweep file has them."""
    return {
        name.removeprefix("--").replace("-", "_"): float(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
