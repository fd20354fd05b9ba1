"""The tasks of a node as real processes with the variables of a step, whose ranks are forks of one process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mgpu_slurm.core.processes import children
from mgpu_slurm.job import node_process, rank_process
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from tests.support import wait_until

TASK = """
import os, random, shutil, signal, sys, threading, time
from pathlib import Path
from mgpu_slurm.core import processes
from mgpu_slurm.job import node_process, rank_process

node_process.ASK_SECONDS = float(os.environ["ASK_SECONDS"])
local_rank = int(os.environ["SLURM_LOCALID"])

def prepare():
    {prepare}

def run():
    {run}
    return 0

def touch(name):
    Path(f"{{name}}-{{os.environ['SLURM_LOCALID']}}").touch()

def remove_folder():
    # Python cannot import everything in a folder that is gone
    while not all(Path(f"imported-{{local_rank}}").exists() for local_rank in (0, 1)):
        time.sleep(0.01)
    shutil.rmtree(os.getcwd())

touch("imported")
stop_signals = frozenset({{signal.SIGTERM, signal.SIGUSR2}})
rank_process.exit_process(node_process.run(node_process.Task(local_rank, 2, prepare, run, stop_signals)))
"""
IDENTITY = "print(os.environ['SLURM_LOCALID'], os.getpid(), os.getppid(), flush=True)"
"""What `Node.said` returns for a task: its local rank, the process that ran it, and that one's parent."""
UNTIL_TERMINATED = "touch('ready'); signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals); time.sleep(600)"


class Node:
    """The two tasks of a node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._work = folder / "work"
        self._work.mkdir()
        self.tasks: list[subprocess.Popen[str]] = []

    def start(self, run: str, prepare: str = "pass", of_task_1: Mapping[str, str] | None = None) -> None:
        self.start_task(0, run, prepare)
        self.start_task(1, run, prepare, of_task_1)

    def start_task(
        self, local_rank: int, run: str, prepare: str = "pass", variables: Mapping[str, str] | None = None
    ) -> None:
        step = {"SLURM_JOB_ID": str(self._folder), "SLURM_STEP_ID": "0", "SLURM_LOCALID": str(local_rank)}
        with open(self._folder / f"said-{local_rank}", "w") as said:
            task = subprocess.Popen(
                [sys.executable, "-c", TASK.format(run=textwrap.indent(run, "    ").lstrip(), prepare=prepare)],
                env={**os.environ, "ASK_SECONDS": "60", **step, **(variables or {})},
                cwd=self._work,
                stdout=said,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self.tasks.append(task)

    def said(self, local_rank: int) -> list[int]:
        return [int(word) for word in (self._folder / f"said-{local_rank}").read_text().split()]

    def codes(self) -> list[int]:
        return [task.wait(60) for task in self.tasks]

    def wait_for(self, mark: str) -> None:
        wait_until(lambda: all((self._work / f"{mark}-{local_rank}").exists() for local_rank in (0, 1)))

    def processes(self) -> tuple[int, list[int]]:
        """Return the pids of the node's process and of the ranks that are its children."""
        below = children()
        (node,) = below[self.tasks[0].pid]
        return node, below.get(node, [])

    def end(self) -> None:
        for task in self.tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
            task.wait(60)
            assert task.stderr is not None
            task.stderr.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.end()


def test_ranks_are_forks_of_one_process_with_their_own_environment_and_output(node: Node) -> None:
    node.start(IDENTITY, of_task_1={"SLURM_PROCID": "7"})
    assert node.codes() == [0, 0]
    (rank_0, process_0, parent_0), (rank_1, process_1, parent_1) = node.said(0), node.said(1)
    assert (rank_0, rank_1) == (0, 1)
    assert parent_0 == parent_1
    assert len({process_0, process_1, parent_0, *(task.pid for task in node.tasks)}) == 5


def test_ranks_have_the_cores_of_their_tasks(node: Node) -> None:
    before = os.sched_getaffinity(0)
    # a task has the cores of the process that starts it
    os.sched_setaffinity(0, {min(before)})
    try:
        node.start("print(*os.sched_getaffinity(0), flush=True)", prepare=f"os.sched_setaffinity(0, {before})")
    finally:
        os.sched_setaffinity(0, before)
    assert node.codes() == [0, 0]
    assert (node.said(0), node.said(1)) == ([min(before)], [min(before)])


