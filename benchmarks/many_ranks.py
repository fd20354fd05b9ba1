"""128 ranks on 16 nodes of a real SLURM: start, agreed stop, requeue, and the loss of a rank; and 10,000 tasks."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Estimate
from benchmarks.project import JOBS, MGPU, Project, project
from benchmarks.report import Row, Section
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.cluster import Cluster
from tests.support import processes_of

NODES, RANKS_PER_NODE = 16, 8
RANKS = NODES * RANKS_PER_NODE
TASKS = 10_000
PATIENCE = 900.0


def run() -> Section:
    with (
        tempfile.TemporaryDirectory(prefix="mgpu-bench-ranks-") as place,
        Cluster.up(Path(place) / "cluster", large_nodes=NODES) as cluster,
        project() as plain,
    ):
        seconds, megabytes = _measure(replace(plain, more=cluster.environ), cluster, Path(place))
    rows = [Row(f"{what}, {RANKS} ranks", _once(value), "s", 1) for what, value in seconds.items()]
    rows.append(Row(f"memory of a rank, {RANKS} ranks", _once(megabytes), "MB", 0))
    return Section("many-ranks", _ABOUT, rows, [])


def tasks() -> Section:
    """A group of 10,000 tasks, held, in ten job arrays."""
    with (
        tempfile.TemporaryDirectory(prefix="mgpu-bench-tasks-") as place,
        Cluster.up(Path(place) / "cluster") as cluster,
        project() as plain,
    ):
        made = replace(plain, more=cluster.environ)
        held = ["--executor", "slurm", "--gpus-per-node", "0", "--sbatch", "hold", "--no-follow", "--name", "group"]
        submit = [*MGPU, "submit", *held, "--seeds", str(TASKS), "--", "sh", "-c", "true {seed}"]
        seconds = {"`submit`": made.wall_time(submit), "`status`": made.wall_time([*MGPU, "status"])}
        seconds["`cancel`"] = made.wall_time([*MGPU, "cancel", "group"])
        seconds["`status` after it"] = made.wall_time([*MGPU, "status"])
    rows = [Row(f"{what}, {TASKS:,} tasks", _once(value), "s", 1) for what, value in seconds.items()]
    about = "Whole commands on a SLURM 22.05 of this machine, once each. The tasks are held, in ten job arrays."
    return Section("many-tasks", about, rows, [])


def _once(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _measure(made: Project, cluster: Cluster, out: Path) -> tuple[dict[str, float], float]:
    """Seconds of each part, and megabytes of each rank."""
    start = time.monotonic()
    nodes = ["--nodes", str(NODES), "--ntasks-per-node", str(RANKS_PER_NODE), "--gpus-per-node", "0"]
    words = [*nodes, "--exclude", "n[1-4]", "--time", "2:00:00", f"{JOBS}.many_ranks", f"out={out}"]
    facts = json.loads(made.call([*MGPU, "submit", "--executor", "slurm", "--no-follow", "--json", *words]))
    folder, job = RunFolder(Path(facts["folder"])), facts["job_id"]

    def seconds_until(what: Callable[[], bool]) -> float:
        nonlocal start
        while not what():
            if time.monotonic() > start + PATIENCE:
                raise RuntimeError(f"not in {PATIENCE:g} s: {records.read_state(folder)}")
            time.sleep(0.05)
        took, start = time.monotonic() - start, time.monotonic()
        return took

    def has_begun(attempt: int) -> Callable[[], bool]:
        return (out / f"attempt-{attempt}").exists

    found = {"from submission to the first step": seconds_until(has_begun(1))}
    megabytes = _memory(folder) / RANKS
    start = time.monotonic()
    cluster.run("scancel", "--signal=USR2", job)
    found["from the signal to the requeue, with a checkpoint"] = seconds_until(
        lambda: cluster.job(job)["JobState"] == "PENDING"
    )
    cluster.start_now(job)
    start = time.monotonic()
    found["from the start of the requeued job to the next step"] = seconds_until(has_begun(2))
    os.kill(max(_ranks(folder)), signal.SIGKILL)
    found["from the kill of a rank to the next attempt's first step"] = seconds_until(has_begun(3))
    made.call([*MGPU, "cancel", folder.run])
    found["from the cancel to the end of the job"] = seconds_until(lambda: cluster.job(job)["JobState"] == "CANCELLED")
    return found, megabytes


def _ranks(folder: RunFolder) -> list[int]:
    return [pid for pid in processes_of(folder.path) if b"mgpu_slurm.job" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _memory(folder: RunFolder) -> float:
    """Megabytes of all processes of the run; what they share counts once."""
    shares = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in processes_of(folder.path))
    return sum(int(text.split("\nPss:")[1].split()[0]) for text in shares) / 1024


_ABOUT = (
    f"{NODES} nodes of eight cores, as SLURM 22.05 believes, on the cores of this one machine: each has"
    f" {RANKS_PER_NODE} ranks, forked from one process of the node. DDP of a tiny model by gloo. Once each: all ranks"
    " share two cores. Memory is the proportional set size of all processes of the run, divided by its ranks."
)
