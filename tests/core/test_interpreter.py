"""Python that the project starts takes nothing from the folder that it is started in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.core import interpreter
from tests.support import REPOSITORY, make_hostile


def test_python_started_here_and_by_hand_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = make_hostile(tmp_path)
    commands = [interpreter.command(sys.executable, "mgpu_slurm.doctor.torch_probe")]
    # another interpreter may be of 3.10, which has no -P
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    commands.append(interpreter.command(str(other), "mgpu_slurm.doctor.torch_probe"))
    # a clone that is not installed
    monkeypatch.setattr(interpreter, "_home", lambda: str(REPOSITORY))
    commands.append(interpreter.command(sys.executable, "mgpu_slurm.doctor.torch_probe"))
    assert ["-P" in command for command in commands] == [sys.version_info >= (3, 11), False, False]
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert '"version"' in done.stdout
        assert not mark.exists()


def test_arguments_and_the_main_module_are_those_of_python_m(tmp_path: Path) -> None:
    module = tmp_path / "shows.py"
    module.write_text("import json, sys; print(json.dumps([__name__, sys.argv[1:], sys.path]))")
    by_hand = interpreter.command("/other/python", "shows", "a b", "--", "")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *by_hand[1:]], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith('["__main__", ["a b", "--", ""], [')
    assert '""' not in done.stdout.partition(", [")[2].partition("], [")[2]
