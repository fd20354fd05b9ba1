"""`doctor --nodes all` on a real SLURM: each node in a task of its own, whatever is wrong with it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster import Cluster
from tests.support import Project, wait_until

NODES = ("doctor", "--nodes", "all", "--gpus-per-node", "0")


@pytest.fixture
def full_disk(cluster: Cluster) -> Iterator[str]:
    """A folder on a file system without room, as nodes see it."""
    (cluster.folder / "full").mkdir(exist_ok=True)
    inside = "/run/cluster/full"
    assert cluster.run("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", inside).returncode == 0
    assert cluster.run("dd", "if=/dev/zero", f"of={inside}/file").returncode == 1
    yield inside
    assert cluster.run("umount", "--lazy", inside).returncode == 0


@pytest.mark.every_slurm
def test_each_node_is_checked_and_bad_ones_are_named_with_the_reason(
    cluster: Cluster, slurm_project: Project, full_disk: str
) -> None:
    cluster.drain("n1")
    slurm_project.write(
        "mgpu.yaml",
        f"""
        cluster: here
        clusters:
          here:
            setup:
              - if [ $SLURMD_NODENAME = n2 ]; then echo no python here >&2; exit 127; fi
              - if [ $SLURMD_NODENAME = n3 ]; then export TMPDIR={full_disk}; fi
        """,
    )
    done = slurm_project.call(*NODES)
    assert done.returncode == 1, done.stderr
    table, reasons, last = done.stdout.split("\n\n")
    size, rate = r"[\d.]+ [MGT]B", r"[\d.]+ [KMG]B/s"
    header, *lines = table.splitlines()
    assert header.split() == ["NODE", "STATE", "FREE", "WRITE", "MEMORY", "NETWORK"]
    forms = ("n1 +drained", "n2 +broken", f"n3 +broken +{size} +{rate}", f"n4 +ok +{size} +{rate} +{size} +{rate}")
    for line, form in zip(lines, forms, strict=True):
        assert re.fullmatch(form, line), line
    # lines are as long as they are where there is no terminal
    failed, full, down = (" ".join(line.split()) for line in reasons.splitlines())
    cause = "its batch script failed before the ranks were started: no python here"
    assert failed == f"broken n2: its task ended as FAILED: {cause}"
    assert full == f"broken n3: cannot write to {full_disk}: No space left on device"
    assert down.startswith("down n1: drained: by hand (root, ")
    assert last == "--exclude n[2-3]\n"
    # the usable nodes were tasks of one array, whose runs are there to be looked at
    assert re.search(r"checking 3 nodes by job \d+; Ctrl-C ends it and shows what is known", done.stderr)
    (folder,) = slurm_project.runs.iterdir()
    assert f"the runs are kept: {folder}" in done.stderr
    assert cluster.run("squeue", "--noheader").stdout == ""


@pytest.mark.long
def test_node_with_a_slow_network_is_named_and_not_its_partners(cluster: Cluster, slurm_project: Project) -> None:
    cluster.slow_down("n2", "80mbit")
    done = slurm_project.call(*NODES, "--exclude", "n1", "--json")
    assert done.returncode == 0, done.stderr
    found = {node["node"]: node for node in json.loads(done.stdout)["nodes"]}
    assert {*found["n2"]["partners"]} == {"n3", "n4"}
    assert 1e6 < found["n2"]["network"] < 12e6
    slow = {name: [why for why in node["why"] if why.startswith("network")] for name, node in found.items()}
    ((why,), others, more) = slow.values()
    assert re.fullmatch(r"network to n[34] and n[34] at [\d.]+ MB/s, the median is [\d.]+ .B/s", why)
    assert (found["n2"]["verdict"], others, more) == ("slow", [], [])
    assert list(slurm_project.runs.iterdir()) == []


@pytest.mark.long
@pytest.mark.every_slurm
def test_node_whose_prolog_fails_is_named_with_the_words_of_slurm(cluster: Cluster, slurm_project: Project) -> None:
    prolog = cluster.folder / "prolog"
    prolog.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != n2 ]\n')
    prolog.chmod(0o755)
    cluster.change_site(lines=("Prolog=/run/cluster/prolog",))
    done = slurm_project.call(*NODES, "--json")
    assert done.returncode == 1, done.stderr
    found = {node["node"]: node for node in json.loads(done.stdout)["nodes"]}
    assert found["n2"]["verdict"] == "broken"
    # which state the task ends in depends on the release
    assert "; SLURM says drained: Prolog error (root, " in found["n2"]["why"][0]
    assert {found[name]["verdict"] for name in ("n1", "n3", "n4")} <= {"ok", "slow"}
    assert list(slurm_project.runs.iterdir()) == []


def test_busy_node_does_not_hold_up_the_others_and_ctrl_c_shows_them(cluster: Cluster, slurm_project: Project) -> None:
    # its task has the first place in SLURM's queue, as that of the array's last node
    busy = cluster.preempt(["n4"])
    process = slurm_project.start(*NODES, "--json", "--partition", "high", "--exclude", "n3")
    known = ("n1", "n2")
    wait_until(lambda: all("leave" in text for text in orders(slurm_project, known)))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = {node["node"]: node for node in json.loads(out)["nodes"]}
    assert list(found) == ["n1", "n2", "n4"]
    for name, partner in zip(known, reversed(known), strict=True):
        assert found[name]["verdict"] in ("ok", "slow")
        assert found[name]["facts"]["memory"] > 0
        assert found[name]["partners"] == [partner]
        assert found[name]["network"] > 0
    assert (found["n4"]["verdict"], found["n4"]["why"]) == ("unchecked", ["busy (allocated)"])
    assert list(slurm_project.runs.iterdir()) == []
    # its own job is cancelled, and no other one
    left = cluster.run("squeue", "--noheader", "--states=pending,running", "--format=%i").stdout
    assert left.split() == [busy]


def orders(project: Project, names: tuple[str, ...]) -> list[str]:
    """What `doctor` has told the tasks of the first nodes."""
    groups = sorted(project.runs.glob("doctor-*"))
    files = [group / "tasks" / str(task) / "checkup-orders.jsonl" for group in groups for task in range(len(names))]
    return [path.read_text() if path.exists() else "" for path in files] or [""]


def test_request_that_no_node_can_serve_is_one_line(slurm_project: Project) -> None:
    for words, code, line in (
        (("--partition", "nowhere"), 3, "--partition nowhere: no such partition; there are main, high"),
        (("--nodelist", "n[4-5]"), 2, "--nodelist n[4-5]: n5 is not a node of the partition"),
        (("--submit",), 2, "--nodes all submits a job array itself: leave --submit out"),
    ):
        done = slurm_project.call(*NODES, *words)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", f"mgpu-slurm: {line}\n")
    assert not slurm_project.runs.exists() or list(slurm_project.runs.iterdir()) == []


def test_node_that_lacks_what_is_asked_for_is_not_waited_for(slurm_project: Project) -> None:
    # those of n4 are of this type
    done = slurm_project.call("doctor", "--nodes", "all", "--json", "--gpus-per-node", "a100:1")
    found = {node["node"]: node for node in json.loads(done.stdout)["nodes"]}
    assert found["n4"]["facts"] is not None
    for name in ("n1", "n2", "n3"):
        lacks = "it lacks what the check asks for, such as GPUs, cores or memory"
        assert (found[name]["verdict"], found[name]["why"]) == ("unchecked", [lacks]), done.stderr
