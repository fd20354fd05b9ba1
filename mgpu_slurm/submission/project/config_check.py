"""Check a config against the real job function, by importing its module, which may take seconds for torch alone.

It runs in its own process, `python -m mgpu_slurm.submission.project.config_check`; the question is on standard input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import target
from mgpu_slurm.request.config import Config


@dataclass(frozen=True)
class Question:
    target: str
    workdir: str
    """The folder in the snapshot that will be the job's working directory."""
    original: str
    """The folder that paths in the config are relative to."""
    values: list[Config]
    """The values of `--config` and `key=value`; or several sets of values, each of which has to fit."""


@dataclass(frozen=True)
class Answer:
    config: Config
    """The whole config as plain values, with defaults and absolute paths; of several sets, that of the first."""
    is_resolved: bool = True
    """See `JobFunction.is_resolved`."""
    error: str | None = None


def ask(question: Question) -> Answer:
    """Import the target in this process, and check the values."""
    target.use_snapshot(Path(question.workdir))
    try:
        job = target.load(question.target, Path(question.workdir))
        base = Path(question.original)
        config, *_ = [job.fill_plain(values, base) for values in question.values]
        return Answer(config, job.is_resolved(config, base))
    except UserError as error:
        return Answer({}, error=str(error))
    except Exception as error:
        # the config's own code, such as a __post_init__, may raise anything
        words = target.described_error(error, question.target, Path(question.workdir))
        return Answer({}, error=f"config of {question.target} cannot be made: {words}")


def reply(make: Callable[[], Any]) -> None:
    """Print the result of `make` as JSON; output of the user's code goes to standard error."""
    # the snapshot should contain the user's files only, not bytecode compiled by this check
    sys.dont_write_bytecode = True
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps(make()) + "\n")
    answers.close()


if __name__ == "__main__":
    reply(lambda: asdict(ask(Question(**json.loads(sys.stdin.read())))))
