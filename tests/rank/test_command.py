"""The command of a run as a child process of its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.core.processes import descendants
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import wait_until

TERMINATED_EARLY = """
import os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from mgpu_slurm.core.processes import descendants
from mgpu_slurm.rank import command
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import wait_until

class Popen(subprocess.Popen):
    def __init__(self, words, **options):
        # the other is the witness of signals, just before the command
        is_command = "executable" in options
        if is_command == (sys.argv[2] == "with"):
            os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(words, **options)
        if is_command and (words[0] == "touch" or words[-1] == "kill -TERM $$"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        elif is_command and words[0] == "sh":
            wait_until(lambda: descendants(self.pid))

subprocess.Popen = Popen
folder = RunFolder(Path(sys.argv[1]))
spec = read_spec(folder)
print(command.run_command(SimpleNamespace(spec=spec, folder=folder, attempt=1, listener=None), spec.target.command))
"""


def ended_early(tmp_path: Path, command: tuple[str, ...], when: str) -> RunFolder:
    """Run a command that a SIGTERM ends as it starts, "with" or "before" it; return the folder of its run."""
    folder = RunFolder(tmp_path / "runs" / "try")
    folder.create()
    Spec("try", Target(command=command), "slurm", Resources(), python=sys.executable).write(folder)
    script = [sys.executable, "-c", TERMINATED_EARLY, str(folder.path), when]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert folder.terminated(1).exists()
    return folder


@pytest.mark.parametrize(
    "command",
    [("sleep", "600"), ("sh", "-c", "sleep 600; exit"), ("sh", "-c", "kill -TERM $$")],
    ids=["runs", "has a child", "has ended"],
)
def test_sigterm_that_comes_as_the_command_starts_ends_it(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Whether the command and its children have still to be told, or the signal of the whole group has ended it."""
    ended_early(tmp_path, command, "with")


def test_command_does_not_start_after_a_sigterm(tmp_path: Path) -> None:
    ended_early(tmp_path, ("touch", str(tmp_path / "started")), "before")
    assert not (tmp_path / "started").exists()


COUNTS = """
import signal, sys, time
from pathlib import Path
heard = []
for signum in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda signum, frame: heard.append(signum))
Path(sys.argv[1]).touch()
while not heard:
    time.sleep(0.02)
time.sleep(1)
print(*heard)
"""
RUNS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from mgpu_slurm.rank import command
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder

folder = RunFolder(Path(sys.argv[1]))
spec = read_spec(folder)
sys.exit(command.run_command(SimpleNamespace(spec=spec, folder=folder, attempt=1, listener=None), spec.target.command))
"""


SHELL = ["sh", "-c", '"$@"; exit $?', "sh"]


@pytest.mark.parametrize("receivers", ["rank", "all"])
@pytest.mark.parametrize(
    ("launcher", "signum"),
    # SIGUSR1 ends a shell that has no trap for it
    [
        ([], signal.SIGUSR2),
        ([], signal.SIGTERM),
        ([], signal.SIGUSR1),
        (SHELL, signal.SIGUSR2),
        (SHELL, signal.SIGTERM),
    ],
)
def test_command_gets_each_signal_once(
    tmp_path: Path, launcher: list[str], signum: signal.Signals, receivers: str
) -> None:
    """SLURM sends it to all processes of a step, or only to its tasks."""
    folder, ready = RunFolder(tmp_path / "runs" / "try"), tmp_path / "ready"
    folder.create()
    command = (*launcher, sys.executable, "-c", COUNTS, str(ready))
    Spec("try", Target(command=command), "slurm", Resources(), python=sys.executable).write(folder)
    rank = subprocess.Popen([sys.executable, "-c", RUNS, str(folder.path)], stdout=subprocess.PIPE, text=True)
    wait_until(ready.exists)
    for pid in [rank.pid] if receivers == "rank" else [rank.pid, *descendants(rank.pid)]:
        os.kill(pid, signum)
    assert rank.communicate(timeout=60)[0] == f"{signum}\n"
