"""`doctor` on a real SLURM, sound and not; and what ranks are told at their start of a node that has other versions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.doctor.job_checks import requeue_findings
from tests.on_slurm.cluster import Cluster
from tests.support import Project

SOUND = {"versions", "cores", "gpus", "ports", "file locks"}
TIMED = {
    "limits": r"GB free on n\d",
    "names": r"n\[?[12]",
    "rendezvous": r"2 ranks met, connected in [\d.]+ .?s; round trip [\d.]+ .?s",
    "clocks": r"n\[?[12].* [\d.]+ .?s",
    "shared folder": r"n\[1-2\] see each other's files \(.* [\d.]+ .?s",
    "all-reduce": r"n\[1-2\].*: 1 MB in [\d.]+ .?s",
}
"""What a slow machine may be warned of, with the words that tell that it was measured."""

MEASURED = SOUND | TIMED.keys()


def doctor(project: Project, *words: str) -> tuple[int, dict[str, list[dict[str, Any]]], str]:
    """Exit code, findings by check, and what was said beside them."""
    done = project.call("doctor", "--json", *words)
    grouped: dict[str, list[dict[str, Any]]] = {}
    assert done.returncode in (0, 1), done.stderr
    for finding in json.loads(done.stdout):
        grouped.setdefault(finding["check"], []).append(finding)
    return done.returncode, grouped, done.stderr


def texts(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(finding["level"], finding["text"]) for finding in found]


def test_healthy_cluster_is_described_and_measured(slurm_project: Project, cluster: Cluster) -> None:
    code, told, said = doctor(slurm_project, "--submit", "--gpus-per-node", "0", "--cpus-per-task", "1")
    assert code == 0, told
    ((level, version),) = texts(told["version"])
    assert level == "ok"
    assert re.fullmatch(rf"SLURM {cluster.slurm}\.\d+: supported; ranks get their cores by SRUN_CPUS_PER_TASK", version)
    assert texts(told["partitions"]) == [
        ("ok", "partition main (default): 4 nodes, 2 (no type) or 2 (a100) GPUs each, no time limit"),
        ("ok", "partition high: 4 nodes, 2 (no type) or 2 (a100) GPUs each, no time limit"),
    ]
    # as the testbed sets it
    assert texts(told["kill wait"])[0][0] == "warning"
    assert told["accounting"][0]["level"] == "ok"
    assert told["flags"][0]["level"] == "ok"
    assert texts(told["requeue"])[-1] == ("ok", "the job may be requeued")
    assert told.keys() >= MEASURED
    for check in SOUND:
        assert {finding["level"] for finding in told[check]} == {"ok"}, told[check]
    for check, words in TIMED.items():
        assert "failed" not in {finding["level"] for finding in told[check]}, told[check]
        assert re.search(words, told[check][0]["text"]), told[check]
    assert "; Ctrl-C cancels it" in said
    assert list(slurm_project.runs.iterdir()) == []


@pytest.mark.long
def test_single_node_can_be_checked(slurm_project: Project) -> None:
    code, told, _ = doctor(slurm_project, "--submit", "--nodes", "1", "--gpus-per-node", "0")
    assert code == 0, told
    assert re.match("rendezvous: 1 rank met", told["rendezvous"][0]["text"])
    assert list(slurm_project.runs.iterdir()) == []


@pytest.mark.long
def test_problems_of_a_cluster_are_reported(cluster: Cluster, slurm_project: Project) -> None:
    cluster.change_site(accounting=False)
    cluster.drain("n1")
    slurm_project.write(
        "mgpu.yaml", "cluster: a\nclusters: {a: {flags: {gpus-per-node: 9}}, b: {flags: {partition: x}}}\n"
    )
    slurm_project.environ["SBATCH_TIMELIMIT"] = "5"
    # two fake GPUs on each node, and a torch that has no use for them
    words = ("--submit", "--cluster", "b", "--partition", "main", "--gpus-per-node", "2", "--ntasks-per-node", "1")
    code, told, said = doctor(slurm_project, *words, "--cpus-per-task", "4")
    assert code == 1
    assert texts(told["partitions"])[0] == (
        "ok",
        "partition main (default): 4 nodes (1 drained), 2 (no type) or 2 (a100) GPUs each, no time limit",
    )
    assert told["accounting"][0]["level"] == "warning"
    assert told["accounting"][0]["text"].startswith(
        "no accounting (sacct failed (exit code 1): Slurm accounting storage"
    )
    assert texts(told["variables"]) == [("warning", "SBATCH_TIMELIMIT in this shell does not reach runs")]
    meant, other = told["flags"]
    assert (meant["level"], other["level"]) == ("failed", "warning")
    assert meant["text"].startswith("cluster 'a': ")
    assert "cluster 'b' does not fit this SLURM: --partition x" in other["text"]
    assert texts(told["gpus"]) == [
        ("failed", "ranks 0-1 on n[2-3]: requested 2 GPUs per node, but torch sees none: running on the CPU")
    ]
    (cores,) = told["cores"]
    assert cores["level"] == "warning"
    assert "requested 4 cores per rank" in cores["text"]
    # the run of a checkup that failed stays, and is named
    (folder,) = slurm_project.runs.iterdir()
    assert f"the checkup's run is kept: {folder}" in said


def test_disabled_requeueing_is_detected_from_the_job(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.change_site(submit_script="forbid_requeue")
    monkeypatch.setenv("PATH", cluster.environ["PATH"])
    submitted = cluster.run("sbatch", "--parsable", "--requeue", "--hold", "--output=/dev/null", "--wrap=true")
    (found,) = requeue_findings(submitted.stdout.strip())
    assert (found.level, found.text) == ("warning", "this site disables requeueing (--requeue is dropped)")


def test_no_job_is_submitted_if_the_controller_is_down(cluster: Cluster, slurm_project: Project) -> None:
    cluster.stop_controller()
    code, told, _ = doctor(slurm_project, "--submit")
    assert code == 1
    (controller,) = told["controller"]
    assert controller["level"] == "failed"
    assert "is DOWN" in controller["text"]
    assert not told.keys() & MEASURED
    assert not slurm_project.runs.exists()


def test_ranks_warn_if_their_node_differs_from_the_submission(cluster: Cluster, slurm_project: Project) -> None:
    # held, so that the submission's record can be made one of another environment before any rank reads it
    words = (
        "submit",
        "--no-follow",
        "--nodes",
        "2",
        "--gpus-per-node",
        "0",
        "--cpus-per-task",
        "4",
        "--sbatch",
        "hold",
    )
    submitted = json.loads(slurm_project.call(words[0], "--json", *words[1:], "--", "true").stdout)
    folder = Path(submitted["folder"])
    record = json.loads((folder / "environment.json").read_text())
    here = record["packages"]["torch"]
    record["packages"] |= {"torch": "9.9", "absent": "1.0"}
    (folder / "environment.json").write_text(json.dumps(record))
    assert cluster.run("scontrol", "release", submitted["job_id"]).returncode == 0

    done = slurm_project.call("wait", folder.name)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    other = f"this node has torch {here} instead of 9.9, no absent (1.0 at the submission)"
    assert f"warning   ranks 0-1 on n[1-2]: {other}" in lines
    assert any(line.startswith("warning   ranks 0-1 on n[1-2]: requested 4 cores per rank, but ") for line in lines)
    shown = slurm_project.call("logs", folder.name)
    assert f"mgpu_slurm: warning: {other}\n" in shown.stdout
    assert f"-- warning: rank 1 on n2: {other}\n" in shown.stderr
