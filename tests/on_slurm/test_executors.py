"""The executors that need a SLURM fulfil the contract of executors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.executors.contract import ExecutorContract
from tests.on_slurm.cluster import Cluster
from tests.support import Project


class TestSlurmExecutor(ExecutorContract):
    name = "slurm"

    @pytest.fixture
    def place(self, slurm_project: Project) -> Project:
        return slurm_project

    @pytest.fixture
    def restart(self, cluster: Cluster) -> Callable[[Path], object]:
        return lambda folder: cluster.start_now(str(records.submissions(RunFolder(folder))[-1].job_id))


class TestAllocationExecutor(ExecutorContract):
    name = "allocation"

    @pytest.fixture
    def place(self, cluster: Cluster, slurm_project: Project) -> Iterator[Project]:
        said = cluster.run("salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=2", env=slurm_project.environ).stderr
        found = re.search(r"Granted job allocation (\d+)", said)
        assert found, said
        slurm_project.environ["SLURM_JOB_ID"] = found[1]
        yield slurm_project
        cluster.run("scancel", found[1], env=slurm_project.environ)
