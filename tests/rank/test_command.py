"""The command of a run as a child process of its rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.request.spec import Resources, Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder

TERMINATED_EARLY = """
import os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from mgpu_slurm.rank import command
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder

class Popen(subprocess.Popen):
    def __init__(self, words, **options):
        super().__init__(words, **options)
        if words[0] == "sh":
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

# the last call before the child is started
command.adopt_orphans = lambda: os.kill(os.getpid(), signal.SIGTERM)
command.subprocess.Popen = Popen
folder = RunFolder(Path(sys.argv[1]))
spec = read_spec(folder)
print(command.run_command(SimpleNamespace(spec=spec, folder=folder, attempt=1), spec.target.command))
"""


@pytest.mark.parametrize("command", [("sleep", "600"), ("sh", "-c", "kill -TERM $$")], ids=["runs", "has ended"])
def test_sigterm_that_precedes_the_start_of_the_command_ends_it(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Whether the command has still to be told, or the signal of the whole group has ended it already."""
    folder = RunFolder(tmp_path / "runs" / "try")
    folder.create()
    Spec("try", Target(command=command), "slurm", Resources(), python=sys.executable).write(folder)
    script = [sys.executable, "-c", TERMINATED_EARLY, str(folder.path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert folder.terminated(1).exists()
