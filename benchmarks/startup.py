"""How long the program takes to start: `--help`, and `status` over thousands of finished runs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.measure import Estimate, interleave, median, ratio
from benchmarks.project import MGPU, Project, project
from benchmarks.report import Row, Section
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import update_state

ROUNDS = 30
RUNS, MANY_RUNS = 1000, 5000
HELP_TARGET_MS = 150
STATUS_TARGET_MS, MANY_TARGET_MS = 400, 1000
KEPT_OUT = ("torch", "optuna", "tensorboard", "submitit")
"""Packages that a command which only looks must not import."""

HELP, STATUS, BARE = [*MGPU, "--help"], [*MGPU, "status"], [sys.executable, "-c", "pass"]


def run() -> Section:
    with project() as made, project() as large:
        _finish_runs(made, RUNS)
        _finish_runs(large, MANY_RUNS)
        commands = {"help": HELP, "status": STATUS, "bare": BARE}
        cases = {name: partial(made.wall_time, command) for name, command in commands.items()}
        cases["many"] = partial(large.wall_time, STATUS)
        seconds = interleave(cases, ROUNDS)
        imported = {command[-1]: _imports(made, command) for command in (HELP, STATUS)}
    status = f"`mgpu-slurm status`, {RUNS:,} finished runs"
    rows = [
        Row("`mgpu-slurm --help`", median(seconds["help"]).scaled(1000), "ms", 0, HELP_TARGET_MS),
        Row(status, median(seconds["status"]).scaled(1000), "ms", 0, STATUS_TARGET_MS),
        Row(
            f"`mgpu-slurm status`, {MANY_RUNS:,} finished runs",
            median(seconds["many"]).scaled(1000),
            "ms",
            0,
            MANY_TARGET_MS,
        ),
        Row("a bare `python -c pass`", median(seconds["bare"]).scaled(1000), "ms", 0),
        Row("`--help` / bare Python", ratio(seconds["help"], seconds["bare"]), "", 2),
        Row("`status` / bare Python", ratio(seconds["status"], seconds["bare"]), "", 2),
        *(_import_row(name, modules) for name, modules in imported.items()),
    ]
    about = (
        "Wall time of the whole process, from start to exit, its output read through a pipe. The runs are copies of one"
        " finished local run, each with a state of its own; files are in the page cache."
    )
    return Section("startup", about, rows, [_installed_note()])


def _finish_runs(made: Project, count: int) -> None:
    """Fills the runs folder with copies of a real finished run."""
    _, folder = made.submit("--name", "finished", "--", "true")
    made.wait(folder)
    for number in range(1, count):
        copy = RunFolder(made.runs / f"finished-{number:04d}")
        shutil.copytree(folder, copy.path)
        metrics = {"accuracy": 1 - 1 / (number + 1), "loss": 1 / number}
        update_state(copy, sync=False, run=copy.run, step=450, progress=10, metrics=metrics)
    found = len([path for path in made.runs.iterdir() if (path / "state.json").exists()])
    if found != count:
        raise RuntimeError(f"made {found} runs, wanted {count}")


def _imports(made: Project, command: list[str]) -> list[str]:
    """Which of the packages to keep out a command imports, by the interpreter's own account."""
    told = [sys.executable, "-X", "importtime", *command]
    done = subprocess.run(told, cwd=made.folder, env=made.environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr}")
    roots = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    if Path(MGPU[0]).stem.replace("-", "_") not in roots:
        raise RuntimeError(f"{command}: its imports cannot be read")
    return [name for name in KEPT_OUT if name in roots]


def _import_row(name: str, found: list[str]) -> Row:
    count = float(len(found))
    what = f"heavy packages that `{name}` imports" + (f": {', '.join(found)}" if found else "")
    return Row(what, Estimate(count, count, count, 1), "", 0, 0)


def _installed_note() -> str:
    absent = [name for name in KEPT_OUT if importlib.util.find_spec(name) is None]
    state = f"NOT INSTALLED here, so nothing is said of them: {', '.join(absent)}" if absent else "all installed"
    return f"Heavy packages are {', '.join(KEPT_OUT)}; {state}."
