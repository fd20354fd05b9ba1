"""What the tests rely on themselves."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

from tests.support import REPOSITORY, Project


def test_a_project_runs_the_code_of_this_checkout_and_not_an_installed_one(project: Project, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (site / "mgpu_slurm.py").write_text("")
    words = [str(tmp_path / "other/bin/python"), "-c", "import mgpu_slurm; print(mgpu_slurm.__file__)"]
    environ = os.environ | project.environ
    done = subprocess.run(words, cwd=project.folder, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == f"{REPOSITORY / 'mgpu_slurm/__init__.py'}\n", done.stderr
