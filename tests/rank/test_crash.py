"""A rank that has failed ends soon, whatever it is blocked on."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, re, threading, time
from mgpu_slurm.rank import crash

crash.FAREWELL_SECONDS, crash.LAST_SECONDS = 0.2, 2.0
{before}
crash.leave_soon(3)
{blocks}
"""
CHILD = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(3600,)).start()"


@pytest.mark.parametrize(
    ("before", "blocks", "code"),
    [
        # a child of its own would keep the pipe open
        (CHILD, "threading.Event().wait()", 3),
        # C code that gives the interpreter's lock to nobody
        ("", "re.match('(a+)+$', 40 * 'a' + 'b')", -signal.SIGALRM),
    ],
    ids=["waiting, with a child process", "C code that holds the GIL"],
)
def test_failed_rank_exits_while_blocked(before: str, blocks: str, code: int) -> None:
    script = SCRIPT.format(before=before, blocks=blocks)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == code
