"""What the cluster itself promises to the tests that run on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.on_slurm import packages
from tests.on_slurm.cluster import PREPARED, REPOSITORY, Cluster
from tests.on_slurm.machine import NODES
from tests.support import wait_until

STUBBORN = "trap '' TERM; while :; do sleep 0.1; done"


class Login:
    """A shell on the host that uses the cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | self.cluster.environ
        return subprocess.run(words, env=environ, cwd=self.folder, capture_output=True, text=True, timeout=60)

    def submit(self, script: str, *words: str) -> str:
        done = self.call("sbatch", "--parsable", "--output=out-%j", *words, f"--wrap={script}")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self, script: str, *words: str) -> str:
        job = self.submit(script, *words)
        self.cluster.until_job(job, "RUNNING")
        return job

    def output(self, job: str) -> str:
        path = self.folder / f"out-{job}"
        return path.read_text() if path.exists() else ""

    def starts(self, job: str) -> list[str]:
        """How each start of a job ended, from accounting."""
        words = ["sacct", "-n", "-P", "-X", "--duplicates", "--format=State", "-j", job]
        return [line.split()[0] for line in self.call(*words).stdout.splitlines()]


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Login:
    return Login(cluster, tmp_path)


@pytest.mark.every_slurm
def test_release_is_the_one_that_was_asked_for(cluster: Cluster, login: Login) -> None:
    assert login.call("sinfo", "--version").stdout.split()[1].startswith(f"{cluster.slurm}.")


@pytest.mark.parametrize(("of_release", "machine_is_in_front"), [("2.2", True), ("2.99", False)])
def test_newer_c_library_is_in_front(of_release: str, machine_is_in_front: bool, tmp_path: Path) -> None:
    (tmp_path / "24.11").mkdir()
    (tmp_path / "24.11/libc").write_text(of_release)
    own = [f"{tmp_path}/24.11/usr", f"{tmp_path}/packages/usr"]
    found = packages.layers(tmp_path, "24.11")
    assert found == (["/usr", *own] if machine_is_in_front else [*own, "/usr"])


def test_unknown_release_is_refused_with_those_that_there_are() -> None:
    words = [sys.executable, "-m", "tests.on_slurm.cluster", "up", "23.02"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "SLURM=23.02: there are 22.05 and 24.11\n")


def test_job_sees_both_hosts_their_gpus_and_the_submission_folder(cluster: Cluster, login: Login) -> None:
    tell = "echo $(hostname) $(getent hosts $(hostname)) $CUDA_VISIBLE_DEVICES $MARK"
    script = f"srun -l sh -c '{tell}'; pwd; which sbatch"
    job = login.submit(script, "--nodes=2", "--nodelist=n2,n3", "--gpus-per-node=2", "--export=ALL,MARK=a mark")
    cluster.until_job(job, "COMPLETED")
    *ranks, folder, sbatch = login.output(job).splitlines()
    assert sorted(ranks) == ["0: n2 10.77.0.12 n2 0,1 a mark", "1: n3 10.77.0.13 n3 0,1 a mark"]
    assert folder == str(login.folder)
    assert sbatch == "/usr/bin/sbatch"  # no wrapper, though the job has the PATH of its submission
    assert cluster.job(job)["NodeList"] == "n[2-3]"
    assert cluster.job(int(job) + 1) == {}


def test_srun_receives_signals_and_returns_its_exit_code(cluster: Cluster, login: Login) -> None:
    assert login.call("srun", "sh", "-c", "exit 7").returncode == 7
    words = ["srun", "--nodes=2", "sleep", "600"]
    running = subprocess.Popen(words, env=os.environ | cluster.environ, stderr=subprocess.DEVNULL)
    wait_until(lambda: login.call("squeue", "--noheader", "--states=RUNNING").stdout != "")
    running.terminate()
    assert running.wait() != 0
    wait_until(lambda: login.call("squeue", "--noheader").stdout == "")


def test_preempted_job_is_requeued_and_restarts_on_request(cluster: Cluster, login: Login) -> None:
    job = login.start("echo start ${SLURM_RESTART_COUNT:-0}; exec sleep 600", "--nodes=4")
    taker = cluster.preempt(["n1", "n2"])
    facts = cluster.job(job)
    assert (facts["JobState"], facts["Reason"], facts["Restarts"]) == ("PENDING", "BeginTime", "1")
    cluster.release(taker)
    cluster.start_now(job)
    cluster.until_job(job, "RUNNING")
    wait_until(lambda: login.output(job).endswith("start 1\n"))
    wait_until(lambda: login.starts(job) == ["PREEMPTED", "RUNNING"])


