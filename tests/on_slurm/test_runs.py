"""Runs on a real SLURM that nobody interrupts: what they give, what is seen of them, and how they fail."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.cluster import Cluster
from tests.support import REPOSITORY, Project, log, processes_of, wait_until, with_long

TWO_NODES = ("--nodes", "2", "--nodelist", "n1,n2", "--gpus-per-node", "0")


def reports(run: Path) -> list[dict[str, Any]]:
    """What a run has reported, without the times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("time", "curves")} for line in lines]


def newest_checkpoint(run: Path) -> dict[str, bytes]:
    newest = max((run / "checkpoints").iterdir())
    return {newest.name: b""} | {path.name: path.read_bytes() for path in newest.iterdir()}


def test_four_ranks_on_two_nodes_match_four_local_ranks(slurm_project: Project) -> None:
    shutil.copytree(REPOSITORY / "jobs", slurm_project.folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    # the last bits depend on it, and here four ranks share the cores that two have on a node
    slurm_project.environ["OMP_NUM_THREADS"] = "1"
    words = ["jobs.digits", *TWO_NODES[:2], "--ntasks-per-node", "2", "--gpus-per-node", "0", "epochs=2"]
    here = dataclasses.replace(slurm_project, executor="local").submit(*words)
    done = slurm_project.call("submit", "--follow", *words)
    assert (done.returncode, done.stderr) == (0, "")
    name = re.search(r"^run +(\S+)$", done.stdout, re.MULTILINE)
    assert name is not None
    there = slurm_project.runs / name[1]
    assert slurm_project.finish(here)["state"] == "COMPLETED"
    (facts,) = slurm_project.json("status", there.name)
    assert (facts["state"], facts["ranks"], facts["step"], facts["progress"]) == ("COMPLETED", 4, 90, 2)
    assert facts["metrics"] == reports(there)[-1]["metrics"]

    result, expected = (json.loads((run / "result.json").read_text()) for run in (there, here))
    assert (result["result"], result["step"]) == (expected["result"], expected["step"])
    assert reports(there) == reports(here)
    assert newest_checkpoint(there) == newest_checkpoint(here)

    screen = done.stdout
    for line in (
        r"ranks +4 = 2 nodes x 2",
        r"executor +slurm: .*",
        r"-- started on n\[1-2\]",
        r"\[  1\]  step 45 .*",
        r"\[  2\]  step 90 .*",
        rf"COMPLETED  {name[1]}  in \d+s",
        r"result +accuracy 0\.\d+  .*",
    ):
        assert re.search(f"^{line}$", screen, re.MULTILINE), (line, screen)
    assert {path.name for path in there.glob("logs/*-*.log")} >= {f"1-{rank}.log" for rank in range(4)}


PLAIN = """
    import os
    import socket
    import sys

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
    seen = 0.0
    for _ in range(8):
        batch = torch.randn(4, 4)
        seen += batch.sum().item()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    rank = dist.get_rank()
    print(f"rank {rank} of {dist.get_world_size()} on {socket.gethostname()}")
    torch.save([seen, model.module.weight.detach()], f"{os.environ['MGPU_RUN_FOLDER']}/trained-{rank}.pt")
    dist.destroy_process_group()
"""


@pytest.mark.every_slurm
def test_plain_script_trains_on_two_nodes(slurm_project: Project) -> None:
    slurm_project.write("plain.py", PLAIN)
    done = slurm_project.call("submit", "--follow", *TWO_NODES, "--", "python", "plain.py", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = slurm_project.runs.iterdir()
    # torch may add its own words
    assert [re.findall(r"^rank .*", log(run, rank), re.MULTILINE) for rank in (0, 1)] == [
        ["rank 0 of 2 on n1"],
        ["rank 1 of 2 on n2"],
    ]
    assert "\nrank 0 of 2 on n1\n" in done.stdout
    (first_seen, first), (second_seen, second) = (torch.load(run / f"trained-{rank}.pt") for rank in (0, 1))
    # other samples, and yet the same weights
    assert first_seen != second_seen
    assert torch.equal(first, second)


FORKED = """
    import os
    import signal

    import torch.distributed as dist


    def train(run, kills_rank=None):
        print("child of", os.getppid(), open(f"/proc/{os.getppid()}/comm").read())
        dist.barrier()
        if run.rank == kills_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
"""


@pytest.mark.parametrize(("forks", "parent"), with_long([("1", "python"), ("0", "slurmstepd")], {("1", "python")}))
def test_ranks_of_a_node_are_forks_of_one_process(slurm_project: Project, forks: str, parent: str) -> None:
    slurm_project.write("forked.py", FORKED)
    slurm_project.write("mgpu.yaml", f"clusters: {{here: {{environment: {{MGPU_FORK_RANKS: '{forks}'}}}}}}\n")
    run = slurm_project.submit("forked:train", *TWO_NODES, "--ntasks-per-node", "2")
    assert slurm_project.finish(run)["state"] == "COMPLETED"
    first, second, third, fourth = (re.findall(r"^child of (\d+) (\w+)", log(run, rank), re.M) for rank in range(4))
    assert first == second != third == fourth
    assert first[0][1] == third[0][1] == parent


@pytest.mark.parametrize("rank", with_long([0, 3], {0}))
def test_forked_rank_that_is_killed_ends_the_others_and_is_named(
    slurm_project: Project, cluster: Cluster, rank: int
) -> None:
    slurm_project.write("forked.py", FORKED)
    words = ("--ntasks-per-node", "2", "--retries", "0", f"kills_rank={rank}")
    run = slurm_project.submit("forked:train", *TWO_NODES, *words)
    facts = slurm_project.finish(run)
    assert (facts["state"], facts["reason"]) == ("FAILED", f"rank {rank} on n{rank // 2 + 1}: Killed")
    cluster.until_job(facts["job_id"], "FAILED")
    wait_until(lambda: processes_of(run) == [])


def test_run_can_be_followed_from_another_shell_until_its_end(
    slurm_project: Project, cluster: Cluster, tmp_path: Path
) -> None:
    gate = slurm_project.folder / "gate"
    script = f"echo rank $RANK of $WORLD_SIZE on $(hostname); until test -e {gate}; do sleep 0.05; done; echo end"
    words = ["--ntasks-per-node", "2", "--sbatch", "hold", "--", "sh", "-c", script]
    run = slurm_project.submit(*TWO_NODES, *words)
    elsewhere = dataclasses.replace(slurm_project, folder=tmp_path)
    (facts,) = elsewhere.json("status", run.name)
    submitted, job = facts["submitted"], facts["job_id"]
    expected = {"run": run.name, "kind": "run", "state": "PENDING", "reason": "JobHeldUser", "job_id": job}
    expected |= {"attempts": 0, "nodes": 2, "ranks": 4, "step": 0, "progress": 0, "metrics": {}, "group": None}
    expected |= {"curves": {}, "total": None, "left_seconds": None}
    expected |= {"submitted": submitted, "started": None, "ended": None}
    assert facts == expected
    assert cluster.job(job)["JobName"] == run.name
    following = elsewhere.start("logs", run.name, "--follow")
    waiting = elsewhere.start("wait", job)
    assert following.stdout is not None
    assert following.stdout.readline() == "-- PENDING: JobHeldUser\n"

    cluster.run("scontrol", "release", job)
    last = RunFolder(run).rank_log(1, 3)
    wait_until(lambda: last.exists() and last.read_text() != "")
    assert elsewhere.call("logs", run.name, "--rank", "3").stdout == "rank 3 of 4 on n2\n"
    (facts,) = elsewhere.json("status", run.name)
    started = facts["started"]
    expected |= {"state": "RUNNING", "attempts": 1, "started": started, "reason": ""}
    assert facts == expected
    assert following.stdout.readline() == "-- started on n[1-2]\n"
    assert following.stdout.readline() == "rank 0 of 4 on n1\n"
    assert (following.poll(), waiting.poll()) == (None, None)

    gate.touch()
    rest, errors = following.communicate(timeout=60)
    assert (rest.splitlines()[0], errors) == ("end", "")
    assert rest.splitlines()[1].startswith(f"COMPLETED  {run.name}  in ")
    said, _ = waiting.communicate(timeout=60)
    assert said.startswith(f"COMPLETED  {run.name}  in ")
    assert (following.returncode, waiting.returncode) == (0, 0)
    (facts,) = elsewhere.json("status", run.name)
    expected |= {"state": "COMPLETED", "ended": facts["ended"]}
    assert facts == expected
    assert datetime.fromisoformat(submitted) < datetime.fromisoformat(started) < datetime.fromisoformat(facts["ended"])
    cluster.until_job(job, "COMPLETED")
    assert log(run, 3) == "rank 3 of 4 on n2\nend\n"


ALONE = """
    from datetime import timedelta

    import torch.distributed as dist


    def train(run, config):
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        return {"world": dist.get_world_size()}
"""


@pytest.mark.every_slurm
def test_single_rank_job_can_create_its_own_process_group(slurm_project: Project) -> None:
    slurm_project.write("train.py", ALONE)
    run, facts = slurm_project.run("train", "--gpus-per-node", "0")
    assert facts["state"] == "COMPLETED", log(run, 0)
    assert json.loads((run / "result.json").read_text())["result"] == {"world": 1}


def test_hanging_ranks_do_not_prevent_a_restart(slurm_project: Project, cluster: Cluster) -> None:
    """As in NCCL, where a rank that waits for one that has exited handles no signal."""
    hangs = "trap '' TERM USR2; exec sleep 600"
    script = f"echo here; if [ $MGPU_ATTEMPT = 2 ]; then exit; elif [ $RANK = 1 ]; then {hangs}; fi; exit 75"
    # half of the lead is for them
    words = (*TWO_NODES, "--ntasks-per-node", "1", "--time", "10", "--signal", "USR2@20")
    run = slurm_project.submit(*words, "--", "sh", "-c", script)
    wait_until(lambda: records.read_state(RunFolder(run)).state == "REQUEUED")
    # nothing of the first attempt is there beside the second
    ended = [event for event in records.events(RunFolder(run)) if event.event == "ended"]
    assert [event.others["exit_code"] for event in ended] == [75]
    wait_until(lambda: processes_of(run) == [], seconds=10)
    cluster.start_now(records.read_state(RunFolder(run)).job_id)
    facts = slurm_project.finish(run)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)


# -- failures


@pytest.mark.every_slurm
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("exit 3", " ended with exit code 3: last words"),
        # mgpu_slurm's own process of that rank: srun has the only words then
        ("kill -KILL $PPID", ": Killed"),
    ],
)
def test_failed_rank_ends_the_others_at_once(slurm_project: Project, cluster: Cluster, end: str, how: str) -> None:
    script = f"if [ $RANK = 1 ]; then echo last words; {end}; exit; fi; exec sleep 600"
    words = (*TWO_NODES, "--ntasks-per-node", "1", "--retries", "0", "--follow")
    done = slurm_project.call("submit", *words, "--", "sh", "-c", script)
    assert done.returncode == 1
    (facts,) = slurm_project.json("status")
    assert (facts["state"], facts["reason"]) == ("FAILED", f"rank 1 on n2{how}")
    run = RunFolder(slurm_project.runs / facts["run"])
    assert "-- rank 1 failed first; the end of its log:\nlast words\n" in done.stdout
    cluster.until_job(facts["job_id"], "FAILED")
    wait_until(lambda: processes_of(run.path) == [], seconds=10)
    assert "srun: error: n2: task 1: " in slurm_project.call("logs", run.run, "--launch").stdout


