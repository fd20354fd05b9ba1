"""The job's config at submission: completed and checked, without an import of the job if possible."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config as configs
from mgpu_slurm.request import job_function
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.job_function import JobFunction
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission.project import job_source
from mgpu_slurm.submission.project.config_check import Answer, Question


@dataclass(frozen=True)
class Completed:
    """The config of a submission."""

    config: Config
    """The config for the spec: whole, or as given."""
    base: str | None
    """The folder that relative paths in it are relative to; None for a whole config. See `Spec.config_base`."""
    known: Config
    """The known part of the whole config."""
    is_checked: bool = True
    """Whether the job will certainly accept it."""


def complete(
    spec: Spec,
    values: Sequence[Config],
    folder: RunFolder,
    cwd: Path,
    imports: bool,
    function: Callable[..., Any] | None = None,
) -> Completed:
    """Return the job's config.

    Args:
        values: sets of values that differ from the job's defaults; each set has to fit, and the config is that of the
            first.
        folder: holds the snapshot; a function that is not in a module is pickled there.
        cwd: the base of relative paths among the values.
        imports: whether to import the job even if its source suffices.
        function: the target, if it was given as an object.

    Raises:
        UserError: the job cannot be called, or the values do not fit.
    """
    target = spec.target
    if target.is_command:
        if any(values):
            key = next(iter(values[0]))
            raise UserError(f"config value {key!r}: a command takes none: put its own arguments after `--`")
        return Completed({}, None, {})
    if function is not None:
        job = job_function.from_callable(function, target.label)
        if target.pickled is not None:
            _pickle(job, folder)
        return _completed(job, spec, values, cwd)
    assert target.function is not None
    workdir = folder.code / spec.workdir
    reading = job_source.read(target.function, workdir)
    is_whole = reading is not None and reading.is_whole
    # a group takes its seed, and a sweep its epochs, from the whole config
    if imports or (spec.tasks is not None and not is_whole):
        answer = _ask(Question(target.function, str(workdir), str(cwd), list(values)))
        if answer.error is not None:
            raise UserError(answer.error)
        return _of_whole(spec, values[0], answer.config, answer.is_resolved, cwd)
    if reading is not None and is_whole:
        return _completed(reading.job, spec, values, cwd)
    known, *_ = [{}] if reading is None else [reading.job.fill_plain(each, cwd) for each in values]
    return Completed(values[0], str(cwd), known, is_checked=False)


def _completed(job: JobFunction, spec: Spec, values: Sequence[Config], cwd: Path) -> Completed:
    config, *_ = [job.fill_plain(each, cwd) for each in values]
    return _of_whole(spec, values[0], config, job.is_resolved(config, cwd), cwd)


def _of_whole(spec: Spec, given: Config, config: Config, is_resolved: bool, cwd: Path) -> Completed:
    if is_resolved or spec.kind == "sweep":
        return Completed(config, None, config)
    # the seeds of a group's runs count up from it
    seed = {"seed": config["seed"]} if spec.tasks is not None and "seed" in config else {}
    return Completed(given | seed, str(cwd), config)


def _pickle(job: JobFunction, folder: RunFolder) -> None:
    """Pickle the function with its config class and the types of the fields, which may not be importable elsewhere."""
    import cloudpickle  # type: ignore[import-untyped]

    folder.function.write_bytes(cloudpickle.dumps((job, configs.types_in(job.config_class))))


def _ask(question: Question) -> Answer:
    command = interpreter.command(sys.executable, "mgpu_slurm.submission.project.config_check")
    done = subprocess.run(command, input=json.dumps(asdict(question)), stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise UserError(
            f"target {question.target!r} ended the process that imported it, without an error: import it by hand"
        )
    return Answer(**json.loads(done.stdout))