def test_processes_on_a_disconnected_node_continue_and_job_is_requeued(cluster: Cluster, login: Login) -> None:
    beat = login.folder / "beat"
    rank = f"while :; do date +%s%N > {beat}-$(hostname); sleep 0.05; done"
    job = login.start(f"srun sh -c '{rank}'", "--nodes=2", "--nodelist=n1,n2")
    wait_until(lambda: Path(f"{beat}-n1").exists() and Path(f"{beat}-n2").exists())
    cluster.cut("n2")
    assert login.call("sinfo", "--noheader", "--nodes=n2", "--partition=main", "--format=%T").stdout.startswith("down")
    last = Path(f"{beat}-n2").read_text()
    wait_until(lambda: Path(f"{beat}-n2").read_text() not in (last, ""))
    cluster.reconnect("n2")
    last = Path(f"{beat}-n2").read_text()
    cluster.until_job(job, "PENDING")
    wait_until(lambda: login.starts(job)[:1] == ["NODE_FAIL"])
    cluster.start_now(job)
    wait_until(lambda: Path(f"{beat}-n2").read_text() not in (last, ""))


def test_peers_of_a_powered_off_node_receive_nothing(cluster: Cluster, login: Login) -> None:
    program = login.folder / "talk.py"
    program.write_text(
        """if True:
        import os, socket, time
        if os.environ["SLURM_NODEID"] == "1":
            server = socket.create_server(("n2", 20000))
            peer, _ = server.accept()
            peer.sendall(b"hello")
            time.sleep(600)
        while True:
            try:
                peer = socket.create_connection(("n2", 20000))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        print(peer.recv(5).decode(), flush=True)
        peer.settimeout(1)
        while True:
            try:
                print("heard", peer.recv(5), flush=True)
                break
            except TimeoutError:
                print("nothing", flush=True)
        """
    )
    job = login.start(f"srun --unbuffered {sys.executable} {program}", "--nodes=2", "--nodelist=n1,n2")
    wait_until(lambda: "hello" in login.output(job))
    cluster.node_down("n2", noticed=False)
    assert cluster.job(job)["JobState"] == "RUNNING"
    wait_until(lambda: "nothing" in login.output(job))
    assert "heard" not in login.output(job)
    # SLURM would find out by itself in half a minute
    cluster.node_down("n2")
    cluster.until_job(job, "PENDING")
    wait_until(lambda: login.starts(job)[:1] == ["NODE_FAIL"])
    cluster.node_up("n2")
    assert login.call("srun", "--nodelist=n2", "hostname").stdout == "n2\n"


def test_drained_node_gets_no_job(cluster: Cluster, login: Login) -> None:
    cluster.drain("n1")
    job = login.submit("hostname", "--nodelist=n1")
    wait_until(lambda: "ReqNodeNotAvail" in cluster.job(job)["Reason"])
    cluster.undrain("n1")
    cluster.until_job(job, "COMPLETED")
    assert login.output(job) == "n1\n"


def test_job_continues_while_the_controller_is_down(cluster: Cluster, login: Login) -> None:
    job = login.start("while :; do echo beat; sleep 0.05; done")
    cluster.stop_controller()
    asked = login.call("squeue")
    assert asked.returncode != 0
    assert "Unable to contact slurm controller" in asked.stderr
    beats = len(login.output(job))
    wait_until(lambda: len(login.output(job)) > beats)
    cluster.start_controller()
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert login.call("srun", "hostname").returncode == 0


def test_accounting_can_be_disabled_or_down(cluster: Cluster, login: Login) -> None:
    cluster.stop_database()
    asked = login.call("sacct")
    assert asked.returncode != 0
    assert "Problem talking to the database" in asked.stderr
    cluster.start_database()
    cluster.change_site(accounting=False)
    asked = login.call("sacct")
    assert asked.returncode != 0
    assert "Slurm accounting storage is disabled" in asked.stderr
    cluster.until_job(login.submit("true"), "COMPLETED")
    cluster.change_site(accounting=True)
    job = login.submit("true", "--comment=a comment")
    cluster.until_job(job, "COMPLETED")
    words = ["sacct", "-n", "-P", "-X", "--format=State,Comment", "-j", job]
    wait_until(lambda: login.call(*words).stdout == "COMPLETED|a comment\n")


def test_site_can_forbid_requeues(cluster: Cluster, login: Login) -> None:
    cluster.change_site(submit_script="forbid_requeue")
    job = login.start("sleep 600", "--requeue")
    asked = login.call("scontrol", "requeue", job)
    assert asked.returncode != 0
    assert "Requested operation is presently disabled" in asked.stderr
    cluster.change_site(submit_script="")
    job = login.start("sleep 600")
    assert login.call("scontrol", "requeue", job).returncode == 0
    assert cluster.until_job(job, "PENDING")["Restarts"] == "1"


