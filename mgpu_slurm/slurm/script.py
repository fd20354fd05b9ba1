"""The batch script of a run, exactly as sbatch gets it; and the job arrays of a group.

SLURM numbers the tasks of each array from 0, and limits how many one may have.
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
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.request.spec import RESOURCE_FLAGS, SETUP_FAILED_VARIABLE, Spec
from mgpu_slurm.slurm import sbatch

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]{}&|*~^-]+")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_TAKEN = {
    "dependency": "use --after or --after-any",
    "array": "use --seeds",
    "clusters": "runs are looked after in one cluster: submit from a login node of that one",
    "error": "it lies in the run folder, with the output",
    "job-name": "it is the name of the run",
    "no-requeue": "use --max-requeues 0",
    "open-mode": "a requeued run appends to its log",
    "output": "it lies in the run folder",
    "parsable": "the answer of sbatch is read",
    "quiet": "the answer of sbatch is read",
    "requeue": "use --max-requeues",
    "signal": "use --signal",
    "test-only": "use --dry-run",
    "wait": "use the command wait",
    "wrap": "the script is made here",
}
"""Options of sbatch that are decided here, and what to do instead."""


# a `module load` that fails would leave ranks on the CPU, and nobody would hear of it. What fails inside of a file that
# a line sources, or of a function, is that one's own business; a line that has to succeed wants `set -e` before it
_TRAP = f"""trap '(( ${{#BASH_SOURCE[@]}} > 1 )) || : ${{{SETUP_FAILED_VARIABLE}:="$BASH_COMMAND"}}' ERR"""


def render(spec: Spec, folder: RunFolder, token: str, array: Array | None = None, dependency: str = "") -> str:
    """The script that starts one attempt of a run, or of some runs of a group.

    Args:
        folder: where the run or group lives, by its absolute path.
        token: marks the job in its comment, so that a submission without an answer can be looked for, and lets one
            job only go to work for it. An argument of the script is the token instead.
        array: the runs of a group.
        dependency: on which jobs it waits, as sbatch says it; empty for none.

    Raises:
        UserError: a value that no script can hold, or an option that is decided here.
    """
    lines = ["#!/bin/bash"]
    for option, value in _options(spec, folder, token, array, dependency):
        lines += _line(option, value, spec.rename)
    return "\n".join([*lines, "", *_body(spec, folder, token, array), ""])


def _options(
    spec: Spec, folder: RunFolder, token: str, array: Array | None, dependency: str
) -> Iterator[tuple[str, str]]:
    """Options of sbatch in their fixed order; an empty value is a flag without one."""
    asked = spec.resources
    yield "job-name", spec.run
    if array is not None:
        yield "array", array.option(spec.at_once)
    if dependency:
        yield "dependency", dependency
        # it would pend for ever otherwise
        yield "kill-on-invalid-dep", "yes"
    yield "nodes", str(asked.nodes)
    # without it a job gets one task on each node, and srun could not start more
    if asked.ntasks_per_node is not None or asked.ranks_per_node > 1:
        yield "ntasks-per-node", str(asked.ranks_per_node)
    # sites refuse the flag on nodes without GPUs, whatever its value
    if asked.gpus_per_node:
        yield "gpus-per-node", str(asked.gpus_per_node)
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
    """The log's path as sbatch's filename pattern."""
    place = str(folder.path)
    if "\\" in place:
        raise UserError(
            f"runs folder {place!r}: sbatch cannot log below a name with a backslash: set MGPU_RUNS elsewhere"
        )
    return str(RunFolder(Path(place.replace("%", "%%"))).launch_log(job))


def _line(option: str, value: str, rename: dict[str, str | None]) -> list[str]:
    """The `#SBATCH` line of an option as this site wants it said, or none."""
    form = rename.get(option, f"{option}={{}}" if value else option)
    if form is None:
        return []
    name, equals, value = form.replace("{}", value).partition("=")
    return [f"#SBATCH --{name}{equals}{_quoted(name, value) if equals else ''}"]


def _quoted(option: str, value: str) -> str:
    """The value in the quotes that sbatch's own reader of `#SBATCH` lines understands; a shell never sees it."""
    if any(ord(character) < 32 for character in value):
        raise UserError(f"--{option} {value!r}: a line break or control character cannot stand in a batch script")
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _body(spec: Spec, folder: RunFolder, token: str, array: Array | None) -> Iterator[str]:
    # a job that is submitted again from inside a job gets a token of its own
    yield f"mgpu_token=${{1:-{token}}}"
    # what the lines below source would take it for their own argument
    yield "set --"
    if spec.resources.cpus_per_task is not None:
        # srun no longer inherits it from sbatch
        yield f"export SRUN_CPUS_PER_TASK={spec.resources.cpus_per_task}"
    yield from preparation(spec)
    yield f"run={_place(folder, array)}"
    batch = interpreter.command(spec.python, "mgpu_slurm.job", "batch")
    # by it steps of the ranks are told from others, such as those of `shell`
    name = f"--job-name={spec.run}"
    yield f'exec {shlex.join(batch)} "$run" --token "$mgpu_token" -- {shlex.join(ranks_command(spec, [name]))} "$run"'


def preparation(spec: Spec) -> Iterator[str]:
    """The lines of the shell that come before srun."""
    if spec.setup:
        yield _TRAP
        yield from spec.setup
        yield f"trap - ERR; export {SETUP_FAILED_VARIABLE}"
    for name, value in spec.environment.items():
        if not _VARIABLE.fullmatch(name):
            raise UserError(f"environment {name!r}: expected the name of a variable, such as NCCL_DEBUG")
        yield f"export {name}={shlex.quote(value)}"


def _place(folder: RunFolder, array: Array | None) -> str:
    """The run's folder, for the shell."""
    if array is None:
        return shlex.quote(str(folder.path))
    task = f"$(({array.first} + SLURM_ARRAY_TASK_ID))" if array.first else "$SLURM_ARRAY_TASK_ID"
    return f"{shlex.quote(str(folder.tasks))}/{task}"


def ranks_command(spec: Spec, options: Sequence[str] = ()) -> list[str]:
    """Starts the ranks by srun; the run's folder is still to be added.

    Args:
        options: of srun, where it is not called by the job's own script.
    """
    # ALL: a site may set --export=NONE. kill: the other ranks would hang in their collectives until the time limit
    srun = ["srun", *options, "--export=ALL", "--kill-on-bad-exit=1"]
    srun += [f"--nodes={spec.resources.nodes}", f"--ntasks-per-node={spec.resources.ranks_per_node}", "--unbuffered"]
    return [*srun, *interpreter.command(spec.python, "mgpu_slurm.job", spec.rank_part)]


@dataclass(frozen=True)
class Array:
    """Some runs of a group that are one job array."""

    first: int
    """Index in the group of the run that is task 0 of the array."""
    tasks: tuple[int, ...]
    """Indices in the group, rising."""

    def option(self, at_once: int | None) -> str:
        """What sbatch's --array takes: `0-4,7%2`."""
        limit = f"%{at_once}" if at_once is not None else ""
        return ranges(task - self.first for task in self.tasks) + limit


def split(tasks: Sequence[int], largest: int) -> list[Array]:
    """The arrays for these runs of a group.

    Args:
        tasks: indices in the group, rising.
        largest: SLURM's MaxArraySize; task numbers of an array are below it.
    """
    blocks: dict[int, list[int]] = {}
    for task in tasks:
        blocks.setdefault(task // largest * largest, []).append(task)
    return [Array(first, tuple(block)) for first, block in blocks.items()]