def test_ranks_draw_different_random_numbers(node: Node) -> None:
    draws = "import numpy\nprint(numpy.random.randint(1 << 30), random.randrange(1 << 30), flush=True)"
    node.start(draws, prepare="import numpy.random")
    assert node.codes() == [0, 0]
    assert all(ours != theirs for ours, theirs in zip(node.said(0), node.said(1), strict=True))


@pytest.mark.parametrize(
    ("ends", "code"),
    [("return 3", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.abort()", -6), ("raise SystemExit", 1)],
    ids=lambda value: str(value),
)
def test_task_ends_as_its_rank_ended(node: Node, ends: str, code: int) -> None:
    node.start(f"if os.environ['SLURM_LOCALID'] == '1':\n    {ends}")
    assert node.codes() == [0, code]


def test_first_task_ends_at_once_if_its_rank_has_failed(node: Node) -> None:
    waits = "while not Path('ready-1').exists():\n        time.sleep(0.02)"
    node.start(f"if os.environ['SLURM_LOCALID'] == '0':\n    {waits}\n    return 3\n{UNTIL_TERMINATED}")
    assert node.tasks[0].wait(60) == 3
    # as srun does then; what finds processes by their parents does not find the rank any more
    node.tasks[1].terminate()
    assert node.codes() == [3, -signal.SIGTERM]


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], ids=str)
@pytest.mark.parametrize("receivers", ["tasks", "all"])
def test_ranks_get_each_signal_once(node: Node, signum: signal.Signals, receivers: str) -> None:
    """SLURM sends it to all processes of a step, or only to its tasks."""
    counts = f"heard = []\nsignal.signal({int(signum)}, lambda signum, frame: heard.append(signum))\n"
    # a rank that is so new that SLURM may have missed it gets the signal anyway
    counts += f"signal.pthread_sigmask(signal.SIG_UNBLOCK, [{int(signum)}])\ntime.sleep(0.5)\ntouch('ready')\n"
    counts += "while not heard:\n    time.sleep(0.02)\ntime.sleep(1)\nprint(*heard, flush=True)"
    node.start(counts)
    node.wait_for("ready")
    process, ranks = node.processes()
    tasks = [task.pid for task in node.tasks]
    for pid in tasks if receivers == "tasks" else [tasks[0], process, *ranks, tasks[1]]:
        os.kill(pid, signum)
    assert node.codes() == [0, 0]
    assert (node.said(0), node.said(1)) == ([signum], [signum])


def test_first_task_waits_for_the_others_if_its_rank_has_succeeded(node: Node, tmp_path: Path) -> None:
    waits = "until = Path('go')\nwhile os.environ['SLURM_LOCALID'] == '1' and not until.exists():\n    time.sleep(0.02)"
    node.start(f"{waits}\ntouch('done')")
    wait_until(lambda: (tmp_path / "work" / "done-0").exists() and len(node.processes()[1]) == 1)
    # a step manager may find processes by their parents
    assert [task.poll() for task in node.tasks] == [None, None]
    (tmp_path / "work" / "go").touch()
    assert node.codes() == [0, 0]


def test_rank_of_a_killed_task_is_killed(node: Node) -> None:
    node.start(UNTIL_TERMINATED)
    node.wait_for("ready")
    node.tasks[1].kill()
    wait_until(lambda: len(node.processes()[1]) == 1)
    assert node.tasks[0].poll() is None


def test_ranks_and_tasks_of_a_killed_process_are_killed(node: Node) -> None:
    node.start(UNTIL_TERMINATED)
    node.wait_for("ready")
    process, ranks = node.processes()
    os.kill(process, signal.SIGKILL)
    assert node.codes() == [-signal.SIGKILL, -signal.SIGKILL]
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def test_signal_that_comes_before_the_rank_exists_reaches_it(node: Node, tmp_path: Path) -> None:
    prepare = "touch('importing'); [time.sleep(0.02) for _ in iter(lambda: Path('go').exists(), True)]"
    counts = "heard = signal.sigtimedwait(stop_signals, 60)\nprint(heard.si_signo, flush=True)"
    node.start(counts, prepare=prepare)
    wait_until(lambda: (tmp_path / "work" / "importing-0").exists() and _blocks(node.tasks[1].pid, signal.SIGUSR2))
    for task in node.tasks:
        task.send_signal(signal.SIGUSR2)
    (tmp_path / "work" / "go").touch()
    assert node.codes() == [0, 0]
    assert (node.said(0), node.said(1)) == ([signal.SIGUSR2], [signal.SIGUSR2])