def test_ordinary_user_has_a_home_a_group_and_this_checkout(cluster: Cluster, tmp_path: Path) -> None:
    assert "student" not in Path("/etc/passwd").read_text()
    assert cluster.run("id", "-nG", user="student").stdout == "student lab\n"
    told = "import getpass, mgpu_slurm; print(getpass.getuser(), mgpu_slurm.__name__)"
    script = f'{sys.executable} -c "{told}"; id -un; pwd'
    done = cluster.run("sbatch", "--wait", "--output=out", f"--wrap={script}", user="student")
    assert done.returncode == 0, done.stderr
    out = cluster.folder / "home/student/out"
    assert out.read_text().splitlines() == ["student mgpu_slurm", "student", str(cluster.home("student"))]
    assert out.stat().st_uid == 20001
    # a user indeed: neither others' files nor others' jobs
    assert cluster.run("ls", tmp_path, user="student").returncode != 0
    job = cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").stdout.strip()
    assert cluster.run("scancel", job, user="colleague").returncode != 0


def test_reset_restores_the_cluster(cluster: Cluster, login: Login) -> None:
    login.start(f"srun sh -c {STUBBORN!r}", "--nodes=2", "--nodelist=n1,n2")
    login.submit("sleep 600", "--array=0-999")
    login.submit("sleep 600", "--hold")
    cluster.change_site(submit_script="forbid_requeue")
    cluster.drain("n4")
    cluster.cut("n3", noticed=False)
    cluster.node_down("n2")
    cluster.stop_controller()
    cluster.stop_database()
    cluster.reset()
    assert login.call("squeue", "--noheader").stdout == ""
    assert sorted(login.call("srun", "--nodes=4", "hostname").stdout.split()) == [*NODES]
    job = login.start("sleep 600")
    assert login.call("scontrol", "requeue", job).returncode == 0
    assert login.call("sacct").returncode == 0


HOLDER = """
import json, sys
from pathlib import Path
from tests.on_slurm.cluster import Cluster, REPOSITORY

with Cluster.up(Path(sys.argv[1]), Path(sys.argv[2])) as cluster:
    cluster.run("sbatch", "--output=/dev/null", "--nodes=4", "--wrap=srun sleep 600")
    read = cluster.run("cat", REPOSITORY / "tests/on_slurm/cluster.py", user="student")
    print(json.dumps({"pid": cluster._machine.pid, "read": len(read.stdout)}), flush=True)
    sys.stdin.read()
"""


def facts_of_the_host() -> dict[str, Any]:
    files = {name: Path(name).read_bytes() for name in ("/etc/hosts", "/etc/passwd", "/etc/group", "/proc/mounts")}
    return files | {"interfaces": os.listdir("/sys/class/net"), "name": os.uname().nodename}


def namespaces(pid: int | str) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("mnt", "pid", "net", "uts")}
    except OSError:  # it has ended
        return set()


def members(spaces: set[str]) -> list[str]:
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and namespaces(pid) & spaces]


def end_of_input(holder: subprocess.Popen[str]) -> None:
    holder.communicate()


def kill(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.communicate()


@pytest.mark.parametrize("end", [end_of_input, kill])
def test_second_cluster_from_a_private_folder_leaves_nothing_behind(
    end: Callable[[subprocess.Popen[str]], None], tmp_path: Path
) -> None:
    """It runs alongside the first; its checkout is below folders that only root may enter, as pytest's are."""
    before = facts_of_the_host()
    ours = namespaces("self")
    checkout = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "tests/on_slurm", checkout / "tests/on_slurm")
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "state"), str(PREPARED)]
    environ = os.environ | {"PYTHONPATH": ""}
    holder = subprocess.Popen(
        words, cwd=checkout, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    told = json.loads(holder.stdout.readline())
    assert told["read"] == len((REPOSITORY / "tests/on_slurm/cluster.py").read_text())
    spaces = namespaces(told["pid"])
    assert len(spaces) == 4
    assert not spaces & ours
    wait_until(lambda: len(members(spaces)) > 20)  # its job too
    assert facts_of_the_host() == before
    squeue = (tmp_path / "state/bin/squeue").read_text()
    end(holder)
    wait_until(lambda: members(spaces) == [])
    assert facts_of_the_host() == before
    # a command that is left, or kept in a shell's memory, does not take the host for the cluster
    done = subprocess.run(["sh", "-c", squeue], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "squeue: the cluster is down\n")
