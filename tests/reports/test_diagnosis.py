"""What a failed run failed of, from what really happened: each script here fails of its cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu_slurm.reports import diagnosis
from mgpu_slurm.reports.diagnosis import why
from mgpu_slurm.run_folder import failures
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from tests.support import Project, wait_until

SCRIPTS = {
    "import": "import no_such_module",
    "port": """
import socket
taken = socket.socket()
taken.bind(("127.0.0.1", 0))
taken.listen()
socket.socket().bind(taken.getsockname())
""",
    "host-memory": """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
bytearray(1 << 32)
""",
    "host-memory, torch": """
import resource, torch
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
torch.zeros(1 << 33)
""",
    "host-memory, loader": """
import os, signal, torch
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

for batch in DataLoader(Data(), num_workers=1):
    pass
""",
    "nan": """
import torch
torch.autograd.set_detect_anomaly(True)
value = torch.zeros(1, requires_grad=True)
(value.sqrt() * 0).backward()
""",
    "disk-full": """
import os
os.write(os.open("/dev/full", os.O_WRONLY), b"x")
""",
    "collective-timeout": """
from datetime import timedelta
import os
import torch
import torch.distributed as dist
store = dist.HashStore()
if os.fork() == 0:
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=1, world_size=2)
    import time
    time.sleep(20)
    os._exit(0)
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=0, world_size=2,
                        timeout=timedelta(seconds=2))
dist.all_reduce(torch.ones(1))
""",
    "connection": """
import os
import torch
import torch.distributed as dist
child = os.fork()
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=int(child == 0), world_size=2)
dist.barrier()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
dist.all_reduce(torch.ones(1))
""",
    "program": "{}['missing']",
    "crash": "import ctypes; ctypes.string_at(0)",
    "crash, abort": "import os; os.abort()",
    "shared-memory": """
import mmap, os
with open(os.environ["STORE"], "wb+") as file:
    file.truncate(8192)
    mapped = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    mapped[5000]
""",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_cause_of_a_failed_script_is_found(name: str, tmp_path: Path, project: Project) -> None:
    project.environ["STORE"] = str(tmp_path / "store")
    project.write("train.py", SCRIPTS[name])
    folder, facts = project.run("--retries", "0", "--", "python", "train.py")
    assert facts["state"] == "FAILED"
    found = why(RunFolder(folder), RunState.from_json(facts))
    assert found is not None
    assert found.cause.name == name.partition(",")[0], found
    assert found.who == "rank 0"


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group of 512 MB, in which the kernel kills what takes more."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    places = {line.split(":")[1]: line.split(":")[2] for line in own}
    if "memory" in places:
        group, limit = Path(f"/sys/fs/cgroup/memory{places['memory']}/mgpu-test-{os.getpid()}"), "memory.limit_in_bytes"
    else:
        group, limit = Path(f"/sys/fs/cgroup{places['']}/mgpu-test-{os.getpid()}"), "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("control groups have no limit of memory here")
        (group / limit).write_text(str(512 << 20))
        yield group
        wait_until(lambda: not (group / "cgroup.procs").read_text())
    finally:
        group.rmdir()


def test_rank_killed_by_the_oom_killer_is_reported_as_host_memory(project: Project, little_memory: Path) -> None:
    enter = ("sh", "-c", f'echo $$ > {little_memory}/cgroup.procs; exec "$@"', "sh")
    words = ("submit", "--executor", "local", "--retries", "0", "--", "python", "-c", "bytearray(1 << 30)")
    done = project.call(*words, prefix=enter)
    assert done.returncode == 1, done.stdout + done.stderr
    (folder,) = project.runs.iterdir()
    (facts,) = project.json("status", folder.name)
    assert (facts["state"], facts["attempts"]) == ("FAILED", 1)
    found = why(RunFolder(folder), RunState.from_json(facts))
    assert found is not None
    assert found.cause is failures.HOST_MEMORY
    assert found.error == "rank 0 was killed by SIGKILL"


FUNCTION = """
    def load(path):
        raise ValueError(f"{path} is no picture")


    def train(run, config):
        load("cat.txt")
