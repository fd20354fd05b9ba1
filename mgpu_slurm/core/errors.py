"""The error family: what a user did wrong, what a cluster refused, how a run ended.

Every error is one line that names the value and the mend. The command line turns `exit_code` into its own.
"""

from __future__ import annotations


class MgpuError(Exception):
    """Base of everything this project raises on purpose."""

    exit_code = 1


class UserError(MgpuError, ValueError):
    """The call or a file was wrong; nothing was started and nothing was left behind."""

    exit_code = 2


class NoStudy(UserError):
    """A database has no study of that name."""


class ClusterError(MgpuError):
    """The cluster refused, did not answer, or is not there."""

    exit_code = 3


class RunFailed(MgpuError):
    """A run ended without a result; the message gives the first cause."""


class RendezvousError(MgpuError):
    """The ranks of a run did not find each other; the message names who is missing."""


class ForgeryError(MgpuError):
    """A message to a rank does not come from the run's other ranks."""


class CollectiveMismatch(MgpuError):
    """A call that all ranks have to make together was made by some of them only."""


class RunStopped(SystemExit):
    """Raised at a step boundary on all ranks alike, after the work was saved.

    Not an `Exception`, so that a job's own `except Exception` does not swallow it; and a script that called `attach()`
    ends with its exit code.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
        self.reason = reason


class TrialPruned(SystemExit):
    """Raised by `run.report` on all ranks alike, where the study has given the trial up.

    Like `RunStopped` it passes a job's own `except Exception`, and ends a script that called `attach()`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


def nearest(word: str, known: list[str]) -> str:
    """` (did you mean 'lr'?)` where one of the known words is close, else the list of them."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})" if known else ""
