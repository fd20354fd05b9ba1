"""A rank that has failed ends soon, whatever it is blocked on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import crash
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.request.parallelism import Parallelism

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


def test_refused_input_is_shown_in_the_code_that_gave_it() -> None:
    with pytest.raises(UserError) as raised:
        Parallelism(shard=0)
    shown = crash.own_traceback(raised.value)
    assert "Parallelism(shard=0)" in shown
    assert "parallelism.py" not in shown
    assert shown.endswith("UserError: --shard 0: expected at least 1\n")


LOST = "[/torch/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:43755."


def raise_from(cause: Exception) -> None:
    raise ValueError("the step failed") from cause


def raise_while_handling(cause: Exception) -> None:
    try:
        raise cause
    except Exception:
        raise ValueError("the step failed")  # noqa: B904


@pytest.mark.parametrize("raises", [raise_from, raise_while_handling])
@pytest.mark.parametrize(("cause", "is_consequence"), [(RuntimeError(LOST), True), (RuntimeError("too large"), False)])
def test_error_because_of_a_lost_connection_is_a_consequence(
    raises: Callable[[Exception], None], cause: Exception, is_consequence: bool
) -> None:
    with pytest.raises(ValueError, match="the step failed") as raised:
        raises(cause)
    assert crash.record(raised.value, "", RankInfo()).consequence is is_consequence
