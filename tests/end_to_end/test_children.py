"""Processes that a job starts itself end when it ends them, and do not hold a run that is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import children
from tests.support import Project, make_project

ROUNDS = 5
WAYS = {
    "function": ("children.py", f"rounds={ROUNDS}"),
    "attached script": ("--", "python", "children.py", str(ROUNDS)),
}


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, dict[str, Path]]:
    project = make_project(tmp_path_factory.mktemp("children"))
    project.write("children.py", Path(children.__file__).read_text())
    return project, {way: project.submit(*words) for way, words in WAYS.items()}


@pytest.mark.parametrize("way", WAYS)
def test_child_processes_end_when_the_job_ends_them(way: str, submitted: tuple[Project, dict[str, Path]]) -> None:
    project, folders = submitted
    facts = project.finish(folders[way])
    reached = (folders[way] / "children-0").read_text()
    assert (reached, facts["state"]) == ("done", "COMPLETED")
