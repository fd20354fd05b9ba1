"""Fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import Project, make_project

LONGEST = ("tests/slurm/", "tests/end_to_end/", "tests/jobs/")
"""They train, on real SLURMs and supervisors."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no process of several is left alone with one at the end."""
    items.sort(key=lambda item: min((place for place, name in enumerate(LONGEST) if name in item.nodeid), default=9))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)
