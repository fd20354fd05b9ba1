"""Helpers of many tests: run the program as a user does, in a separate project folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mgpu_slurm.api import Handle
from mgpu_slurm.reports.live import status
from mgpu_slurm.run_folder.layout import RunFolder

REPOSITORY = Path(__file__).resolve().parents[1]

LACKING = "this machine lacks something: "
"""Prefix of the reason for a skipped test; see `require`."""


@dataclass
class Project:
    """A user's project folder, and the program run in it."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    executor: str = "local"
    """The executor of `submit` and `run`."""

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *words: str, prefix: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        """Start the program.

        Args:
            prefix: a command that runs the program.
        """
        command = [*prefix, sys.executable, "-m", "mgpu_slurm", *words]
        options = {"cwd": self.folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(command, text=True, env=os.environ | self.environ, **options)

    def call(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the program, and wait for its end."""
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def json(self, *words: str) -> Any:
        """Return the JSON value that a command prints; the command must succeed."""
        done = self.call(words[0], "--json", *words[1:])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def submit(self, *words: str) -> Path:
        """Start a run without following it, and return its folder."""
        return Path(self.json("submit", "--executor", self.executor, "--no-follow", *words)["folder"])

    def finish(self, folder: Path, patience: float = 90) -> dict[str, Any]:
        """Wait for the end of a run, and return its final state.

        Args:
            patience: seconds to wait for a local run.

        This process waits for a local run itself, because starting `mgpu-slurm wait` each time would take long.
        """
        if self.executor == "local":
            handle = Handle(RunFolder(folder))
            handle.wait(timeout=patience)
            return status.facts(handle.current)
        done = self.call("wait", folder.name, "--json", "--timeout", "90")
        assert done.returncode in (0, 1), done.stderr
        (facts,) = json.loads(done.stdout)
        return dict(facts)

    def run(self, *words: str) -> tuple[Path, dict[str, Any]]:
        """Submit a run and wait for its end; return its folder and its final state."""
        folder = self.submit(*words)
        return folder, self.finish(folder)


def require(problem: str | None) -> None:
    """Skip this test if the machine lacks something; with CI=true fail, so that a passing run has tested everything.

    Args:
        problem: what the machine lacks, and how to get it; None if it lacks nothing.
    """
    if problem is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{LACKING}{problem}")


def with_long(cases: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, of which only the short ones run in `make test`: the others, which take
    the processors for long and repeat much of it, are left to `make long`."""
    assert set(short) <= set(cases)
    return [
        case if case in short else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.long)
        for case in cases
    ]


def make_project(base: Path) -> Project:
    """Return a project in an empty folder outside of any git repository, with a separate index of runs.

    It runs this checkout's code, whatever version is installed.
    """
    folder = base / "project"
    folder.mkdir()
    environ = {"XDG_STATE_HOME": str(base / "state"), "XDG_CONFIG_HOME": str(base / "config")}
    environ["PYTHONPATH"] = str(REPOSITORY)
    return Project(folder, environ)


TORCH = Version(metadata.version("torch"))

compiles_ddp = pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0) and Version("2.13") > TORCH,
    reason="torch 2.9 compiles DDP wrongly with Python 3.13.0",
)


def log(folder: Path, rank: int, attempt: int = 1) -> str:
    return without_gloo((folder / "logs" / f"{attempt}-{rank}.log").read_text())


def without_gloo(text: str) -> str:
    """Leaves out what gloo of torch 2.9 prints about its connections."""
    if Version("2.13") <= TORCH:
        return text
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo] "))


def wait_until(condition: Callable[[], bool], seconds: float = 60, pause: float = 0.02) -> None:
    """Poll until the condition holds. After a slow check the pause is longer, to leave the CPU to what is awaited."""
    began = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < began + seconds, "it did not happen in time"
        time.sleep(max(pause, min(2 * (now - looked), 1.0)))
        looked = time.monotonic()


@contextmanager
def stderr_as(path: Path) -> Iterator[Path]:
    """Redirect `sys.stderr`, also of threads and forks, to a file: capfd may lose text written while it reads."""
    with open(path, "w", buffering=1) as file, redirect_stderr(file):
        yield path


def environment_in(text: str) -> dict[str, str]:
    """Of what `env -0` has printed."""
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def processes_of(folder: Path) -> list[int]:
    """Return the ids of a run's living processes, found by the variable that all of them have."""
    needle = f"MGPU_RUN_FOLDER={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def shows(text: str) -> str:
    """Return a shell script that prints a text."""
    return f"cat <<'END'\n{text}END"


UNKNOWN_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
"""A shell script that prints SLURM's error for an unknown job."""


HOSTILE = ("mgpu_slurm", "torch", "yaml", "runpy", "pydantic", "submitit", "tensorboard", "optuna", "numpy")
"""Modules that `make_hostile` shadows."""


def make_hostile(folder: Path) -> Path:
    """Write modules into a folder whose import creates a marker file; return the path of that file."""
    mark = folder.parent / f"{folder.name}-was-imported"
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r}); raise SystemExit({name!r})")
    return mark


def restore_version_0_1(project: Project) -> dict[str, Path]:
    """Copy runs of version 0.1 (tests/version_0_1) into a project; return their folders by the first part of their
    names."""
    shutil.copytree(REPOSITORY / "tests" / "version_0_1", project.folder, dirs_exist_ok=True)
    of_this_machine = {"@PROJECT@": str(project.folder), "@PYTHON@": sys.executable, "@HOST@": socket.gethostname()}
    for path in project.folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".sh", ".log"):
            text = path.read_text()
            for name, value in of_this_machine.items():
                text = text.replace(name, value)
            path.write_text(text)
    for run in project.runs.iterdir():
        # git keeps no empty folder
        (run / "logs").mkdir(exist_ok=True)
    return {path.name.partition("-")[0]: path for path in project.runs.iterdir()}