"""


def test_program_error_is_reported_with_its_line(project: Project) -> None:
    project.write("train.py", FUNCTION)
    folder, facts = project.run("train.py")
    told = project.call("why", folder.name).stdout.splitlines()
    assert told[0] == f"FAILED  {folder.name}: {facts['reason']}"
    words = dict(line.split(maxsplit=1) for line in told[1:])
    assert words["why"] == "the program failed"
    assert words["where"].startswith("rank 0 on local1 in attempt 1 at 2")
    assert words["line"] == "train.py:3 in load"
    assert words["error"] == "ValueError: cat.txt is no picture"
    assert f"resume {folder.name} --code new` to continue" in words["fix"]
    assert (project.folder / words["log"]).read_text().endswith("ValueError: cat.txt is no picture\n")
    (answer,) = json.loads(project.call("why", folder.name, "--json").stdout)
    assert (answer["run"], answer["state"]) == (folder.name, "FAILED")
    assert (answer["why"]["cause"], answer["why"]["is_clusters"]) == ("program", False)


def test_crash_after_the_end_of_training_is_recognized(project: Project) -> None:
    project.write("train.py", "import os\nimport atexit\n\ndef train(run, config):\n    atexit.register(os.abort)\n")
    folder, facts = project.run("train.py")
    found = why(RunFolder(folder), RunState.from_json(facts))
    assert found is not None
    assert found.cause.name == "after-the-end"


def test_failed_attempt_of_a_completed_run_is_reported(project: Project) -> None:
    project.write("train.sh", "[ $MGPU_ATTEMPT = 2 ] || kill -9 $$\n")
    folder, _ = project.run("--", "sh", "train.sh")
    assert project.call("why", folder.name).stdout.splitlines() == [
        f"COMPLETED  {folder.name}",
        "attempt 1: rank 0 was killed by SIGKILL; restarted",
        "no problems: it completed",
    ]


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("exit 3", "FAILED: rank 0 ended with exit code 3; resumed"),
        ("exit 75", "it stopped before its time limit to be requeued; restarted"),
        ("kill -9 $PPID", "the supervisor was killed by SIGKILL; restarted"),
    ],
)
def test_end_of_the_previous_attempt_is_reported(project: Project, first: str, told: str) -> None:
    project.write("train.sh", f"[ $MGPU_ATTEMPT = 2 ] || {{ {first}; sleep 60; }}\n")
    folder, facts = project.run("--", "sh", "train.sh")
    if facts["state"] != "COMPLETED":
        done = project.call("resume", folder.name, "--follow")
        assert done.returncode == 0, done.stdout
    assert project.call("why", folder.name).stdout.splitlines()[1] == f"attempt 1: {told}"
    (answer,) = json.loads(project.call("why", folder.name, "--json").stdout)
    ended, _, then = told.partition("; ")
    assert answer["before"] == [{"attempt": 1, "ended": ended, "then": then}]


MISMATCH = """
    def train(run, config):
        run.report(1, loss=float("nan"))
        if run.is_main:
            run.report(2, loss=1.0)
        run.mean(1, 1)
"""


def test_mismatched_calls_of_ranks_are_reported_with_their_lines(project: Project) -> None:
    project.write("train.py", MISMATCH)
    folder, facts = project.run("train.py", "--nodes", "3")
    found = why(RunFolder(folder), RunState.from_json(facts))
    assert found is not None
    assert found.line == "train.py:5 in train (rank 0); train.py:6 in train (rank 1-2)"


KEEPS_NOTHING = """
    import time

    def train(run, config):
        for step in range(1, 1000):
            run.report(step, loss=1.0)
            time.sleep(0.05)
