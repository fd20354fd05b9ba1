"""What is installed, read from folder names."""

from __future__ import annotations

import contextlib
import re
from importlib import metadata
from pathlib import Path

import pytest

from mgpu_slurm.core import installed
from tests.support import REPOSITORY


def test_first_folder_of_the_search_path_wins(tmp_path: Path) -> None:
    for place, name in (("first", "My_Pkg-2.0+cpu.dist-info"), ("second", "my.pkg-1.0.dist-info")):
        (tmp_path / place / name).mkdir(parents=True)
    (tmp_path / "second" / "old-0.3-py3.11.egg-info").touch()
    (tmp_path / "second" / "torch").mkdir()
    paths = [str(tmp_path / "absent.zip"), str(tmp_path / "first"), str(tmp_path / "second")]
    assert installed.packages(paths) == {"my-pkg": "2.0+cpu", "old": "0.3"}


def test_the_programs_own_folder_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "mine-1.0.egg-info").mkdir(parents=True)
    (tmp_path / "site" / "theirs-2.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path / "project"), str(tmp_path / "site")])
    assert installed.facts()["packages"] == {"theirs": "2.0"}


def test_nothing_that_is_installed_with_this_pins_torch() -> None:
    """Otherwise pip would replace a torch that is there, such as a site's own build."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    waiting = re.findall(r'"([\w.-]+)', listed)
    assert {"torch", "optuna", "submitit"} <= set(waiting)
    seen = {"torch"}
    while waiting:
        name = waiting.pop()
        if installed.normalized(name) in seen:
            continue
        seen.add(installed.normalized(name))
        with contextlib.suppress(metadata.PackageNotFoundError):
            needed = [each for each in metadata.requires(name) or [] if "extra ==" not in each]
            assert not [each for each in needed if re.match(r"torch\s*[(=<~]", each)], name
            waiting += [match[0] for each in needed if (match := re.match(r"[\w.-]+", each))]
    assert "torchvision" not in seen
