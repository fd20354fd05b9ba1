"""What tests share: a machine that lacks something, and processes that Ctrl-C reaches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support import REPOSITORY, Project, require


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("false", pytest.skip.Exception)])
def test_unmet_requirement_fails_in_ci_and_skips_elsewhere(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="a real SLURM"):
        require("a real SLURM")
    require(None)


def test_ctrl_c_reaches_children_even_if_the_parent_shell_ignores_it() -> None:
    code = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import subprocess, sys, tests.conftest
sys.exit(subprocess.run(["sh", "-c", "kill -INT $$; echo still here"]).returncode)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout == "", done.stderr
    assert done.returncode != 0
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_project_runs_this_checkout_and_not_an_installed_one(project: Project, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (site / "mgpu_slurm.py").write_text("")
    words = [str(tmp_path / "other/bin/python"), "-c", "import mgpu_slurm; print(mgpu_slurm.__file__)"]
    environ = os.environ | project.environ
    done = subprocess.run(words, cwd=project.folder, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == f"{REPOSITORY / 'mgpu_slurm/__init__.py'}\n", done.stderr
