"""Fixtures of all tests."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

from tests import browser as chromium
from tests import mariadb as mariadb_server
from tests import postgresql as databases
from tests.support import LACKING, TORCH, Project, make_project, require

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from mgpu_slurm.training.run import Run

ON_SLURM = "tests/on_slurm/"
"""They mostly wait, for SLURM."""
TRAINING = ("tests/test_examples.py", "tests/end_to_end/", "tests/jobs/", "tests/chaos/")
"""They train, and need the processors."""

# other tests run at the same time, and an example that takes long says nothing of the code
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# A shell that puts a command into the background has it ignore Ctrl-C, and so would all programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest modules first, so that no process of several is left alone with one at the end. Those that wait
    take turns with those that compute, so that the processors are always in use."""
    modules = [*dict.fromkeys(map(module_of, items))]
    waiting = [name for name in modules if name.startswith(ON_SLURM)]
    training = [name for name in modules if name.startswith(TRAINING)]
    turns = [name for pair in zip_longest(waiting, training) for name in pair if name]
    items.sort(key=lambda item: turns.index(module_of(item)) if module_of(item) in turns else len(turns))


def pytest_configure(config: pytest.Config) -> None:
    # in each of thousands of processes that import NumPy, its threads would spin for a tenth of a second
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # torch's threads would spin for others that have no processor, for up to a quarter of the time
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # `make gpu` runs the tests that are marked; the others are for CPUs, and would compute on a GPU that is visible
    if config.option.markexpr != "gpu" and Path("/dev/nvidiactl").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and item.config.option.markexpr != "long":
        pytest.skip("takes minutes: `make long`")
    needed = item.get_closest_marker("needs_torch")
    if needed and Version(needed.args[0]) > TORCH:
        pytest.skip(f"needs torch {needed.args[0]}")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU; on a machine with one, run `make gpu`")


def module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(scope="session", autouse=True)
def own_state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that tests start in this process are not added to the user's own list of runs folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def _made_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    script = f"from mlflow import MlflowClient; MlflowClient('sqlite:///{path}').search_experiments()"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    return path


@pytest.fixture
def mlflow_file(_made_mlflow: Path, tmp_path: Path) -> Path:
    """An MLflow database without runs. To make its tables takes seconds, so it is a copy."""
    return shutil.copy(_made_mlflow, tmp_path / "mlflow.db")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a SLURM command a shell script."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(command: str, script: str) -> None:
        (tmp_path / command).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / command).chmod(0o755)

    return make


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of one rank, in this process."""
    import torch

    from mgpu_slurm.rank.rank_info import RankInfo
    from mgpu_slurm.rank.signals import StopFlag
    from mgpu_slurm.training.run import Run

    run = Run(RankInfo(), tmp_path, torch.device("cpu"), 1, StopFlag())
    yield run
    # one that is open counts the optimizer steps of the tests after it, too
    run.close()


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[databases.Server]:
    """One server for all tests of a process, each with databases of its own; nobody stops it."""
    require(None if databases.is_there() else databases.MISSING)
    with databases.server(tmp_path_factory.mktemp("postgresql") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mariadb_server.Server]:
    """One server for all tests of a process."""
    require(None if mariadb_server.is_there() else mariadb_server.MISSING)
    with mariadb_server.server(tmp_path_factory.mktemp("mariadb") / "server") as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests of a module: it starts in half a second, and while it runs this thread has an event
    loop that would make `asyncio.run` fail in other modules."""
    require(None if chromium.is_there() else chromium.MISSING)
    with chromium.started(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def ordinary_user(tmp_path: Path) -> Iterator[None]:
    """Act as a user who is bound by permissions: root gives the test's folder to nobody, and acts as that user.

    Name it last: the folder has to hold what other fixtures make.
    """
    if os.geteuid() != 0:
        yield
        return
    user, groups = pwd.getpwnam("nobody"), os.getgroups()
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
    for parent in tmp_path.parents:
        parent.chmod(parent.stat().st_mode | 0o011)
    os.setgroups([])
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip tests of what the program says that this version of torch lacks."""
    report = yield
    lacks = (
        re.search(r"UserError: .* from torch (\S+) on, and this is ", report.longreprtext) if report.failed else None
    )
    if lacks and Version(lacks[1]) > TORCH:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: needs torch {lacks[1]}")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were skipped for lack of something, also without pytest's -rs."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    counts = Counter(reason.partition(LACKING)[2].rstrip("')") for reason in reasons if LACKING in reason)
    for reason, count in counts.items():
        terminalreporter.write_line(f"{count} tests are skipped: {reason}", yellow=True)
