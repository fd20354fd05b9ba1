"""Find what a call names but the run's code lacks: missing programs, and files that git ignores."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.torch_versions import OLDEST_TORCH
from mgpu_slurm.request.spec import SEED_PLACE, Spec, Target

_WORDS = re.compile(r"""'([^']+)'|"([^"]+)"|([^\s'",;:()=]+)""")

_BETWEEN_WORDS = re.compile(r"""[\s'"|;&<>()]+""")


def advice(name: str) -> str:
    """Return advice for a file or folder that the run's code lacks."""
    return f"{name} is not in the snapshot: use its absolute path or $MGPU_PROJECT"


def left_out(path: str, project: Path, snapshot: Path) -> str | None:
    """Return the first part of a relative path that the project has and the snapshot lacks, such as `data/`.

    Args:
        project: the folder in the project that the path is relative to.
        snapshot: the same folder in the snapshot.
    """
    if not path or os.path.isabs(path) or not os.path.lexists(project / path) or os.path.lexists(snapshot / path):
        return None
    normal = Path(os.path.normpath(path))
    parts = [Path(*normal.parts[: count + 1]) for count in range(len(normal.parts))]
    first = next((part for part in parts if not os.path.lexists(snapshot / part)), normal)
    return f"{first}/" if (project / first).is_dir() else str(first)


def left_out_in(text: str, project: Path, snapshot: Path) -> str | None:
    """Return the first such part among all paths that a text, such as an error, mentions."""
    for groups in _WORDS.findall(text):
        # the path of the code folder may contain a link
        word = "".join(groups).removeprefix(f"{os.path.realpath(snapshot)}/").removeprefix(f"{snapshot}/")
        if (found := left_out(word, project, snapshot)) is not None:
            return found
    return None


def resolve_command(spec: Spec, code: Path) -> tuple[Spec, list[str]]:
    """Return the spec with a command that its ranks will find, and human-readable notes on what they will not find.

    Args:
        code: the snapshot.

    Raises:
        UserError: there is no such program or script.
    """
    if spec.target.command is None:
        return spec, []
    snapshot = code / spec.workdir
    _check_script(spec, snapshot)
    program, *arguments = spec.target.command
    found, note = _program(program, spec, snapshot)
    notes = [] if note is None else [f"command   {note}"]
    words = _words(arguments)
    for name in dict.fromkeys(filter(None, (_argument_left_out(word, spec.original, snapshot) for word in words))):
        notes.append(f"note      {advice(name)}")
    return replace(spec, target=Target(command=(found, *arguments))), notes


def notes_on_config(given: Any, config: Any, spec: Spec, code: Path) -> list[str]:
    """Return human-readable notes on paths that were given as text and that the ranks will not find.

    Args:
        given: the values of the call.
        config: the same values as the job gets them, with absolute paths for fields of a path type.
    """
    found = (left_out(text, spec.original, code / spec.workdir) for text in _texts(given, config))
    return [f"note      {advice(name)}" for name in dict.fromkeys(filter(None, found))]


def _texts(given: Any, config: Any) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(config, dict):
        for key, value in given.items():
            yield from _texts(value, config.get(key))
    elif isinstance(given, list) and isinstance(config, list):
        for value, each in zip(given, config, strict=False):
            yield from _texts(value, each)
    elif isinstance(given, str) and given == config:
        yield given


def check_torch(spec: Spec, packages: Mapping[str, str]) -> None:
    """Raise UserError if the ranks of a job function would have a torch that is too old.

    Args:
        packages: versions of the installed distributions; a cluster's `setup` may bring others.
    """
    torch = packages.get("torch")
    if torch is not None and not _has_own_torch(spec) and interpreter.numbers(torch) < OLDEST_TORCH:
        raise UserError(f"torch {torch} is too old: install 2.6 or newer, or use a container (--container)")


def notes_on_torch(spec: Spec, packages: Mapping[str, str]) -> list[str]:
    """Return a human-readable note if the ranks of a job function would leave their GPUs idle.

    Args:
        packages: as for `check_torch`.
    """
    torch = packages.get("torch", "")
    if not spec.resources.gpus or "+cpu" not in torch or _has_own_torch(spec):
        return []
    fix = "install a build for the nodes' GPUs (pytorch.org), or submit with --gpus-per-node 0"
    return [f"note      torch {torch} computes on the CPU: {fix}"]


def _has_own_torch(spec: Spec) -> bool:
    """Return whether the ranks may have another torch than the submitting process."""
    return spec.target.is_command or _may_come_from_setup(spec)


def _words(arguments: list[str]) -> list[str]:
    """Return arguments, and the words of a shell's `-c` text, which may follow other options."""
    texts = [text for option, text in pairwise(arguments) if re.fullmatch(r"-\w*c", option)]
    return [*arguments, *(word for text in texts for word in _BETWEEN_WORDS.split(text))]


def _argument_left_out(word: str, project: Path, snapshot: Path) -> str | None:
    """Return the missing part of an argument, or of the value of `--name=value`."""
    return left_out(word, project, snapshot) or left_out(word.partition("=")[2], project, snapshot)


def _check_script(spec: Spec, snapshot: Path) -> None:
    """Raise UserError if a Python script is missing: better now than after a day in the queue."""
    interpreter, script, *_ = (*(spec.target.command or ()), "", "")
    is_known = Path(interpreter).name.startswith("python") and script.endswith(".py") and SEED_PLACE not in script
    if is_known and not (snapshot / script).exists():
        raise UserError(
            f"command {interpreter} {script}: the code snapshot of {spec.project!r} has no {script}"
            " (git-ignored files are not copied)"
        )


def _program(name: str, spec: Spec, snapshot: Path) -> tuple[str, str | None]:
    """Return the program as the ranks have to start it, and a note on it, if any."""
    if "{" in name or name in ("python", "python3"):
        # a placeholder for a run's value, or the interpreter of the submission
        return name, None
    path, problem = _look_for(name, spec, snapshot)
    if problem is None:
        return path, None if path == name else f"{name} is not in the snapshot: it runs as {path}"
    if not _may_come_from_setup(spec):
        raise UserError(f"command {shlex.quote(name)} {problem}")
    return name, f"{shlex.quote(name)} {problem}, unless the job's setup or container provides it"


def _look_for(name: str, spec: Spec, snapshot: Path) -> tuple[str, str | None]:
    """Return the program's path, and what is wrong with it."""
    if "/" not in name:
        places = (spec.environment.get("PATH", os.environ.get("PATH")), str(Path(spec.python).parent))
        if any(shutil.which(name, path=place) for place in places):
            return name, None
        hint = (
            f": write ./{name} for the file here" if (snapshot / name).is_file() else ": install it, or give its path"
        )
        return name, f"is not on PATH{hint}"
    if not os.path.exists(snapshot / name) and os.path.exists(spec.original / name):
        name = os.path.normpath(spec.original / name)
    if not os.path.exists(snapshot / name):
        return name, "does not exist: check the path"
    if os.path.isdir(snapshot / name):
        return name, "is a folder: name the program in it"
    if not os.access(snapshot / name, os.X_OK):
        return name, "is not executable: chmod +x, or name its interpreter"
    return name, None


def _may_come_from_setup(spec: Spec) -> bool:
    """Return whether the job may see other programs than the submitting machine."""
    if spec.container is not None:
        return True
    return not spec.nodes_are_simulated and (
        bool(spec.setup) or any("container" in option for option in spec.resources.sbatch)
    )
