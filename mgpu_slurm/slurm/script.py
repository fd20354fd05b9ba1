"""Render the batch script of a run, exactly as passed to sbatch, and split a group into job arrays.

Task numbers of each array start at 0, and SLURM limits the size of an array.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import ranges
from mgpu_slurm.request import rank_command
from mgpu_slurm.request.resources import RESOURCE_FLAGS
from mgpu_slurm.request.spec import SETUP_FAILED_VARIABLE, Spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import sbatch

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]{}&|*~^-]+")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_TAKEN = {
    "dependency": "use --after or --after-any",
    "array": "use --seeds",
    "clusters": "a run belongs to one cluster: submit from a login node of that cluster",
    "error": "it is in the run folder, with the output",
    "job-name": "it is the name of the run",
    "no-requeue": "use --max-requeues 0",
    "open-mode": "a requeued run appends to its log",
    "output": "it is in the run folder",
    "parsable": "the output of sbatch is parsed",
    "quiet": "the output of sbatch is parsed",
    "requeue": "use --max-requeues",
    "signal": "use --signal",
    "test-only": "use --dry-run",
    "wait": "use the command wait",
    "wrap": "the batch script is generated",
}
"""Options of sbatch that this package sets, and what to use instead."""


# a failed `module load` would leave ranks on the CPU unnoticed. Failures inside a sourced file or a function are not
# recorded; a line that must succeed needs `set -e` before it
_TRAP = f"""trap '(( ${{#BASH_SOURCE[@]}} > 1 )) || : ${{{SETUP_FAILED_VARIABLE}:="$BASH_COMMAND"}}' ERR"""


def render(spec: Spec, folder: RunFolder, token: str, array: Array | None = None, dependency: str = "") -> str:
    """Return the script that starts one attempt of a run, or of some runs of a group.

    Args:
        folder: the run or group, by its absolute path.
        token: marks the job in its comment, so that a submission without an answer can be looked up, and only one job
            works for it. An argument of the script replaces it.
        array: the runs of a group.
        dependency: the jobs that it waits for, in sbatch's format; empty for none.

    Raises:
        UserError: a value cannot be written in a script, or an option is one that this package sets.
    """
    lines = ["#!/bin/bash"]
    for option, value in _options(spec, folder, token, array, dependency):
        lines += _line(option, value, spec.rename)
    return "\n".join([*lines, "", *_body(spec, folder, token, array), ""])


def _options(
    spec: Spec, folder: RunFolder, token: str, array: Array | None, dependency: str
) -> Iterator[tuple[str, str]]:
    """Yield the options of sbatch in a fixed order; an empty value is a flag without one."""
    asked = spec.resources
    yield "job-name", spec.run
    if array is not None:
        yield "array", array.option(spec.at_once)
    if dependency:
        yield "dependency", dependency
        # otherwise it would pend forever
        yield "kill-on-invalid-dep", "yes"
    yield "nodes", str(asked.nodes)
    # without it a job gets one task per node, and srun could not start more
    if asked.ntasks_per_node is not None or asked.ranks_per_node > 1:
        yield "ntasks-per-node", str(asked.ranks_per_node)
    # sites refuse the flag on nodes without GPUs, whatever its value
    if asked.gpus_per_node:
        yield "gpus-per-node", asked.gpus_as_requested
    if asked.cpus_per_task is not None:
        yield "cpus-per-task", str(asked.cpus_per_task)
    for name in ("mem", "time", "partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation"):
        value = getattr(asked, name)
        if value is not None:
            yield name, value
    for name, value in asked.sbatch.items():
        _check_extra(name)
        if name != "comment":
            yield name, value
    yield "output", _pattern(folder, "%j" if array is None else "%A_%a")
    yield "open-mode", "append"
    yield ("requeue" if spec.max_requeues else "no-requeue"), ""
    if spec.lead is not None:
        yield "signal", f"{spec.signal}@{spec.lead}"
    yield "comment", sbatch.comment(spec, token)


def _check_extra(name: str) -> None:
    if not _OPTION.fullmatch(name):
        raise UserError(f"--sbatch {name!r}: expected a long option of sbatch, for example mail-type")
    if name in _TAKEN:
        raise UserError(f"--sbatch {name}: {_TAKEN[name]}")
    if name.replace("-", "_") in RESOURCE_FLAGS:
        raise UserError(f"--sbatch {name}: use --{name}")


def _pattern(folder: RunFolder, job: str) -> str:
    """Return the log's path as a filename pattern of sbatch."""
    place = str(folder.path)
    if "\\" in place:
        raise UserError(
            f"runs folder {place!r}: sbatch cannot log to a path with a backslash: set MGPU_RUNS to another folder"
        )
    return str(RunFolder(Path(place.replace("%", "%%"))).launch_log(job))


