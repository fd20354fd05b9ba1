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
        f"import os, signal, sys\nfrom mgpu_slurm.core import processes\nparent = os.getpid()\n{script}",
    ]
    done = subprocess.run([*command, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_end_all_leaves_exit_codes_of_kept_processes_to_the_parent(tmp_path: Path) -> None:
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
def test_own_processes_are_seen_if_proc_hides_those_of_others() -> None:
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


def test_process_is_alive_until_its_last_thread_has_ended() -> None:
    """One that is killed while a thread waits for a disk may still write."""
    script = """
import ctypes, threading
asks, answers = os.pipe()
child = os.fork()
if child == 0:
    os.close(answers)
    threading.Thread(target=os.read, args=(asks, 1)).start()
    # SYS_exit ends only this thread, the first one
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
while processes._stat(child)[0] != "Z":
    pass
print(processes.is_alive(child, processes.started_at(child)), processes.descendants(parent) == [child])
print({parent, child} <= {*processes.with_variable("MARK", "here")})
os.close(answers)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(processes.started_at(child), processes.descendants(parent))
"""
    assert run(script, before=("env", "MARK=here")).split() == ["True", "True", "True", "None", "[]"]


def test_killed_process_that_does_not_end_is_named(tmp_path: Path) -> None:
    script = """
processes.ENDS_WITHIN = 0.0
child = os.fork()
if child == 0:
    signal.pause()
print(child)
processes.end_all(sys.argv[1], keep=set())
"""
    child, told = run(script, str(tmp_path)).splitlines()
    assert (
        told
        == f"mgpu_slurm: WARNING: processes {child} were killed and have not ended: a driver or file system holds them"
    )


def test_signal_goes_down_to_the_first_handler_that_is_not_a_shell(tmp_path: Path) -> None:
    """`passes` stands for a launcher that forwards signals to its child itself."""
    script = """
import pathlib, time
folder = pathlib.Path(sys.argv[1])
pids = os.open(folder / "pids", os.O_RDWR | os.O_CREAT | os.O_APPEND)

def start(name, *below, catches=True):
    pid = os.fork()
    if pid:
        return pid
    pathlib.Path("/proc/self/comm").write_text("bash" if name == "shell" else "other")
    signal.signal(signal.SIGUSR1, (lambda *_: (folder / name).touch()) if catches else signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: (folder / f"{name}.done").touch())
    for make in below:
        make()
    os.write(pids, f"{os.getpid()}\\n".encode())
    while True:
        signal.pause()

def until(condition):
    while not condition():
        time.sleep(0.01)

roots = [
    start("shell", lambda: start("script", lambda: start("worker"))),
    start("launcher", lambda: start("passes", lambda: start("below")), catches=False),
]
known = lambda: (folder / "pids").read_text().split()
until(lambda: len(known()) == 6)
processes.tell(signal.SIGUSR1, roots)
# each hears this one after the first
for pid in known():
    os.kill(int(pid), signal.SIGUSR2)
until(lambda: len(list(folder.glob("*.done"))) == 6)
processes.end_all("/none", keep=set())
print(*sorted(path.name for path in folder.iterdir() if path.suffix != ".done" and path.name != "pids"))
"""
    assert run(script, str(tmp_path)).split() == ["passes", "script", "shell"]
