"""On a real SLURM, the tests' own of four nodes here: beside plain submitit, and arrays beside bare sbatch."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.measure import difference, interleave, median, ratio
from benchmarks.project import MGPU, Project, project
from benchmarks.report import Row, Section
from tests.on_slurm.cluster import Cluster

ROUNDS = 12
ARRAY_ROUNDS = 16
SUBMITIT_TARGET = 1.0
TASKS = 1000
ARRAY_TARGET = 2.0
STATUS_TARGET_S = 1.0


def run() -> Section:
    with (
        tempfile.TemporaryDirectory(prefix="mgpu-bench-slurm-") as place,
        Cluster.up(Path(place) / "cluster") as cluster,
        project() as plain,
    ):
        made = replace(plain, more=cluster.environ | {"SUBMITIT_FOLDER": f"{place}/submitit", "PYTHONPATH": "."})
        results = interleave(_to_the_result(made), ROUNDS)
        cluster.reset()
        arrays = interleave(_arrays(made, cluster), ARRAY_ROUNDS)
    return Section("slurm", _ABOUT, [*_result_rows(results), *_array_rows(arrays)], _NOTES)


# -- from submission to result


CLUSTERS = """\
cluster: forked
clusters:
  forked: {}
  each: {environment: {MGPU_FORK_RANKS: "0"}}
"""


def _to_the_result(made: Project) -> dict[str, Callable[[], float]]:
    (made.folder / "mgpu.yaml").write_text(CLUSTERS)
    return {case: partial(_seconds_to_the_result, made, *words) for case, words in _SCRIPTS.items()}


def _seconds_to_the_result(made: Project, script: str, *words: str) -> float:
    with tempfile.TemporaryDirectory(dir=made.base) as out:
        return float(made.call([sys.executable, "-m", f"benchmarks.jobs.{script}", out, *words]))


_SCRIPTS = {
    "forked": ("submit_here", "forked"),
    "each": ("submit_here", "each"),
    "submitit": ("submit_plain",),
}
_NAMES = {
    "forked": "mgpu_slurm",
    "each": "mgpu_slurm, with `MGPU_FORK_RANKS=0`",
    "submitit": "submitit",
}


def _result_rows(seconds: dict[str, list[float]]) -> list[Row]:
    forked, each = (ratio(seconds[case], seconds["submitit"]) for case in ("forked", "each"))
    return [
        Row("submission to result, mgpu_slurm / submitit", forked, "", 3, SUBMITIT_TARGET),
        Row("submission to result, mgpu_slurm with `MGPU_FORK_RANKS=0` / submitit", each, "", 3),
        *(Row(f"submission to result, {name}", median(seconds[case]), "s", 2) for case, name in _NAMES.items()),
    ]


# -- arrays


def _arrays(made: Project, cluster: Cluster) -> dict[str, Callable[[], float]]:
    """Each leaves an empty queue. The tasks are held, so that none runs into the next measurement."""
    script = made.base / "array.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --array=0-{TASKS - 1} --hold --output=/dev/null\ntrue\n")
    command = ["--", "sh", "-c", "true {seed}"]
    submit = [*MGPU, "submit", "--executor", "slurm", "--gpus-per-node", "0", "--sbatch", "hold", "--no-follow"]
    return {
        "one": partial(_timed, made, cluster, [*submit, *command]),
        "group": partial(_timed, made, cluster, [*submit, "--seeds", str(TASKS), *command]),
        "sbatch": partial(_timed, made, cluster, ["sbatch", str(script)]),
        "status": partial(_status, made, cluster, [*submit, "--seeds", str(TASKS), *command]),
    }


def _timed(made: Project, cluster: Cluster, command: list[str]) -> float:
    try:
        return made.wall_time(command)
    finally:
        cluster.reset()
        # it keeps jobs that have ended for minutes, and has room for 20,000
        cluster.forget_jobs()
        _forget_runs(made)


def _status(made: Project, cluster: Cluster, submit: list[str]) -> float:
    made.call(submit)
    return _timed(made, cluster, [*MGPU, "status"])


def _forget_runs(made: Project) -> None:
    """Runs of earlier measurements cost `status` nothing."""
    for folder in list(made.runs.iterdir()) if made.runs.exists() else []:
        os.rename(folder, made.base / f"over-{folder.name}-{time.monotonic_ns()}")


def _array_rows(seconds: dict[str, list[float]]) -> list[Row]:
    # what the array adds to the submission of one run, beside what it adds to nothing
    added = difference(seconds["group"], seconds["one"])
    allowed = [ARRAY_TARGET * bare + one for bare, one in zip(seconds["sbatch"], seconds["one"], strict=True)]
    return [
        Row(
            f"`submit --seeds {TASKS}` / (2 x bare `sbatch --array` + a submission of one run)",
            ratio(seconds["group"], allowed),
            "",
            2,
            1.0,
        ),
        Row(f"`submit --seeds {TASKS}`", median(seconds["group"]), "s", 2),
        Row("`submit` of one run", median(seconds["one"]), "s", 2),
        Row(f"`submit --seeds {TASKS}` - `submit` of one run", added.scaled(1000), "ms", 0),
        Row(f"bare `sbatch --array=0-{TASKS - 1}`", median(seconds["sbatch"]).scaled(1000), "ms", 0),
        Row(f"`status` of a group of {TASKS:,} pending tasks", median(seconds["status"]), "s", 2, STATUS_TARGET_S),
    ]


_ABOUT = (
    "Four nodes of a SLURM 22.05 on the cores of this one machine (`make cluster`). From submission to result: three"
    " steps of a tiny DDP model on two nodes with two ranks each, `submit(...).result()` beside submitit's"
    " `SlurmExecutor.submit(...).results()`, timed in the script after its imports. Arrays: whole commands, the tasks"
    " held."
)
_NOTES = [
    "All ranks share the cores of one machine, so each import of torch counts for all.",
]
