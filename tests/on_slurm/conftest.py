"""A real SLURM for all tests of this folder, as good as new for each of them.

It is that of the oldest release; for tests marked `every_slurm` each one in turn, and for those marked `needs_site`
each whose site has what is named. `TEST_SLURM` chooses one for all tests instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.on_slurm import packages
from tests.on_slurm.cluster import PREPARED, Cluster
from tests.on_slurm.sites import SITES
from tests.on_slurm.state import LAB
from tests.on_slurm.users import User, make_user
from tests.support import Project, make_project, require


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what its cluster and its runs were doing."""
    report = yield
    cluster, tmp_path = (getattr(item, "funcargs", {}).get(name) for name in ("cluster", "tmp_path"))
    if report.when == "call" and report.failed and cluster and tmp_path:
        try:
            text = cluster.description()
        except Exception as error:
            # an error of this hook would end the whole session
            text = repr(error)
        report.sections.append(("SLURM", text))
        for path in sorted(tmp_path.glob("project/runs/*/attempts.jsonl")):
            report.sections.append((str(path.relative_to(tmp_path)), path.read_text(errors="replace")))
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    needs = metafunc.definition.get_closest_marker("needs_site")
    on_all = needs or metafunc.definition.get_closest_marker("every_slurm")
    chosen = os.environ.get("TEST_SLURM")
    releases = [chosen] if chosen else [*packages.RELEASES] if on_all else [packages.OLDEST]
    if needs:
        releases = [release for release in releases if getattr(SITES[release], needs.args[0])]
    if releases != [packages.OLDEST]:
        metafunc.parametrize("cluster", releases, indirect=True, scope="session")


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """Clusters by their release of SLURM, each of which is started when it is first asked for."""
    running: dict[str, Cluster] = {}

    def of(release: str) -> Cluster:
        if release not in running:
            require(what_is_missing(release))
            running[release] = stack.enter_context(
                Cluster.up(tmp_path_factory.mktemp("cluster") / "state", release=release)
            )
        return running[release]

    with ExitStack() as stack:
        yield of


@pytest.fixture(scope="session")
def cluster(clusters: Callable[[str], Cluster], request: pytest.FixtureRequest) -> Cluster:
    return clusters(getattr(request, "param", packages.OLDEST))


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
def student(cluster: Cluster) -> Iterator[User]:
    with cleaned_up(make_user(cluster, "student")) as user:
        yield user


@pytest.fixture
def colleague(cluster: Cluster) -> Iterator[User]:
    with cleaned_up(make_user(cluster, "colleague")) as user:
        yield user


@contextmanager
def cleaned_up(user: User) -> Iterator[User]:
    """A user whose project has nothing new after a test but its runs."""
    before = {*user.folder.iterdir(), user.folder / "runs"}
    yield user
    for path in {*user.folder.iterdir()} - before:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def shared(cluster: Cluster) -> Path:
    """A runs folder of the group that both are in, as this machine names it; others have no business there."""
    folder = cluster.folder / "home" / "lab"
    if not folder.exists():
        folder.mkdir()
        os.chown(folder, 0, LAB)
        folder.chmod(0o2770)
    return folder


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


def what_is_missing(release: str = packages.OLDEST) -> str | None:
    """What keeps a cluster from running here."""
    if os.geteuid() != 0:
        return "a real SLURM needs root (and make cluster-deps)"
    if not all((PREPARED / name).exists() for name in ("ready", f"{release}/ready")):
        return "a real SLURM needs make cluster-deps"
    # What init.py does that root may not do everywhere, as in most containers.
    overlay = f"mount -t overlay -o lowerdir={':'.join(packages.layers(PREPARED, release))} overlay /usr"
    device = "mount -t tmpfs tmpfs /run && mknod /run/device c 195 0"
    tried = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "sh", "-c", f"{overlay} && {device}"]
    done = subprocess.run(tried, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return f"a real SLURM needs, besides make cluster-deps, what this machine refuses: {done.stderr.strip()}"