@pytest.mark.needs_site("cgroups")
def test_rank_that_slurm_ends_for_its_memory_is_out_of_memory(slurm_project: Project) -> None:
    """SLURM has the kernel do it, and says so only in srun's messages and in accounting."""
    grows = "import os, time; [b'x' * 2**26 for _ in range(50)] if os.environ['RANK'] == '1' else time.sleep(600)"
    run = slurm_project.submit(*TWO_NODES, "--ntasks-per-node", "1", "--mem", "400M", "--", sys.executable, "-c", grows)
    facts = slurm_project.finish(run)
    assert (facts["state"], facts["reason"], facts["attempts"]) == ("OUT_OF_MEMORY", "rank 1 on n2: Out Of Memory", 1)
    said = slurm_project.call("why", run.name).stdout
    assert "\nwhy       a node ran out of RAM\n" in said
    assert "\nfix       ask for more (`--mem`)" in said


@pytest.mark.needs_site("step_manager")
def test_steps_of_a_step_manager_are_found(slurm_project: Project, cluster: Cluster) -> None:
    run = slurm_project.submit(*TWO_NODES, "--", "sleep", "600")
    wait_until(lambda: slurm_project.json("status", run.name)[0]["state"] == "RUNNING")
    job_id = slurm_project.json("status", run.name)[0]["job_id"]
    listed = cluster.run("squeue", "--noheader", "--steps", f"--jobs={job_id}", "-o", "%i").stdout.split()
    assert listed
    assert not [step for step in listed if step.rpartition(".")[2].isdigit()]
    asked = "import sys; from mgpu_slurm.slurm import steps; print(steps.busy(sys.argv[1]))"
    done = cluster.run(sys.executable, "-c", asked, job_id, env=slurm_project.environ)
    assert done.stdout == "{'n1': 1, 'n2': 1}\n", done.stderr
    assert slurm_project.call("cancel", run.name).returncode == 0
    assert slurm_project.call("wait", run.name).returncode == 1


@pytest.mark.every_slurm
def test_gpus_of_a_type_are_those_of_the_nodes_that_have_it(slurm_project: Project) -> None:
    # gres.conf names no vendor
    script = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $ROCR_VISIBLE_DEVICES"
    done = slurm_project.call("submit", "--follow", "--gpus-per-node", "a100:1", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpus      a100:1 per node, as requested\n" in done.stdout
    assert "\nn4 0 0\n" in done.stdout
    refused = slurm_project.call("submit", "--gpus-per-node", "h100:1", "--", "true")
    assert refused.returncode == 3
    assert refused.stderr.startswith("mgpu-slurm: sbatch refused the job: sbatch: "), refused.stderr
