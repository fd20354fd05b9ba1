"""The command of a run as a child process of its rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mgpu_slurm.request.spec import Resources, Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder

TERMINATED_EARLY = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from mgpu_slurm.rank import command
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder

# the last call before the child is started
command.adopt_orphans = lambda: os.kill(os.getpid(), signal.SIGTERM)
folder = RunFolder(Path(sys.argv[1]))
print(command.run_command(SimpleNamespace(spec=read_spec(folder), folder=folder, attempt=1), ("sleep", "600")))
"""


def test_sigterm_that_precedes_the_start_of_the_command_ends_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "try")
    folder.create()
    Spec("try", Target(command=("sleep", "600")), "slurm", Resources(), python=sys.executable).write(folder)
    script = [sys.executable, "-c", TERMINATED_EARLY, str(folder.path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert folder.terminated(1).exists()
