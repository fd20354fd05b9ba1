"""What tests share: a machine that lacks something, and processes that Ctrl-C reaches."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support import REPOSITORY, require


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("false", pytest.skip.Exception)])
def test_a_test_that_lacks_something_fails_in_ci_and_is_skipped_elsewhere(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="a real SLURM"):
        require("a real SLURM")
    require(None)


def test_ctrl_c_reaches_what_tests_start_when_the_shell_that_started_them_ignores_it() -> None:
    code = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import subprocess, sys, tests.conftest
sys.exit(subprocess.run(["sh", "-c", "kill -INT $$; echo still here"]).returncode)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout == "", done.stderr
    assert done.returncode != 0
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
