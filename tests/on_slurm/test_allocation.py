"""Runs inside an allocation that is held, by salloc on the login node or by a batch script of the user's own.

The login node is another machine to these tests: what they call here has to reach runs from outside.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.on_slurm.cluster import Cluster
from tests.support import REPOSITORY, Project, log, processes_of, wait_until

SUBMIT = ("submit", "--executor", "allocation")
SAVES = "trap 'trap \"\" TERM; sleep 0.5; echo saved; exit 143' TERM; echo ready; while true; do sleep 1 & wait; done"
"""A command that needs a moment to leave when it is told to end; SLURM tells it again once another rank has left.

SLURM signals the processes of a step in turn, so the sleep may be terminated first; the loop waits for its own signal.
"""


class Shell:
    """A shell on the login node in which an allocation is held."""

    def __init__(self, project: Project, *words: str) -> None:
        self._files = project.folder.parent / "shell"
        self._files.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            ["salloc", "--quiet", *words, "bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=project.folder,
            env=os.environ | project.environ,
        )
        self.job_id = self.say("echo $SLURM_JOB_ID")

    def say(self, line: str, seconds: float = 60) -> str:
        """Types a line that prints one; that one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        said, give_up = b"", time.monotonic() + seconds
        while not said.endswith(b"\n"):
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, give_up - time.monotonic()))
            assert readable, f"the shell did not answer: {line}"
            said += os.read(self._process.stdout.fileno(), 4096)
        return said.decode().strip()

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs the program to its end."""
        command = shlex.join([sys.executable, "-m", "mgpu_slurm", *words])
        out, err = self._files / "out", self._files / "err"
        code = self.say(f"{command} > {out} 2> {err} < /dev/null; echo $?")
        return subprocess.CompletedProcess(words, int(code), out.read_text(), err.read_text())

    def submit(self, *words: str) -> Path:
        """Starts a run without following it; its folder."""
        done = self.call(*SUBMIT, "--no-follow", "--json", *words)
        assert done.returncode == 0, done.stderr
        return Path(json.loads(done.stdout)["folder"])

    def leave(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture
def hold(slurm_project: Project) -> Iterator[Callable[..., Shell]]:
    shells = []

    def take(*words: str) -> Shell:
        shells.append(Shell(slurm_project, *words))
        return shells[-1]

    yield take
    for shell in shells:
        shell.leave()


def facts(project: Project, folder: Path) -> dict[str, Any]:
    (found,) = project.json("status", folder.name)
    return dict(found)


def ready(folder: Path, rank: int = 0, attempt: int = 1) -> bool:
    path = folder / "logs" / f"{attempt}-{rank}.log"
    return path.exists() and "ready" in path.read_text()


def steps(cluster: Cluster, job_id: str) -> list[str]:
    """The steps that srun has started, which a step manager hides from squeue."""
    shown = cluster.run("scontrol", "show", "step", "--oneliner", job_id).stdout
    return re.findall(r"StepId=(\d+\.\d+) ", shown)


def end_in(cluster: Cluster, job_id: str, seconds: int) -> None:
    """SLURM's limits are whole minutes, but their end can be moved."""
    end = datetime.now() + timedelta(seconds=seconds)
    done = cluster.run("scontrol", "update", f"JobId={job_id}", f"EndTime={end:%FT%T}")
    assert done.returncode == 0, done.stderr


