"""What ranks use on the nodes of a real SLURM, against what SLURM's own accounting says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.usage_records import read_usage
from mgpu_slurm.slurm.step_accounting import AccountedStep, parse_steps, steps_command
from tests.on_slurm.cluster import Cluster
from tests.support import Project, log, wait_until, with_long

JOB = """
    import subprocess
    import sys
    import time
    from pathlib import Path


    def train(run, gate: str):
        block = bytearray(b"x") * ((run.rank + 2) * 50 << 20)
        if run.is_main:
            # what no sample of SLURM or ours needs to see
            subprocess.run([sys.executable, "-c", "bytearray(b'x') * (900 << 20)"], check=True)
        while not Path(gate).exists():
            time.sleep(0.05)
        return {"length": len(block)}
"""

SCRIPT = """
    import os
    import time
    from pathlib import Path

    block = bytearray(b"x") * ((int(os.environ["RANK"]) + 2) * 50 << 20)
    while not Path(os.environ["GATE"]).exists():
        time.sleep(0.05)
"""

TWO_NODES = ("--nodes", "2", "--nodelist", "n1,n2", "--gpus-per-node", "0", "--ntasks-per-node", "2")


@pytest.fixture
def gate(slurm_project: Project) -> Path:
    """Ranks hold their memory until this file exists."""
    return slurm_project.folder / "gate"


def seen_by_slurm(cluster: Cluster, job: str) -> int:
    """Return the largest memory of a rank that SLURM has seen so far, in kilobytes."""
    rows = cluster.run("sstat", "--noheader", "-P", "-n", "-o", "MaxRSS", "-j", f"{job}.0").stdout.split()
    return int(float(rows[0].rstrip("K"))) if rows and rows[0].endswith("K") else 0


def accounted(cluster: Cluster, job: str) -> list[AccountedStep]:
    return parse_steps(cluster.run(*steps_command([job])).stdout)


@pytest.mark.parametrize("kind", with_long(["function", "command"], {"command"}))
def test_peaks_are_those_of_accounting_or_higher(
    slurm_project: Project, cluster: Cluster, asked: Path, gate: Path, kind: str
) -> None:
    slurm_project.write("train.py", JOB)
    slurm_project.write("script.py", SCRIPT)
    slurm_project.write("mgpu.yaml", f"clusters: {{here: {{environment: {{GATE: {gate}}}}}}}\n")
    target = ("train.py", f"gate={gate}") if kind == "function" else ("--", "python", "script.py")
    options = ("--mem", "3G", "--time", "10", "--sbatch", "acctg-freq=task=1")
    run = slurm_project.submit(*TWO_NODES, *options, *target)
    wait_until(lambda: bool(read_usage(RunFolder(run))), seconds=60)
    job = slurm_project.json("status", run.name)[0]["job_id"]
    # ranks of a function are processes below the first task of their node
    largest = 200 + 250 if kind == "function" else 250
    wait_until(lambda: seen_by_slurm(cluster, job) > largest << 10, pause=0.5)
    gate.touch()
    assert slurm_project.finish(run)["state"] == "COMPLETED", log(run, 0)
    wait_until(lambda: bool(accounted(cluster, job)) and accounted(cluster, job)[0].mem > 0, pause=0.5)
    (step,) = accounted(cluster, job)

    nodes = read_usage(RunFolder(run))
    assert [(each.attempt, each.node, sorted(each.ends)) for each in nodes] == [(1, "n1", [0, 1]), (1, "n2", [2, 3])]
    # accounting has the mean over the nodes, or the task that needed most, below which all ranks of a node may be
    assert max(each.peak for each in nodes) >= 0.95 * step.mem
    own = {"n1": 2 * 50 + 3 * 50, "n2": 4 * 50 + 5 * 50}
    own["n1"] += 900 if kind == "function" else 0
    for each in nodes:
        assert own[each.node] << 20 < each.peak < (own[each.node] << 20) + (1500 << 20)
        assert max(sample.ranks for sample in each.samples) == 2

    asked.write_text("")
    (found,) = slurm_project.json("efficiency", run.name)["runs"]
    assert found["asked"]["mem"] == 3 << 30
    assert found["used"]["mem"] == max(*(each.peak for each in nodes), step.mem)
    assert sum(found["ledger"].values()) == pytest.approx(found["used"]["seconds"] * 4)
    assert asked.read_text().count("sacct") == 1
    # its answer is kept
    (again,) = slurm_project.json("efficiency", run.name)["runs"]
    assert again == found
    assert asked.read_text().count("sacct") == 1
