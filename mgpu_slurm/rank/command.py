"""Run the command of a run as a rank: find its program, start it, and pass on its exit code."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from mgpu_slurm.core import log_lines, retry, torch_versions
from mgpu_slurm.core.processes import SignalWitness, adopt_orphans, children, tell
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.request.spec import TERMINATED_EXIT_CODE, Spec

PATIENCE_FOR_SIGTERM = 1.0
"""Seconds to wait until this process also receives the SIGTERM that ended its child."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a command gets, besides the lead signal."""


def run_command(rank: Rank, command: tuple[str, ...]) -> int:
    """Run a command with the lead signal ignored, because that would kill a script that does not handle it.

    Under the local executor, the command replaces this process. Under srun it is a child process, so that its exit code
    can be handled here first; a signal that SLURM sends only to this process is passed on to it. In a container it is a
    child process too, of rank 0's that serves the rendezvous.
    """
    spec = rank.spec
    lead = signal.Signals[f"SIG{spec.signal}"]
    signal.signal(lead, signal.SIG_IGN)
    program, words = program_of(spec, command)
    if program is None:
        log_lines.say(f"command {words[0]!r} {why_not_found(words[0])}", file=sys.stderr)
        os._exit(127)
    if rank.listener is not None:
        threading.Thread(target=_serve, args=(rank.listener,), name="rendezvous", daemon=True).start()
    if spec.nodes_are_simulated and spec.container is None:
        os.execv(program, words)
    heard: list[int] = []
    # a handler, because a child would inherit an ignored signal
    signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    adopt_orphans()
    witness = SignalWitness()
    if heard:
        return _ended_on_request(rank)
    child = subprocess.Popen(words, executable=program)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGTERM:
            heard.append(signum)
        if not witness.has(signum):
            # those that a launcher has left behind become children of this process
            tell(signum, [child.pid] if child.returncode is None else _others(witness))

    for signum in {lead, *PASSED_ON}:
        signal.signal(signum, pass_on)
    if heard:
        # the signal may have come just before the command existed
        tell(signal.SIGTERM, [child.pid])
    code = _wait_for(child)
    if code == -signal.SIGTERM and _comes(heard):
        # the SIGTERM ended a shell or launcher, whose children may still save
        with suppress(ChildProcessError):
            while _others(witness):
                os.wait()
        return _ended_on_request(rank)
    return 128 - code if code < 0 else code


def _ended_on_request(rank: Rank) -> int:
    """Return the exit code of a command that a SIGTERM has ended, or that was not started because of one."""
    if not rank.spec.is_queued:
        return TERMINATED_EXIT_CODE
    # on a non-zero exit code, srun would end the other ranks, which may still save
    mark = rank.folder.terminated(rank.attempt)
    retry.for_the_disk(mark.touch, mark)
    return 0


def _serve(descriptor: int) -> None:
    """Serve the store of the ranks on a bound socket, once one connects: a command may not use torch."""
    listener = socket.socket(fileno=descriptor)
    select.select([listener], [], [])
    store = torch_versions.serve_store(listener)
    threading.Event().wait()
    # kept until the end of the process
    del store


def _others(witness: SignalWitness) -> list[int]:
    """Return the living children of this process except the witness."""
    return [pid for pid in children().get(os.getpid(), []) if pid != witness.pid]


def _comes(heard: Collection[int]) -> bool:
    """Return whether this process also receives the signal that ended its child; SLURM signals them in turn."""
    give_up = time.monotonic() + PATIENCE_FOR_SIGTERM
    while not heard and time.monotonic() < give_up:
        time.sleep(0.02)
    return bool(heard)


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Reap the orphans of a command until it ends; return its exit code, negative for a signal."""
    ended = 0
    while ended != child.pid:
        ended, status = os.wait()
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


def program_of(spec: Spec, command: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the path of a command's program, or None if it does not exist, and the arguments including its name."""
    name, *arguments = command
    python = spec.python if spec.container is None else sys.executable
    if name in ("python", "python3"):
        # the interpreter of the submission, not the first one on the node's PATH; by its full path, from which it
        # finds its environment
        name = python
    # programs such as accelerate are next to the interpreter, even if its environment is not on PATH
    return shutil.which(name) or shutil.which(name, path=str(Path(python).parent)), [name, *arguments]


def why_not_found(name: str) -> str:
    if "/" not in name:
        return f"is not on PATH of {os.uname().nodename}"
    return "is not executable: chmod +x, or name its interpreter" if os.path.exists(name) else "does not exist"
