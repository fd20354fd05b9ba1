"""Run the command of a run as a rank: find its program, start it, and pass its exit code on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from mgpu_slurm.core import retry
from mgpu_slurm.core.processes import adopt_orphans
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.request.spec import (
    Spec,
)

PATIENCE_FOR_SIGTERM = 1.0
"""Seconds within which this process gets the SIGTERM that has ended its child."""


def run_command(rank: Rank, command: tuple[str, ...]) -> int:
    """Run a command with the lead signal ignored: by default it would kill a script that knows nothing of it.

    Where the local executor waits for this process, the command replaces it. Under srun it is a child, so that its exit
    code can be read here first; it gets the signals of the step itself.
    """
    spec = rank.spec
    signal.signal(getattr(signal, f"SIG{spec.signal}"), signal.SIG_IGN)
    program, words = program_of(spec, command)
    if program is None:
        print(f"mgpu_slurm: command {words[0]!r} {why_not_found(words[0])}", file=sys.stderr, flush=True)
        os._exit(127)
    if spec.nodes_are_simulated:
        os.execv(program, words)
    heard: list[int] = []
    # a handler, which a child does not inherit, as it would an ignored signal
    signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    adopt_orphans()
    child = subprocess.Popen(words, executable=program)
    code = _wait_for(child)
    if code == -signal.SIGTERM and _comes(heard):
        # a shell or launcher that it has ended; what that has started may still save
        with suppress(ChildProcessError):
            while True:
                os.wait()
        if spec.is_queued:
            # for its code srun would end the other ranks, which may save too
            mark = rank.folder.terminated(rank.attempt)
            retry.for_the_disk(mark.touch, mark)
            return 0
    return 128 - code if code < 0 else code


def _comes(heard: Collection[int]) -> bool:
    """Return whether this process hears the signal too that has ended its child: SLURM tells one after the other."""
    give_up = time.monotonic() + PATIENCE_FOR_SIGTERM
    while not heard and time.monotonic() < give_up:
        time.sleep(0.02)
    return bool(heard)


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Collect the orphans of a command until it has ended itself; return its exit code, negative for a signal."""
    ended = 0
    while ended != child.pid:
        ended, status = os.wait()
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


def program_of(spec: Spec, command: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the program that a command names, None if there is none, and the words to start it with."""
    name, *arguments = command
    if name in ("python", "python3"):
        # the interpreter of the submission, not the one a node's PATH finds first; by its path, from which it
        # finds its environment
        name = spec.python
    # programs such as accelerate are found beside the interpreter, also where that environment is not on PATH
    return shutil.which(name) or shutil.which(name, path=str(Path(spec.python).parent)), [name, *arguments]


def why_not_found(name: str) -> str:
    if "/" not in name:
        return f"is not on PATH of {os.uname().nodename}"
    return "may not be executed: chmod +x, or name its interpreter" if os.path.exists(name) else "is not there"