def _blocks(pid: int, signum: int) -> bool:
    (line,) = [text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith("SigBlk")]
    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)


@pytest.mark.parametrize(
    ("prepare", "of_task_1"),
    [
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", {}),
        ("raise ValueError", {}),
        ("remove_folder()", {}),
        ("pass", {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
    ids=["another thread", "import that fails", "folder that is gone", "GPU of its own"],
)
def test_task_that_gets_no_fork_runs_its_rank_itself(node: Node, prepare: str, of_task_1: dict[str, str]) -> None:
    node.start(IDENTITY, prepare=prepare, of_task_1=of_task_1)
    assert node.codes() == [0, 0]
    assert node.said(1) == [1, node.tasks[1].pid, os.getpid()]


def test_task_with_variables_of_its_own_does_not_wait_for_the_import(node: Node, tmp_path: Path) -> None:
    waits = "[time.sleep(0.02) for _ in iter(lambda: Path('go').exists(), True)]"
    node.start("touch('done')", prepare=waits, of_task_1={"PMIX_LIKE": "1"})
    assert node.tasks[1].wait(60) == 0
    assert not (tmp_path / "work" / "done-0").exists()
    (tmp_path / "work" / "go").touch()
    assert node.codes() == [0, 0]


@pytest.mark.parametrize("queue", [None, 0], ids=["deaf", "full"])
def test_tasks_run_their_ranks_themselves_if_the_name_is_taken(node: Node, tmp_path: Path, queue: int | None) -> None:
    step = {"SLURM_JOB_ID": str(tmp_path), "SLURM_STEP_ID": "0"}
    address = node_process._address({**os.environ, **step})
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting,
    ):
        stranger.bind(address)
        if queue is not None:
            stranger.listen(queue)
            waiting.connect(address)
        for local_rank in (0, 1):
            node.start_task(local_rank, IDENTITY, variables={"ASK_SECONDS": "0.5"})
        assert node.codes() == [0, 0]
    assert [node.said(rank)[1] for rank in (0, 1)] == [task.pid for task in node.tasks]


FUNCTION, COMMAND = Target(function="jobs.digits:train"), Target(command=("true",))


@pytest.mark.parametrize(
    ("target", "local_ranks", "environ", "is_fork"),
    [
        (FUNCTION, 2, {}, True),
        (FUNCTION, 1, {}, False),
        (COMMAND, 2, {}, False),
        (FUNCTION, 2, {"MGPU_FORK_RANKS": "0"}, False),
        (FUNCTION, 2, {"SLURM_GPUS_PER_TASK": "1"}, False),
        (FUNCTION, 2, {"SLURM_GPU_BIND": "single:1"}, False),
        (FUNCTION, 2, {"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"}, False),
        (FUNCTION, 2, {"SLURM_TRES_PER_TASK": "cpu=2"}, True),
        (FUNCTION, 2, {"PMI_FD": "7"}, False),
        (FUNCTION, 2, {"PMIX_RANK": "0"}, False),
        (FUNCTION, 2, {"SLURMD_TRES_BIND": "gres/gpu:single:1"}, False),
        (FUNCTION, 2, {"OMP_PROC_BIND": "close"}, False),
        (FUNCTION, 2, {"SLURM_MEM_BIND_TYPE": "local"}, False),
        (FUNCTION, 2, {"SLURM_MEM_BIND_TYPE": "none"}, True),
    ],
)
def test_ranks_are_forked_where_that_is_possible_and_saves_time(
    target: Target, local_ranks: int, environ: dict[str, str], is_fork: bool
) -> None:
    spec = Spec("try", target, "slurm", Resources())
    assert rank_process.is_fork_of_node(spec, local_ranks, environ) is is_fork


def test_cluster_file_switches_forks_off() -> None:
    spec = Spec("try", FUNCTION, "slurm", Resources(), environment={"MGPU_FORK_RANKS": "0"})
    assert not rank_process.is_fork_of_node(spec, 2, {})
