"""The target's own word on its config: what was given, completed by the job's defaults and checked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mgpu_slurm import config as configs
from mgpu_slurm import job_function
from mgpu_slurm.errors import UserError
from mgpu_slurm.job_function import JobFunction
from mgpu_slurm.launch import checked, local, signature
from mgpu_slurm.launch.check import Answer, Question
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.spec import Spec


def complete(
    spec: Spec,
    values: Sequence[dict[str, Any]],
    folder: RunFolder,
    cwd: Path,
    key: str,
    supervisor: local.Supervisor | None = None,
    function: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """The job's whole config as plain values.

    Args:
        values: those that differ from the job's defaults; where there are several sets of them, each has to fit, and
            the config is that of the first.
        folder: holds the snapshot; a function that no module holds is pickled there.
        cwd: what relative paths among the values are relative to.
        key: names the code, which is not imported again where it was checked before.
        supervisor: imports the target in this process's stead, where there is one.
        function: the target, where it was given as an object.

    Raises:
        UserError: the target cannot be imported, or the values do not fit.
    """
    target = spec.target
    if target.is_command:
        if any(values):
            raise UserError(f"key=value {next(iter(values[0]))!r}: a command has no config; put it behind --")
        return {}
    if function is not None:
        job = job_function.from_callable(function, target.label)
        config, *_ = [job.fill_plain(each, cwd) for each in values]
        if target.pickled is not None:
            _pickle(job, folder)
        return config
    assert target.function is not None
    known = checked.recall(key)
    if known is not None:
        job = JobFunction(target.function, lambda run, config: None, signature.rebuild(known))
        config, *_ = [job.fill_plain(each, cwd) for each in values]
        return config
    workdir = folder.code / spec.workdir
    answer = _ask(Question(target.function, str(folder.code), str(workdir), str(cwd), list(values)), supervisor)
    if answer.error is not None:
        raise UserError(answer.error)
    if answer.description is not None:
        checked.keep(key, answer.description)
    return answer.config


def _pickle(job: JobFunction, folder: RunFolder) -> None:
    """The config's class travels with the function, and the types of its fields: their names may mean nothing
    elsewhere."""
    import cloudpickle  # type: ignore[import-untyped]

    folder.function.write_bytes(cloudpickle.dumps((job, configs.types_in(job.config_class))))


def _ask(question: Question, supervisor: local.Supervisor | None) -> Answer:
    asked = json.dumps(asdict(question))
    if supervisor is not None:
        line = supervisor.ask(asked)
    else:
        command = [sys.executable, "-m", "mgpu_slurm.launch.check"]
        line = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=False).stdout
    if not line:
        raise UserError(
            f"target {question.target!r} ended the process that imported it, without an error: import it by hand"
        )
    return Answer(**json.loads(line))
