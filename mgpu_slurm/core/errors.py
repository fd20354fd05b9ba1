"""The exceptions of this package: user errors, cluster errors and ends of runs.

Every message is one line that names the value and the fix. The command line exits with the error's `exit_code`.
"""

from __future__ import annotations


class MgpuError(Exception):
    """Base class of the errors that this package raises on purpose."""

    exit_code = 1


class UserError(MgpuError, ValueError):
    """The call or a file is wrong; nothing was started and nothing was left behind."""

    exit_code = 2


class NoStudy(UserError):
    """The database has no study of that name."""


class ClusterError(MgpuError):
    """The cluster refused, did not answer, or does not exist."""

    exit_code = 3


class SweepError(UserError):
    """The job cannot be trained as its sweep file says, whatever the values: other trials would fail too."""


class RunFailed(MgpuError):
    """A run ended without a result; the message gives the first cause."""


class RendezvousError(MgpuError):
    """The ranks of a run did not find each other; the message names who is missing."""


class ForgeryError(MgpuError):
    """A message to a rank did not come from another rank of the run."""


class CollectiveMismatch(MgpuError):
    """Only some ranks made a call that all ranks have to make together."""


class RunStopped(SystemExit):
    """Raised on all ranks at the same step boundary, after a checkpoint was saved.

    Not an `Exception`, so that a job's `except Exception` does not swallow it. A script that called `attach()` exits
    with its exit code.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
        self.reason = reason


class TrialPruned(SystemExit):
    """Raised by `run.report` on all ranks when the study has pruned the trial.

    Like `RunStopped` it is not caught by a job's `except Exception`, and ends a script that called `attach()`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


class TrialPaused(RunStopped):
    """Raised on all ranks at a step boundary, after a checkpoint was saved, when the trial of a sweep pauses."""


class RunMeasured(SystemExit):
    """Raised on all ranks at the last step of a run that only measures its speed.

    Like `RunStopped` it is not caught by a job's `except Exception`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


def closest(word: str, known: list[str]) -> str | None:
    """Return the known word that is closest to another one; None if none is close."""
    import difflib

    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.65)), None)


def suggestion(word: str, known: list[str]) -> str:
    """Return ` (did you mean 'lr'?)` if one of the known words is close, else an empty string."""
    close = closest(word, known)
    return "" if close is None else f" (did you mean {close!r}?)"


def nearest(word: str, known: list[str]) -> str:
    """Return ` (did you mean 'lr'?)` if one of the known words is close, else the list of them."""
    return suggestion(word, known) or (f" (known: {', '.join(known)})" if known else "")
