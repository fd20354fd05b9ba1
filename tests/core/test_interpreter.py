"""Python that the project starts takes nothing from the folder that it is started in."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mgpu_slurm.core import interpreter
from tests.support import REPOSITORY, make_hostile


def test_started_python_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = make_hostile(tmp_path)
    commands = [(*interpreter.command(sys.executable, "mgpu_slurm.doctor.torch_probe"), "")]
    # another interpreter may be of 3.10, which has no -P
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    commands.append((*interpreter.command(str(other), "mgpu_slurm"), "--help"))
    # a clone that is not installed
    monkeypatch.setattr(interpreter, "_home", lambda: str(REPOSITORY))
    commands.append((*interpreter.command(sys.executable, "mgpu_slurm"), "--help"))
    assert ["-P" in command for command in commands] == [sys.version_info >= (3, 11), False, False]
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(('{"version"', "Usage: mgpu-slurm"))
        assert not mark.exists()


def test_arguments_and_main_module_match_python_m(tmp_path: Path) -> None:
    module = tmp_path / "shows.py"
    module.write_text("import json, sys; print(json.dumps([__name__, sys.argv[1:], sys.path]))")
    by_hand = interpreter.command("/other/python", "shows", "a b", "--", "")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *by_hand[1:]], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith('["__main__", ["a b", "--", ""], [')
    assert '""' not in done.stdout.partition(", [")[2].partition("], [")[2]


# -- what is installed


def test_first_folder_of_the_search_path_wins(tmp_path: Path) -> None:
    for place, name in (("first", "My_Pkg-2.0+cpu.dist-info"), ("second", "my.pkg-1.0.dist-info")):
        (tmp_path / place / name).mkdir(parents=True)
    (tmp_path / "second" / "old-0.3-py3.11.egg-info").touch()
    (tmp_path / "second" / "torch").mkdir()
    paths = [str(tmp_path / "absent.zip"), str(tmp_path / "first"), str(tmp_path / "second")]
    assert interpreter.packages(paths) == {"my-pkg": "2.0+cpu", "old": "0.3"}


def test_packages_in_the_programs_own_folder_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "mine-1.0.egg-info").mkdir(parents=True)
    (tmp_path / "site" / "theirs-2.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path / "project"), str(tmp_path / "site")])
    assert interpreter.facts()["packages"] == {"theirs": "2.0"}


def test_no_dependency_pins_torch() -> None:
    """Otherwise pip would replace an installed torch, such as a site's own build."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    waiting = re.findall(r'"([\w.-]+)', listed)
    assert {"torch", "optuna", "submitit"} <= set(waiting)
    seen = {"torch"}
    while waiting:
        name = waiting.pop()
        if interpreter.normalized(name) in seen:
            continue
        seen.add(interpreter.normalized(name))
        with contextlib.suppress(metadata.PackageNotFoundError):
            needed = [each for each in metadata.requires(name) or [] if "extra ==" not in each]
            assert not [each for each in needed if re.match(r"torch\s*[(=<~]", each)], name
            waiting += [match[0] for each in needed if (match := re.match(r"[\w.-]+", each))]
    assert "torchvision" not in seen