def test_successive_runs_use_the_whole_allocation(
    hold: Callable[..., Shell], slurm_project: Project, cluster: Cluster
) -> None:
    shell = hold("--nodes=2", "--gpus-per-node=2", "--time=30")
    # what a surrounding step or launcher leaves behind
    shell.say("export SLURM_CPU_BIND=map_cpu:9 SLURM_CPUS_PER_TASK=9 RANK=7 CUDA_VISIBLE_DEVICES=9; echo")
    script = 'echo "rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES$SLURM_CPU_BIND"'
    done = shell.call(*SUBMIT, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"executor  allocation: job {shell.job_id}, n\[1-2\], 0:\d\d:\d\d left\n", done.stdout)
    assert "ranks     4 = 2 nodes x 2" in done.stdout
    assert f"gpus      2 per node, as in allocation {shell.job_id}" in done.stdout
    # salloc gives one core where nobody asks for more
    assert "cores     1 on a node, shared by 2 ranks" in done.stdout
    assert "-- started on n[1-2]\nrank 0 of 4 on n1 sees 0,1\nCOMPLETED" in done.stdout
    (folder,) = slurm_project.runs.iterdir()
    assert log(folder, rank=3) == "rank 3 of 4 on n2 sees 0,1\n"
    assert slurm_project.call("logs", folder.name, "--rank", "3").stdout == log(folder, rank=3)
    found = facts(slurm_project, folder)
    assert (found["state"], found["job_id"], found["nodes"], found["ranks"]) == ("COMPLETED", shell.job_id, 2, 4)

    failed = shell.call(
        *SUBMIT, "--gpus-per-node", "0", "--ntasks-per-node", "2", "--", "sh", "-c", "exit $((RANK / 3 * 7))"
    )
    assert failed.returncode == 1
    assert "rank 3 on n2 ended with exit code 7" in failed.stdout
    assert steps(cluster, shell.job_id) == []
    for folder in slurm_project.runs.iterdir():
        assert processes_of(folder) == []

    auto = shell.call("submit", "--dry-run", "--", "true")
    assert f"executor  slurm: sbatch is on PATH; --executor allocation would use job {shell.job_id}" in auto.stdout
    planned = shell.call(*SUBMIT, "--dry-run", "--nodes", "1", "--gpus-per-node", "1", "--", "true")
    assert "ranks     1 = 1 node x 1" in planned.stdout
    assert len(list(slurm_project.runs.iterdir())) == 2


@pytest.mark.every_slurm
def test_step_gets_the_requested_gpus_and_cores(hold: Callable[..., Shell], slurm_project: Project) -> None:
    shell = hold("--nodes=1", "--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=2")
    script = 'echo "$LOCAL_WORLD_SIZE ranks of $SLURM_CPUS_PER_TASK cores see ${CUDA_VISIBLE_DEVICES-nothing}"'
    asked = {
        (): "2 ranks of 2 cores see 0,1\n",
        ("--gpus-per-node", "1"): "2 ranks of 2 cores see 0\n",
        ("--gpus-per-node", "0", "--ntasks-per-node", "1", "--cpus-per-task", "3"): "1 ranks of 3 cores see nothing\n",
    }
    for words, said in asked.items():
        folder = shell.submit(*words, "--", "sh", "-c", script)
        assert slurm_project.finish(folder)["state"] == "COMPLETED"
        # beside a warning: this machine has fewer cores than its SLURM says
        assert log(folder, rank=0).endswith(said)


def test_resources_beyond_the_allocation_are_refused_with_one_line(
    hold: Callable[..., Shell], slurm_project: Project
) -> None:
    shell = hold("--nodes=2", "--gpus-per-node=2", "--time=30")
    job = shell.job_id
    refused = {
        ("--nodes", "3"): f"--nodes 3: allocation {job} has 2 for this run (n[1-2])",
        ("--gpus-per-node", "3"): f"--gpus-per-node 3: allocation {job} has 2 on n1",
        ("--cpus-per-task", "2"): "--cpus-per-task 2: 2 ranks on a node need 4 cores",
        ("--mem", "1100M"): f"--mem 1100M: allocation {job} has 1000M on n1",
        ("--time", "31"): f"--time 31: allocation {job} has 0:2",
        ("--partition", "high"): f"--partition high: allocation {job} has fixed this",
        ("--sbatch", "mail-type=END"): f"--sbatch mail-type: allocation {job} does not use sbatch",
    }
    for words, said in refused.items():
        done = shell.call(*SUBMIT, *words, "--", "true")
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    # what the cluster file asks of SLURM is asked already
    slurm_project.write("mgpu.yaml", "clusters: {here: {flags: {partition: high, time: '9:00:00', nodes: 4}}}\n")
    assert shell.call(*SUBMIT, "--", "true").returncode == 0
    outside = slurm_project.call(*SUBMIT, "--", "true")
    assert outside.returncode == 2
    assert "you hold no allocation here (SLURM_JOB_ID is not set): request one, such as `salloc " in outside.stderr
    assert len(list(slurm_project.runs.iterdir())) == 1


