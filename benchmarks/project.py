"""A throw-away project with runs of its own, and the program as a person calls it there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOBS = "benchmarks.jobs"
MGPU = [str(Path(sys.executable).with_name("mgpu-slurm"))]
"""The console script beside this interpreter."""


@dataclass(frozen=True)
class Project:
    """A folder in git with this package, and so the jobs, in it."""

    base: Path
    more: dict[str, str] = field(default_factory=dict)
    """Variables for its commands."""

    @property
    def folder(self) -> Path:
        return self.base / "project"

    @property
    def runs(self) -> Path:
        return self.base / "runs"

    @property
    def environ(self) -> dict[str, str]:
        own = {"MGPU_RUNS": str(self.runs), "OMP_NUM_THREADS": "1"}
        own |= {f"XDG_{kind}_HOME": str(self.base / kind.lower()) for kind in ("STATE", "CONFIG")}
        return os.environ | own | self.more

    def edit(self) -> None:
        """Changes the code, so that the next submission is the first one of it."""
        (self.folder / "edited.txt").write_text(str(time.monotonic_ns()))

    def call(self, command: list[str]) -> str:
        """What a command prints; it has to succeed."""
        done = subprocess.run(command, cwd=self.folder, env=self.environ, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def wall_time(self, command: list[str]) -> float:
        """Seconds from the start of a command to its end."""
        start = time.perf_counter()
        self.call(command)
        return time.perf_counter() - start

    def submit(self, *words: str) -> tuple[float, Path]:
        """Submits a local run without following it: seconds until the program returned, and the run's folder."""
        start = time.perf_counter()
        printed = self.call([*MGPU, "submit", "--executor", "local", "--no-follow", "--json", *words])
        return time.perf_counter() - start, Path(json.loads(printed)["folder"])

    def wait(self, folder: Path) -> dict[str, Any]:
        """Waits for the end of a run, which has to complete; its facts."""
        (facts,) = json.loads(self.call([*MGPU, "wait", folder.name, "--json"]))
        return dict(facts)


@contextmanager
def project(*packages: str) -> Iterator[Project]:
    """
    Args:
        packages: what is in it beside this one.
    """
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as base:
        made = Project(Path(base))
        own = Path(__file__).parent
        for package in (own.name, *packages):
            source = own.parent / package
            shutil.copytree(source, made.folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        made.call(["git", "init", "--quiet"])
        yield made
