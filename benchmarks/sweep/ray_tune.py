"""Ray Tune, in an environment of its own: this project does not depend on it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.project import Project

VERSION = "2.60.0"
_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = _ROOT / ".bench" / f"ray-{VERSION}"
"""Made by the first run, kept for those after it."""


def install() -> None:
    """Makes the environment, unless it is there; torch and what else Ray does not ask for are this one's."""
    ready = _ENVIRONMENT / "ready"
    if ready.exists():
        return
    shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", _ENVIRONMENT], check=True)
    subprocess.run([_python(), "-m", "pip", "install", "--quiet", f"ray[tune]=={VERSION}"], check=True)
    (site_packages,) = _ENVIRONMENT.glob("lib/python*/site-packages")
    (site_packages / "beside_this_project.pth").write_text(f"{sysconfig.get_path('purelib')}\n{_ROOT}\n")
    ready.touch()


def call(made: Project, script: str, **options: Any) -> Any:
    """What a script of `benchmarks.jobs` says in the last line that it prints, as JSON.

    Args:
        options: what the script is given.
    """
    # its sockets lie below this folder, and their paths have to be short
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        options["folder"] = folder
        # it would tell its makers that it was used
        alone = replace(made, more=made.more | {"RAY_USAGE_STATS_ENABLED": "0"})
        printed = alone.call([_python(), "-m", f"benchmarks.jobs.{script}", json.dumps(options)])
    return json.loads(printed.splitlines()[-1])


def _python() -> str:
    return str(_ENVIRONMENT / "bin" / "python")
