"""One real SLURM for all tests of this folder, as good as new for each of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PREPARED, Cluster
from tests.support import Project, make_project


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := what_is_missing():
        pytest.skip(f"a real SLURM takes root, namespaces and make cluster-deps: {missing}")
    with Cluster.up(tmp_path_factory.mktemp("cluster") / "state") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def as_good_as_new(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.reset()


@pytest.fixture
def slurm_project(cluster: Cluster, tmp_path: Path) -> Project:
    """A project on the cluster's login node; the nodes see its folder."""
    project = make_project(tmp_path)
    project.environ |= cluster.environ
    project.executor = "slurm"
    return project


def what_is_missing() -> str | None:
    if os.geteuid() != 0:
        return "this is not root"
    if not (PREPARED / "ready").exists():
        return "make cluster-deps is to be run first"
    # what init.py does first
    overlay = f"mount -t overlay -o lowerdir={PREPARED}/packages/usr:/usr overlay /usr"
    tried = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "sh", "-c", overlay]
    done = subprocess.run(tried, capture_output=True, text=True)
    return f"this machine refuses namespaces ({done.stderr.strip()})" if done.returncode != 0 else None
