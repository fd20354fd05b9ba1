"""Processes of this machine: who is seen, and what is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY


def run(script: str, *words: str, before: tuple[str, ...] = ()) -> str:
    """What a Python process prints that has imported `processes`; it has no children but its own."""
    command = [
        *before,
        sys.executable,
        "-c",
        f"import os, signal, sys\nfrom mgpu_slurm import processes\nparent = os.getpid()\n{script}",
    ]
    done = subprocess.run([*command, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ending_all_leaves_the_exit_code_of_what_is_kept_to_its_parent(tmp_path: Path) -> None:
    script = """
kept = os.fork()
if kept == 0:
    os._exit(7)
other = os.fork()
if other == 0:
    processes.die_with_parent(signal.SIGKILL, parent)
    signal.pause()
# it has ended, and nobody has asked how
os.waitid(os.P_PID, kept, os.WEXITED | os.WNOWAIT)
processes.end_all(sys.argv[1], keep={kept})
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (kept, other)))
"""
    assert run(script, str(tmp_path)).split() == ["7", str(-signal.SIGKILL)]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a /proc of its own, as root")
def test_a_proc_that_hides_the_processes_of_others_shows_ones_own() -> None:
    script = """
import subprocess
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=1", "proc", "/proc"], check=True)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
# PR_SET_DUMPABLE: one that has changed its user is hidden from itself
processes._prctl(4, 1)
child = os.fork()
if child == 0:
    processes.die_with_parent(signal.SIGKILL, parent)
    signal.pause()
print(processes.started_at(1), processes.started_at(child) is None, processes.descendants(os.getpid()) == [child])
os.kill(child, signal.SIGKILL)
"""
    assert run(script, before=("unshare", "--mount")).split() == ["None", "False", "True"]
