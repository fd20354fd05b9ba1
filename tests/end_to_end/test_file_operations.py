"""How often a run, a rank and `status` ask the file system for something: on a shared one, thousands of them share it.

strace counts the system calls that name a file or folder of the project, or use an open one.
"""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import update_state
from tests.on_slurm.packages import quiet
from tests.support import Project, require

CALLS = "%file,read,pread64,write,pwrite64,getdents64,fsync,fdatasync,flock,ftruncate"
"""Those that a file server has to answer, with some that the kernel's cache answers."""

_NOT_COUNTED = re.compile("AT_EMPTY_PATH|resumed>")
"""Facts of a file that is open, and the ends of calls that another process has interrupted."""


_WORKING_DIRECTORY = re.compile("AT_FDCWD<[^>]*>")


def operations(project: Project, *words: str) -> int:
    """Run a command to its end under strace, with all processes that it starts, and count their calls."""
    seen = project.folder.parent / "strace"
    command = ["strace", "-f", "-y", "-qq", "-o", str(seen), "-e", f"trace={CALLS}", "--seccomp-bpf"]
    done = quiet([*command, sys.executable, "-m", "mgpu_slurm", *words], project.environ, cwd=project.folder)
    assert done.returncode == 0, done.stderr
    with seen.open(errors="replace") as lines:
        # the working directory is shown even for calls that do not use it
        calls = (_WORKING_DIRECTORY.sub("", line) for line in lines if not _NOT_COUNTED.search(line))
        return sum(str(project.folder) in call for call in calls)


@pytest.fixture
def traced(project: Project) -> Project:
    problem = quiet(["strace", "-f", "--seccomp-bpf", "-e", "trace=%file", "true"]) if shutil.which("strace") else None
    require(None if problem is not None and problem.returncode == 0 else "counting needs strace, and may trace")
    return project


def test_status_asks_the_same_of_each_run(traced: Project) -> None:
    folder, _ = traced.run("--name", "first", "--", "true")
    counts = {}
    for number in range(1, 61):
        copy = RunFolder(folder.with_name(f"finished-{number}"))
        shutil.copytree(folder, copy.path)
        update_state(copy, sync=False, run=copy.run)
        if number in (10, 60):
            counts[number] = operations(traced, "status")
    assert (counts[60] - counts[10]) / 50 <= 4
    # most by Python itself, which looks for modules in the working directory
    assert counts[10] - 10 * 4 <= 120


TRAINS = """
    import torch

    def train(run, config):
        model = run.wrap(torch.nn.Linear(2, 1))
        state = run.restore(model=model)
        for epoch in state.epochs(1):
            run.report(epoch, loss=1.0)
"""


# what torch itself asks differs
@pytest.mark.needs_torch("2.13")
def test_run_and_rank_ask_little(traced: Project) -> None:
    traced.write("train.py", TRAINS)
    counts = {}
    for ranks in (1, 3):
        words = ["--nodes", str(ranks), "--no-follow", "--executor", "local", "train.py"]
        counts[ranks] = operations(traced, "submit", *words)
    # with its part of a checkpoint
    assert (counts[3] - counts[1]) / 2 <= 110
    assert counts[1] <= 430
