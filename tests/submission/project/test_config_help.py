"""`submit TARGET --help` shows the job's config as its source says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.submission.project.config_help import rows
from tests.support import Project

SOURCE = """
from dataclasses import dataclass, field
from typing import Literal

@dataclass
class Model:
    width: int = 32  # of each layer
    kind: Literal["cnn", "vit"] = "cnn"

@dataclass
class Config:
    path: str
    '''Where the data are.

    On all nodes.'''
    model: Model = field(default_factory=Model)
    sizes: list[int] = field(default_factory=lambda: [1, 2])

def train(run, config: Config): ...

def by_name(run, lr: float = 0.1,  # the rate
            epochs=3, seed=0):  # two at once
    ...

def mapping(run, config): ...
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(SOURCE)
    return tmp_path


def test_fields_have_types_defaults_and_comments(job: Path) -> None:
    title, found = rows("job.py", job)
    assert title == "Config of job.py:train, as key=value"
    assert found == [
        ("path", "str, required  # Where the data are."),
        ("model.width", "int, default 32  # of each layer"),
        ("model.kind", "Literal['cnn', 'vit'], default 'cnn'"),
        ("sizes", "list[int], default [1, 2]"),
    ]


def test_parameters_are_config_values_too(job: Path) -> None:
    assert rows("job:by_name", job)[1] == [
        ("lr", "float, default 0.1  # the rate"),
        ("epochs", "int, default 3"),
        ("seed", "int, default 0"),
    ]


def test_config_that_the_source_does_not_show(job: Path) -> None:
    assert rows("job.py:mapping", job)[1] == [("job.py:mapping", "any values")]
    (job / "other.py").write_text("from somewhere import *\n")
    ((_, told),) = rows("other.py", job)[1]
    assert "`--dry-run --check` imports it" in told


def test_missing_job_is_named(job: Path) -> None:
    with pytest.raises(UserError, match=r"target 'none\.py': there is no file 'none\.py' here"):
        rows("none.py", job)
    with pytest.raises(UserError, match="lost"):
        rows("job.py:lost", job)


def test_help_of_a_target_ends_with_its_config(project: Project) -> None:
    project.write("job.py", SOURCE)
    plain = project.call("submit", "--help")
    for words in (["submit", "--nodes", "2", "job.py:by_name", "lr=1", "--help"], ["scaling", "job.py:by_name", "-h"]):
        done = project.call(*words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(
            "\nConfig of job.py:by_name, as key=value:\n  lr      float, default 0.1  # the rate\n"
            "  epochs  int, default 3\n  seed    int, default 0\n"
        )
    assert "Config of" not in plain.stdout
    wrong = project.call("submit", "none.py", "--help")
    assert (wrong.returncode, wrong.stderr) == (2, "mgpu-slurm: target 'none.py': there is no file 'none.py' here\n")
