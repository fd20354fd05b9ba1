"""`doctor` on a machine without SLURM, healthy and not, and its job on simulated nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support import Project, processes_of, wait_until

HEAVY = {"torch", "torchvision", "optuna", "tensorboard", "submitit"}


@pytest.fixture
def bare(project: Project) -> Project:
    """A project whose PATH has no sbatch."""
    project.environ["PATH"] = "/usr/bin:/bin"
    return project


def by_check(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for finding in found:
        grouped.setdefault(finding["check"], []).append(finding)
    return grouped


def test_machine_without_slurm_is_described_without_failures(bare: Project) -> None:
    # the program ends by SystemExit
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
    code += "from mgpu_slurm.cli.main import main; main(['doctor', '--json'])"
    words = [sys.executable, "-c", code]
    environ = os.environ | bare.environ
    done = subprocess.run(words, cwd=bare.folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(finding.keys() == {"level", "check", "text", "fix", "mend"} for finding in found)
    assert {finding["level"] for finding in found} <= {"ok", "warning"}
    told = by_check(found)
    assert set(told) == {"python", "packages", "folders", "slurm", "cluster file", "torch", "torchvision"}
    assert f"{len(os.sched_getaffinity(0))} cores" in told["slurm"][0]["text"]
    # torch was asked in a process of its own, and nothing was left behind
    assert set(done.stderr.splitlines()[-1].split()) & HEAVY == set()
    assert list(bare.folder.iterdir()) == []


def test_each_problem_is_reported_and_none_stops_the_other_checks(bare: Project) -> None:
    bare.write("broken/torch/__init__.py", 'raise ImportError("libcudart.so.13: cannot open shared object file")\n')
    bare.write("mgpu.yaml", "clusters: {hpc: {flag: {partition: gpu}}}\n")
    bare.environ |= {"PYTHONPATH": str(bare.folder / "broken"), "MGPU_RUNS": "/proc/runs"}
    done = bare.call("doctor", "--submit")
    assert done.returncode == 1, done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert len(failed) == 4, done.stdout
    assert failed[0].startswith("failed   runs folder /proc/runs: not writable (")
    assert failed[1].startswith(f"failed   {bare.folder}/mgpu.yaml: cluster 'hpc': unknown key 'flag'")
    assert failed[2] == "failed   torch fails on import: ImportError: libcudart.so.13: cannot open shared object file"
    assert failed[3].startswith("failed   the checkup was not submitted: runs folder '/proc/runs' cannot be written (")
    assert done.stderr == ""


def test_several_clusters_without_containers_are_no_problem(bare: Project) -> None:
    bare.write("mgpu.yaml", "clusters: {a: {}, b: {}}\n")
    done = bare.call("doctor", "--json", "--executor", "slurm")
    assert done.returncode == 0, done.stdout
    assert "container" not in by_check(json.loads(done.stdout))


def test_container_that_fails_here_is_reported_once(bare: Project) -> None:
    done = bare.call("doctor", "--submit", "--executor", "local", "--container", "none.sif")
    assert done.returncode == 1, done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert failed == ["failed   container 'none.sif': there is no such file or folder: check the path"]


def test_job_flags_are_refused_without_submit(bare: Project) -> None:
    done = bare.call("doctor", "--nodes", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mgpu-slurm: --nodes only applies with --submit\n"


def test_check_of_all_nodes_needs_slurm(bare: Project) -> None:
    for words, code, line in (
        ((), 3, "--nodes all needs SLURM, and there is no sbatch on PATH: log in to the cluster"),
        (("--executor", "local"), 2, "--nodes all --executor local: only --executor slurm has job arrays"),
    ):
        done = bare.call("doctor", "--nodes", "all", *words)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", f"mgpu-slurm: {line}\n")
    done = bare.call("doctor", "--nodes", "most", "--submit")
    assert done.returncode == 2
    assert "'most' is neither a number nor all" in done.stderr


def test_job_measures_two_nodes_and_leaves_no_run_folder(bare: Project) -> None:
    done = bare.call("doctor", "--submit", "--json", "--executor", "local", "--cpus-per-task", "999")
    assert done.returncode == 0, done.stderr
    told = by_check(json.loads(done.stdout))
    measured = (
        "versions",
        "limits",
        "gpus",
        "ports",
        "rendezvous",
        "clocks",
        "shared folder",
        "file locks",
        "all-reduce",
    )
    for check in measured:
        assert {finding["level"] for finding in told[check]} <= {"ok", "warning"}, told[check]
    (cores,) = told["cores"]
    assert cores["level"] == "warning"
    assert cores["text"].startswith("ranks 0-1 on local[1-2]: requested 999 cores per rank")
    assert len(told["file locks"]) == 2
    assert "64 MB in " in told["all-reduce"][0]["text"]
    assert "the checkup is job " in done.stderr
    assert list(bare.runs.iterdir()) == []


def test_ctrl_c_cancels_the_job(bare: Project) -> None:
    process = bare.start("doctor", "--submit", "--executor", "local")
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "the checkup is job " in line
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=100)
    assert process.returncode == 130
    (folder,) = bare.runs.iterdir()
    assert f"mgpu-slurm: cancelled {folder.name}\n" in rest
    assert bare.finish(folder)["state"] == "CANCELLED"
    wait_until(lambda: processes_of(folder) == [])