def test_cancel_from_another_machine_lets_ranks_save(
    hold: Callable[..., Shell], slurm_project: Project, cluster: Cluster
) -> None:
    shell = hold("--nodes=2", "--time=30")
    folder = shell.submit("--", "sh", "-c", SAVES)
    wait_until(lambda: ready(folder) and ready(folder, rank=1))
    assert facts(slurm_project, folder)["state"] == "RUNNING"
    assert slurm_project.call("cancel", folder.name).returncode == 0
    ended = slurm_project.finish(folder)
    assert (ended["state"], ended["reason"]) == ("CANCELLED", "cancelled")
    assert log(folder, rank=0) == log(folder, rank=1) == "ready\nsaved\n"
    # and the allocation is held on
    assert shell.call("resume", folder.name, "--no-follow").returncode == 0
    wait_until(lambda: ready(folder, attempt=2) and ready(folder, rank=1, attempt=2))
    assert shell.call("cancel", folder.name).returncode == 0
    assert slurm_project.finish(folder)["state"] == "CANCELLED"
    assert log(folder, rank=1, attempt=2) == "ready\nsaved\n"
    wait_until(lambda: not processes_of(folder) and not steps(cluster, shell.job_id))
    assert facts(slurm_project, folder)["attempts"] == 2


def test_ranks_that_ignore_sigterm_are_killed_after_the_kill_wait(
    hold: Callable[..., Shell], slurm_project: Project, cluster: Cluster
) -> None:
    slurm_project.write("mgpu.yaml", "clusters: {here: {kill-wait: 1}}\n")
    shell = hold("--nodes=2")
    folder = shell.submit("--", "sh", "-c", "trap '' TERM; echo ready; while true; do sleep 1; done")
    wait_until(lambda: ready(folder) and ready(folder, rank=1))
    assert slurm_project.call("cancel", folder.name).returncode == 0
    assert slurm_project.finish(folder)["state"] == "CANCELLED"
    wait_until(lambda: not processes_of(folder) and not steps(cluster, shell.job_id))


def test_ctrl_c_stops_following_but_not_the_run(hold: Callable[..., Shell], slurm_project: Project) -> None:
    shell = hold("--nodes=1")
    words = shlex.join([sys.executable, "-m", "mgpu_slurm", *SUBMIT, "--", "sh", "-c", SAVES])
    # a group of its own, as a terminal makes one for each command
    shell.say(f"set -m; {words} > followed 2> told & echo")
    followed = slurm_project.folder / "followed"
    wait_until(lambda: followed.exists() and followed.read_text().endswith("ready\n"))
    assert shell.say("kill -INT -- -$!; wait $!; echo $?") == "130"
    assert "stopped following; the run continues" in (slurm_project.folder / "told").read_text()
    (folder,) = slurm_project.runs.iterdir()
    assert facts(slurm_project, folder)["state"] == "RUNNING"
    assert slurm_project.call("cancel", folder.name).returncode == 0
    assert slurm_project.finish(folder)["state"] == "CANCELLED"


def test_run_of_a_released_allocation_resumes_in_a_new_one(hold: Callable[..., Shell], slurm_project: Project) -> None:
    shell = hold("--nodes=2")
    folder = shell.submit("--", "sh", "-c", f"test $MGPU_ATTEMPT = 1 || exit 0; {SAVES}")
    wait_until(lambda: ready(folder) and ready(folder, rank=1))
    shell.leave()
    ended = slurm_project.finish(folder)
    reason = f"its allocation {shell.job_id} was released; continue with `resume` inside a new one"
    assert (ended["state"], ended["reason"]) == ("CANCELLED", reason)
    assert log(folder, rank=1) == "ready\nsaved\n"

    outside = slurm_project.call("resume", folder.name)
    assert outside.returncode == 2
    assert "you hold no allocation here" in outside.stderr
    small = hold("--nodes=1").call("resume", folder.name)
    assert small.returncode == 2
    assert "--nodes 2: allocation" in small.stderr
    assert facts(slurm_project, folder)["state"] == "CANCELLED"
    done = hold("--nodes=3").call("resume", folder.name)
    assert done.returncode == 0, done.stderr
    assert facts(slurm_project, folder)["attempts"] == 2


