"""The executors that need a SLURM fulfil the contract of executors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.executors.contract import ExecutorContract
from tests.on_slurm.cluster import Cluster
from tests.support import Project


class TestSlurmExecutor(ExecutorContract):
    name = "slurm"

    @pytest.fixture
    def place(self, slurm_project: Project) -> Project:
        return slurm_project


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
