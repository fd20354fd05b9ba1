"""One real SLURM for all tests of this folder, as good as new for each of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm.cluster import PREPARED, Cluster
from tests.support import Project, make_project, require


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require(what_is_missing())
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


@pytest.fixture
def asked(slurm_project: Project, tmp_path: Path) -> Path:
    """A file with a line for each command of SLURM that the project's programs have called."""
    said = tmp_path / "asked"
    said.touch()
    folder = tmp_path / "counting"
    folder.mkdir()
    real = slurm_project.environ["PATH"]
    for name in ("squeue", "sacct", "scontrol", "sinfo", "sbatch", "scancel"):
        script = folder / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {said}\nPATH={real} exec {name} "$@"\n')
        script.chmod(0o755)
    slurm_project.environ["PATH"] = f"{folder}:{real}"
    return said


def what_is_missing() -> str | None:
    """What keeps a cluster from running here."""
    if os.geteuid() != 0:
        return "a real SLURM needs root (and make cluster-deps)"
    if not (PREPARED / "ready").exists():
        return "a real SLURM needs make cluster-deps"
    # What init.py does that root may not do everywhere, as in most containers.
    overlay = f"mount -t overlay -o lowerdir={PREPARED}/packages/usr:/usr overlay /usr"
    device = "mount -t tmpfs tmpfs /run && mknod /run/device c 195 0"
    tried = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "sh", "-c", f"{overlay} && {device}"]
    done = subprocess.run(tried, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return f"a real SLURM needs, besides make cluster-deps, what this machine refuses: {done.stderr.strip()}"