def test_end_of_the_allocation_is_the_time_limit_of_its_runs(
    hold: Callable[..., Shell], slurm_project: Project, cluster: Cluster
) -> None:
    shell = hold("--nodes=2", "--time=30")
    did_not = shell.submit("--", "sleep", "600")
    wait_until(lambda: facts(slurm_project, did_not)["state"] == "RUNNING")
    # the signal comes when a fifth of what is left is left: until then the run has time to start
    end_in(cluster, shell.job_id, 30)
    leaves = "import signal, sys, time; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75)); time.sleep(600)"
    heard = shell.submit("--", "python", "-c", leaves)
    for folder, how in {heard: "is used up", did_not: "reached its time limit"}.items():
        ended = slurm_project.finish(folder)
        reason = f"its allocation {shell.job_id} {how}; continue with `resume` inside a new one"
        assert (ended["state"], ended["reason"], ended["attempts"]) == ("TIMEOUT", reason, 1)
    cluster.until_job(shell.job_id, "TIMEOUT")
    done = shell.call(*SUBMIT, "--", "true")
    assert done.returncode == 2
    assert "that allocation has ended (TIMEOUT): leave this shell" in done.stderr
    wait_until(lambda: not processes_of(heard) and not processes_of(did_not))


def test_run_can_restart_in_its_allocation(hold: Callable[..., Shell], slurm_project: Project) -> None:
    hangs = "trap '' TERM USR2; exec sleep 600"
    script = f"test $SLURM_RESTART_COUNT = 1 && exit; test $RANK = 0 && exit 75; {hangs}"
    # half of the lead is for those that hang
    folder = hold("--nodes=2", "--time=30").submit("--time", "10", "--signal", "USR2@20", "--", "sh", "-c", script)
    ended = slurm_project.finish(folder)
    assert (ended["state"], ended["attempts"]) == ("COMPLETED", 2)


def test_rank_out_of_memory_gives_the_out_of_memory_state(
    hold: Callable[..., Shell], slurm_project: Project, tmp_path: Path
) -> None:
    """The message is that of an srun whose SLURM confines memory, which would need cgroups of its own."""
    shell = hold("--nodes=1")
    srun = tmp_path / "confined" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\necho 'srun: error: n1: task 0: Out Of Memory' >&2\nexit 137\n")
    srun.chmod(0o755)
    shell.say(f"export PATH={srun.parent}:$PATH; echo")
    found = slurm_project.finish(shell.submit("--", "true"))
    assert (found["state"], found["reason"]) == ("OUT_OF_MEMORY", "rank 0 on n1: Out Of Memory")


def test_lost_node_ends_the_run_whatever_srun_reports(
    hold: Callable[..., Shell], slurm_project: Project, cluster: Cluster
) -> None:
    """The ranks exit cleanly, and srun exits with 0 although a node has failed."""
    shell = hold("--nodes=1", "--nodelist=n1")
    folder = shell.submit("--", "sh", "-c", "trap 'exit 0' TERM; echo ready; sleep 100 & wait")
    wait_until(lambda: ready(folder))
    cluster.node_given_up("n1")
    found = slurm_project.finish(folder)
    told = f"its allocation {shell.job_id} lost a node; continue with `resume` inside a new one"
    assert (found["state"], found["reason"]) == ("NODE_FAIL", told)


@pytest.mark.every_slurm
def test_concurrent_runs_use_separate_nodes(hold: Callable[..., Shell], slurm_project: Project) -> None:
    shell = hold("--nodes=2")
    # a step that overlaps with none
    shell.say("srun sleep 100 & echo")
    script = "echo ready on $SLURMD_NODENAME; while ! test -e $MGPU_PROJECT/enough; do sleep 0.1; done"
    first = shell.submit("--nodes", "1", "--", "sh", "-c", script)
    wait_until(lambda: ready(first))
    second = shell.submit("--nodes", "1", "--", "sh", "-c", script)
    wait_until(lambda: ready(second))
    (slurm_project.folder / "enough").touch()
    assert {slurm_project.finish(folder)["state"] for folder in (first, second)} == {"COMPLETED"}
    assert {log(folder, rank=0) for folder in (first, second)} == {"ready on n1\n", "ready on n2\n"}


