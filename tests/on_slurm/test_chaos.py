"""A round of `make chaos` on a real SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import rounds
from tests.chaos.on_slurm import Slurm
from tests.chaos.training import Training
from tests.on_slurm.cluster import Cluster


@pytest.mark.timeout(300)
def test_training_with_faults_ends_like_an_undisturbed_one(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SLURM's commands for this process too, which looks at the run without starting the program each time
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    slurm = Slurm(cluster)
    chosen = [fault for fault in slurm.faults if fault.name == "the batch step is killed"]
    done = rounds.run(slurm, Training, chosen, "a short selection", rounds.undisturbed(Training, tmp_path))
    assert (done.hit, done.problems) == (True, [])