"""


def test_fix_says_if_there_is_no_checkpoint_to_resume_from(project: Project) -> None:
    project.write("train.py", KEEPS_NOTHING)
    name = project.submit("train.py").name
    wait_until(lambda: project.json("status", name)[0]["progress"])
    project.call("cancel", name)
    project.call("wait", name)
    told = project.call("why", name).stdout
    assert "starts from the beginning, as no checkpoint was written" in told


def test_killed_supervisor_is_reported(project: Project) -> None:
    project.write("train.py", KEEPS_NOTHING)
    name = project.submit("train.py").name
    wait_until(lambda: project.json("status", name)[0]["progress"])
    os.kill(int(project.json("status", name)[0]["job_id"]), signal.SIGKILL)
    wait_until(lambda: project.json("status", name)[0]["state"] == "FAILED")
    (answer,) = json.loads(project.call("why", name, "--json").stdout)
    assert answer["why"]["cause"] == "supervisor"


def test_commands_of_a_fix_fit_the_run(project: Project) -> None:
    project.write("train.py", "def train(run, seed: int = 0):\n    raise ValueError(seed)\n")
    group = project.submit("train.py", "--seeds", "2")
    project.call("wait", group.name)
    (first, _) = json.loads(project.call("why", group.name, "--json").stdout)
    # the runs of a group share their code
    assert f"resume {group.name} --code new`" in first["why"]["fix"]
    resumed = project.call("resume", group.name, "--code", "new")
    assert resumed.stdout.startswith(f"resumed run {group.name}"), resumed.stderr


STACKS = """Fatal Python error: Segmentation fault

Current thread 0x0001 (most recent call first):
  File "/run/code/train.py", line 3 in load
  File "/run/code/train.py", line 9 in train

Thread 0x0002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in run

Extension modules: numpy
"""
DUMP = "Its threads:\n" + STACKS.partition("\n\n")[2].replace("line 3", "line 7")
NATIVE = """Fatal Python error: Aborted

Current thread 0x0002 (most recent call first):
  <no Python frame>

Thread 0x0001 (most recent call first):
  File "/run/code/train.py", line 9 in train
"""
TRACEBACK = """Traceback (most recent call last):
  File "/run/code/train.py", line 12, in train
ValueError: no data
"""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (STACKS, "train.py:3 in load"),
        # stacks of a stuck rank are not those of a crash
        (DUMP + STACKS, "train.py:3 in load"),
        (DUMP + TRACEBACK, "train.py:12 in train"),
        # of a child, whose crash was survived
        (STACKS + TRACEBACK, "train.py:12 in train"),
        # in a thread of native code: the main thread is the last
        (NATIVE, "train.py:9 in train"),
    ],
)
def test_line_is_the_innermost_of_the_own_code(said: str, line: str) -> None:
    assert diagnosis._own_line(said, RunFolder(Path("/run"))) == line


def test_native_crash_is_reported_with_its_line(project: Project) -> None:
    project.write("train.py", "import ctypes\n\n\ndef train(run, config):\n    ctypes.string_at(0)\n")
    folder, _ = project.run("train.py")
    (answer,) = json.loads(project.call("why", folder.name, "--json").stdout)
    assert (answer["why"]["cause"], answer["why"]["line"]) == ("crash", "train.py:5 in train")
    assert "Fatal Python error: Segmentation fault" in project.call("logs", folder.name).stdout


def test_completed_run_with_nan_loss_is_reported(project: Project) -> None:
    project.write("train.py", "def train(run, config):\n    run.report(1, loss=float('nan'), accuracy=0.1)\n")
    folder, _ = project.run("train.py")
    ending = project.call("wait", folder.name).stdout
    assert "warning   loss is NaN or infinite: " in ending
    _, told = project.call("why", folder.name).stdout.splitlines()
    assert told.startswith("it completed, but loss is NaN or infinite: lower the learning rate")


def test_missing_command_is_recognized(project: Project) -> None:
    group = project.submit("--seeds", "1", "--", "no-such-command-{seed}")
    assert project.call("wait", group.name, "--timeout", "90").returncode == 1
    (facts,) = project.json("status", group.name)
    found = why(RunFolder(group / "tasks" / "0"), RunState.from_json(facts))
    assert found is not None
    assert found.cause is failures.NO_COMMAND


FAILS_AFTER_AN_EPOCH = """
    import torch

    def train(run, config):
        for epoch in run.restore(model=torch.nn.Linear(1, 1)).epochs(2):
            if epoch == 2:
                raise ValueError
