"""The lines that this package writes into a job's logs; `why` finds its warnings there.

They are printed, not passed to `logging`: the code of a job may configure or disable loggers, while these lines must
reach its log in any case, in order with its own output.
"""

from __future__ import annotations

from typing import TextIO

PREFIX = "mgpu_slurm: "
"""Prefix of every line, so that the others are the job's own."""

WARNING = f"{PREFIX}WARNING: "
"""Prefix of a warning of a problem that does not end the run."""


def say(text: str, file: TextIO | None = None) -> None:
    """Write a line.

    Args:
        file: None for standard output.
    """
    print(f"{PREFIX}{text}", file=file, flush=True)


def warn(text: str) -> None:
    """Write a warning, which `why` shows if the run has not failed."""
    print(f"{WARNING}{text}", flush=True)
