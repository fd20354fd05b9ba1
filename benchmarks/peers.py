"""Ray Tune and Syne Tune, in an environment of their own: this project does not depend on them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.project import Project

RAY, SYNE_TUNE = "2.60.0", "0.16.0"
_ROOT = Path(__file__).parents[1]
_ENVIRONMENT = _ROOT / ".bench" / f"ray-{RAY}-syne-tune-{SYNE_TUNE}"
"""Made by the first run, kept for those after it."""


def install() -> None:
    """Make the environment, unless it exists; torch and what else these do not require are this one's."""
    ready = _ENVIRONMENT / "ready"
    if ready.exists():
        return
    shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", _ENVIRONMENT], check=True)
    both = [f"ray[tune]=={RAY}", f"syne-tune=={SYNE_TUNE}", "optuna"]
    subprocess.run([_python(), "-m", "pip", "install", "--quiet", *both], check=True)
    (site_packages,) = _ENVIRONMENT.glob("lib/python*/site-packages")
    (site_packages / "beside_this_project.pth").write_text(f"{sysconfig.get_path('purelib')}\n{_ROOT}\n")
    ready.touch()


def call(made: Project, script: str, **options: Any) -> Any:
    """Return what a script of `benchmarks.jobs` prints in its last line, as JSON.

    Args:
        options: the options of the script.
    """
    # its sockets lie below this folder, and their paths have to be short
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        options["folder"] = folder
        # it would tell its makers that it was used
        alone = replace(made, more=made.more | {"RAY_USAGE_STATS_ENABLED": "0"})
        printed = alone.call([_python(), "-m", f"benchmarks.jobs.{script}", json.dumps(options)])
    return json.loads(printed.splitlines()[-1])


def simulated(method: str, cases: Sequence[tuple[str, int, int, int]]) -> list[list[float]]:
    """Return the regrets of simulated sweeps, as `Simulation.regrets` does.

    Args:
        cases: family, seed, workers and whole trials of each.
    """
    command = [_python(), "-m", "benchmarks.search.peer_sweeps", method]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, cwd=_ROOT, check=True)
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _python() -> str:
    return str(_ENVIRONMENT / "bin" / "python")