"""


def test_resume_with_only_damaged_checkpoints_is_recognized(project: Project) -> None:
    project.write("train.py", FAILS_AFTER_AN_EPOCH)
    folder, _ = project.run("train.py")
    for tensors in folder.glob("checkpoints/step-*/*.safetensors"):
        tensors.write_bytes(b"something else")
    project.call("resume", folder.name, "--follow")
    (facts,) = project.json("status", folder.name)
    found = why(RunFolder(folder), RunState.from_json(facts))
    assert found is not None
    assert found.cause is failures.DAMAGED


OUTLIVES_A_WARNING = """
    def train(run, config):
        run.report(1, loss=1.0)
        print("mgpu_slurm: WARNING: rank 0 could not write the checkpoint of step 4: no space")
"""


def test_warning_of_a_completed_run_is_reported(project: Project) -> None:
    project.write("train.py", OUTLIVES_A_WARNING)
    folder, _ = project.run("train.py", "--cpus-per-task", "999")
    cores = len(os.sched_getaffinity(0))
    assert project.call("why", folder.name).stdout.splitlines()[1:] == [
        "it completed, with warnings",
        f"warning   rank 0 on local1: requested 999 cores per rank, but this rank may use {cores}",
        "warning   rank 0 could not write the checkpoint of step 4: no space",
    ]


def test_damaged_checkpoint_is_reported(project: Project) -> None:
    folder, _ = project.run("--", "true")
    (folder / "checkpoints" / "damaged-step-000000007").mkdir(parents=True)
    told = project.call("why", folder.name).stdout
    assert f"damaged   runs/{folder.name}/checkpoints/damaged-step-000000007 was damaged and was skipped" in told


def test_each_failed_run_of_a_group_is_reported(project: Project) -> None:
    project.write("train.sh", "exit $1\n")
    project.call("submit", "--executor", "local", "--seeds", "3", "--name", "three", "--", "sh", "train.sh", "{seed}")
    (group,) = {facts["run"].partition("/")[0] for facts in project.json("status")}
    answers = json.loads(project.call("why", group, "--json").stdout)
    assert [(answer["run"], answer["why"]["error"]) for answer in answers] == [
        (f"{group}/{task}", f"rank 0 ended with exit code {task}") for task in (1, 2)
    ]
    assert "no problems" in project.call("why", f"{group}/0").stdout


RAISES_DEEP = """
    import json

    def read(text):
        # as a library's generated code
        made = compile("def parse(text): return load(text)", "<eval_with_key>.1", "exec")
        names = {"load": json.loads}
        exec(made, names)
        return names["parse"](text)

    read("{")
"""


def test_users_own_line_comes_first_even_if_the_runs_folder_is_a_link(project: Project, tmp_path: Path) -> None:
    project.write("train.py", RAISES_DEEP)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "scratch")
    project.environ["MGPU_RUNS"] = str(tmp_path / "linked")
    folder, _ = project.run("--", "python", "train.py")
    headline, first, second, *_ = project.call("why", folder.name).stdout.splitlines()
    assert headline.startswith("FAILED ")
    assert first == "line      train.py:9 in read"
    assert second.startswith("why       ")


def test_line_of_a_function_from_the_command_line_is_reported(project: Project) -> None:
    code = "from mgpu_slurm import submit\ndef train(run, lr=0.1):\n    raise ValueError(lr)\n"
    code += "print(submit(train, executor='local').name)"
    environ = os.environ | project.environ
    words = [sys.executable, "-c", code]
    name = subprocess.run(words, cwd=project.folder, env=environ, capture_output=True, text=True, check=True).stdout
    project.call("wait", name.strip())
    assert project.call("why", name.strip()).stdout.splitlines()[1] == "line      <string>:3 in train"
