"""A job that version 0.1 has queued starts, whatever version is installed by then."""

from __future__ import annotations

from tests.on_slurm.cluster import Cluster
from tests.support import Project, restore_version_0_1


def test_job_queued_by_version_0_1_starts(cluster: Cluster, slurm_project: Project) -> None:
    folder = restore_version_0_1(slurm_project)["queued"]
    cluster.run("sbatch", folder / "submission.sh", env=slurm_project.environ)
    facts = slurm_project.finish(folder)
    assert (facts["state"], facts["step"]) == ("COMPLETED", 16)