def _line(option: str, value: str, rename: dict[str, str | None]) -> list[str]:
    """Return the `#SBATCH` line of an option in this site's form, or none."""
    form = rename.get(option, f"{option}={{}}" if value else option)
    if form is None:
        return []
    name, equals, value = form.replace("{}", value).partition("=")
    return [f"#SBATCH --{name}{equals}{_quoted(name, value) if equals else ''}"]


def _quoted(option: str, value: str) -> str:
    """Return the value quoted for sbatch's parser of `#SBATCH` lines; a shell never sees it."""
    if any(ord(character) < 32 for character in value):
        raise UserError(f"--{option} {value!r}: a batch script cannot contain line breaks or control characters")
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _body(spec: Spec, folder: RunFolder, token: str, array: Array | None) -> Iterator[str]:
    # a job that is resubmitted from inside a job gets a new token
    yield f"mgpu_token=${{1:-{token}}}"
    # files sourced below would take it as their own argument
    yield "set --"
    if spec.resources.cpus_per_task is not None:
        # srun no longer inherits it from sbatch
        yield f"export SRUN_CPUS_PER_TASK={spec.resources.cpus_per_task}"
    yield from preparation(spec)
    yield f"run={_place(folder, array)}"
    batch = interpreter.command(spec.python, "mgpu_slurm.job", "batch")
    # distinguishes the ranks' steps from others, such as those of `shell`
    name = f"--job-name={spec.run}"
    ranks = shlex.join(ranks_command(spec, folder, [name]))
    yield f'exec {shlex.join(batch)} "$run" --token "$mgpu_token" -- {ranks} "$run"'


def preparation(spec: Spec) -> Iterator[str]:
    """Yield the shell lines before srun."""
    if spec.setup:
        yield _TRAP
        yield from spec.setup
        yield f"trap - ERR; export {SETUP_FAILED_VARIABLE}"
    for name, value in spec.environment.items():
        if not _VARIABLE.fullmatch(name):
            raise UserError(f"environment {name!r}: expected the name of a variable, such as NCCL_DEBUG")
        yield f"export {name}={shlex.quote(value)}"


def _place(folder: RunFolder, array: Array | None) -> str:
    """Return the run's folder, quoted for the shell."""
    if array is None:
        return shlex.quote(str(folder.path))
    task = f"$(({array.first} + SLURM_ARRAY_TASK_ID))" if array.first else "$SLURM_ARRAY_TASK_ID"
    return f"{shlex.quote(str(folder.tasks))}/{task}"


def ranks_command(spec: Spec, folder: RunFolder, options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts the ranks with srun; the caller appends the run's folder.

    Args:
        folder: the run or its group.
        options: further options of srun.
    """
    # ALL: a site may set --export=NONE. kill: the other ranks would hang in their collectives until the time limit
    srun = ["srun", *options, "--export=ALL", "--kill-on-bad-exit=1"]
    srun += [f"--nodes={spec.resources.nodes}", f"--ntasks-per-node={spec.resources.ranks_per_node}", "--unbuffered"]
    return [*srun, *rank_command.srun_options(spec, folder), *rank_command.words(spec, folder, spec.python)]


@dataclass(frozen=True)
class Array:
    """Runs of a group that form one job array."""

    first: int
    """Index in the group of the array's task 0."""
    tasks: tuple[int, ...]
    """Indices in the group, ascending."""

    def option(self, at_once: int | None) -> str:
        """Return the value of sbatch's --array: `0-4,7%2`."""
        limit = f"%{at_once}" if at_once is not None else ""
        return ranges(task - self.first for task in self.tasks) + limit


def split(tasks: Sequence[int], largest: int) -> list[Array]:
    """Return the arrays for these runs of a group.

    Args:
        tasks: indices in the group, ascending.
        largest: SLURM's MaxArraySize; task numbers of an array are below it.
    """
    blocks: dict[int, list[int]] = {}
    for task in tasks:
        blocks.setdefault(task // largest * largest, []).append(task)
    return [Array(first, tuple(block)) for first, block in blocks.items()]
