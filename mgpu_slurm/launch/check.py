"""Is the target there, can it be called, and does its config fit? Asked before a run folder exists.

The answer needs the user's module imported, and that may import torch: so a process of its own does it, never the
command line's. Without a supervisor to ask: `python -m mgpu_slurm.launch.check`, the question on standard input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm import target
from mgpu_slurm.errors import UserError
from mgpu_slurm.launch import signature


@dataclass(frozen=True)
class Question:
    target: str
    code: str
    """The snapshot."""
    workdir: str
    """The folder in the snapshot where the job will stand."""
    original: str
    """The folder from which paths in the config are meant."""
    values: list[dict[str, Any]]
    """What `--config` and `key=value` give; or several sets of values, each of which has to fit."""


@dataclass(frozen=True)
class Answer:
    config: dict[str, Any]
    """The whole config as plain values, defaults filled in and paths absolute; of several the first."""
    description: Any = None
    """Of the config's class, where one can be given; see `signature`."""
    error: str | None = None


def ask(question: Question) -> Answer:
    """Imports the target here and now, and checks."""
    target.stand_in(Path(question.workdir))
    # the snapshot holds what the user has, not what this look at it compiles
    sys.dont_write_bytecode = True
    try:
        job = target.load(question.target, Path(question.workdir))
        found = [job.fill_plain(values, Path(question.original)) for values in question.values]
        is_class = job.config_class is not None and not job.by_name
        return Answer(found[0], signature.describe(job.config_class, Path(question.code)) if is_class else None)
    except UserError as error:
        return Answer({}, error=str(error))
    except Exception as error:
        # the config's own code, such as a __post_init__, may raise anything
        words = target.in_own_words(error, question.target, Path(question.workdir))
        return Answer({}, error=f"config of {question.target} cannot be made: {words}")


def reply(make: Callable[[], Any]) -> None:
    """Prints as JSON what `make` gives; what the user's code prints meanwhile belongs to no answer."""
    # the snapshot holds what the user has, not what this look at it compiles
    sys.dont_write_bytecode = True
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps(make()) + "\n")
    answers.close()


if __name__ == "__main__":
    reply(lambda: asdict(ask(Question(**json.loads(sys.stdin.read())))))