def test_group_runs_in_the_allocation(hold: Callable[..., Shell], slurm_project: Project) -> None:
    shell = hold("--nodes=2")
    folder = shell.submit("--seeds", "2", "--", "sh", "-c", "echo seed {seed} in $SLURM_JOB_ID")
    assert slurm_project.call("wait", folder.name, "--timeout", "60").returncode == 0
    for task in range(2):
        assert slurm_project.call("logs", f"{folder.name}/{task}").stdout == f"seed {task} in {shell.job_id}\n"


def test_group_can_be_cancelled_from_another_machine(hold: Callable[..., Shell], slurm_project: Project) -> None:
    folder = hold("--nodes=1").submit("--seeds", "2", "--", "sh", "-c", f"echo seed {{seed}}; {SAVES}")
    wait_until(lambda: ready(folder / "tasks" / "0"))
    assert slurm_project.call("cancel", folder.name).returncode == 0
    assert slurm_project.call("wait", folder.name, "--timeout", "60").returncode == 1
    assert [one["state"] for one in slurm_project.json("status", folder.name)] == ["CANCELLED", "CANCELLED"]
    assert log(folder / "tasks" / "0", rank=0) == "seed 0\nready\nsaved\n"
    wait_until(lambda: not processes_of(folder) and not processes_of(folder / "tasks" / "0"))
    assert not (folder / "tasks" / "1" / "attempts.jsonl").exists()


def test_submit_works_inside_a_batch_script_of_the_user(slurm_project: Project, cluster: Cluster) -> None:
    meets = """
import os, socket
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=30):
    print("rank", os.environ["RANK"], "on", os.uname().nodename)
"""
    call = [sys.executable, "-m", "mgpu_slurm", *SUBMIT, "--", "python", "-c", meets]
    script = slurm_project.write("own.sh", f"#!/bin/bash\n{shlex.join(call)}\n")
    words = ["--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=2", f"--output={slurm_project.folder}/said"]
    done = cluster.run(
        "sbatch", "--parsable", *words, script, cwd=slurm_project.folder, env=_without_path(slurm_project.environ)
    )
    assert done.returncode == 0, done.stderr
    cluster.until_job(done.stdout.strip(), "COMPLETED")
    (folder,) = slurm_project.runs.iterdir()
    # the rendezvous is on the first node now
    assert log(folder, rank=3) == "rank 3 on n2\n"
    assert facts(slurm_project, folder)["state"] == "COMPLETED"


def _without_path(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != "PATH"}


def test_killed_supervisor_ends_its_ranks_and_fails_the_run(
    hold: Callable[..., Shell], slurm_project: Project, cluster: Cluster
) -> None:
    shell = hold("--nodes=2")
    folder = shell.submit("--", "sh", "-c", SAVES)
    wait_until(lambda: ready(folder) and ready(folder, rank=1))
    pid = json.loads((folder / "state.json").read_text())["supervisor"][0]
    # with its batch step, which would otherwise clean up
    shell.say(f"kill -KILL $(ps -o pid= --ppid {pid}) {pid}; echo")
    wait_until(lambda: not processes_of(folder) and not steps(cluster, shell.job_id))
    done = shell.call("status", "--json", folder.name)
    (found,) = json.loads(done.stdout)
    assert (found["state"], found["reason"].partition(" (")[0]) == ("FAILED", "lost: its supervisor process is gone")


@pytest.mark.long
def test_training_in_an_allocation_is_bitwise_identical_to_local(
    hold: Callable[..., Shell], slurm_project: Project
) -> None:
    shutil.copytree(REPOSITORY / "jobs", slurm_project.folder / "jobs")
    slurm_project.environ["OMP_NUM_THREADS"] = "1"
    words = ("--nodes", "2", "--ntasks-per-node", "1", "--gpus-per-node", "0", "jobs.digits", "epochs=2")
    there = hold("--nodes=2").submit(*words)
    assert slurm_project.finish(there)["state"] == "COMPLETED"
    slurm_project.executor = "local"
    here, ended = slurm_project.run(*words)
    assert ended["state"] == "COMPLETED"
    assert weights(there) == weights(here)


def weights(folder: Path) -> bytes:
    newest = max(folder.glob("checkpoints/step-*/rank-00000.safetensors"))
    return newest.read_bytes()
