"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import postgresql as databases
from tests.support import Project, make_project

LONGEST = ("tests/slurm/", "tests/end_to_end/", "tests/jobs/")
"""They train, on real SLURMs and supervisors."""

# other tests run at the same time, and an example that takes long says nothing of the code
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no process of several is left alone with one at the end."""
    items.sort(key=lambda item: min((place for place, name in enumerate(LONGEST) if name in item.nodeid), default=9))


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


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[databases.Server]:
    """One server for all tests of a process, each with databases of its own; nobody stops it."""
    if not databases.is_there():
        pytest.skip(databases.MISSING)
    with databases.server(tmp_path_factory.mktemp("postgresql") / "server") as server:
        yield server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says it once, also where pytest is not asked for the reasons of skips."""
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if databases.MISSING in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests are skipped: {databases.MISSING}", yellow=True)
