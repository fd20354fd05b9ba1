"""Decide on the container of a run, and check that it has what ranks need before anything is queued."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.torch_versions import OLDEST_TORCH
from mgpu_slurm.request.container import NONE, PROGRAMS, Container, Mount, inside
from mgpu_slurm.request.rank_command import mounts_without_package
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder

PROBE_SECONDS = 120.0
"""The first start from a shared disk may take a minute."""

SRUN_SECONDS = 60.0

NO_PROGRAM = 127
"""Exit code of env(1) if it does not find the program."""

OLDEST_PYTHON = (3, 10)

_NO_PLACE = ("can't mkdir", "destination not found")
"""What ch-run says of a folder that an image lacks."""

_PROBE = """
import importlib.metadata as m, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({"python": sys.version_info[:3], "packages": {n: version(n) for n in sys.argv[1:]}}))
"""


@dataclass(frozen=True)
class Checked:
    """What is known of a run's container before it starts."""

    words: str
    is_complete: bool = True
    """Whether it was started on this machine."""


def decide(
    image: str | None, mounts: Sequence[str], default: Container | None, cwd: Path, is_here: bool = True
) -> Container | None:
    """Return the container of a request; None for none.

    Args:
        image: of the call; None for that of the cluster file.
        mounts: of the call, besides those of the cluster file.
        default: `container:` of the cluster file.
        is_here: whether this machine sees the files of the cluster.

    Raises:
        UserError: the image does not exist, or its runtime is not known.
    """
    base = default or Container()
    chosen = base.image if image is None else image
    if chosen in ("", NONE):
        if mounts:
            raise UserError(f"--mount {mounts[0]}: the run has no container: add --container IMAGE, or leave it out")
        return None
    found = replace(base, image=_absolute(chosen, cwd), mounts=(*base.mounts, *(_whole(each, cwd) for each in mounts)))
    if is_here and found.is_file and not os.path.exists(found.image):
        raise UserError(f"container {chosen!r}: there is no such file or folder: check the path")
    return replace(found, runtime=found.starter)


def _absolute(image: str, cwd: Path) -> str:
    """Return the absolute path of an image that is a file or folder, or else its name."""
    path = Path(os.path.normpath(cwd / Path(image).expanduser()))
    is_path = image.startswith(("/", ".", "~")) or path.suffix in (".sif", ".sqsh", ".sqfs") or path.exists()
    return str(path) if is_path and "://" not in image else image


def _whole(mount: str, cwd: Path) -> str:
    """Return the mount of a call with an absolute source."""
    source, colon, rest = mount.partition(":")
    return f"{os.path.normpath(cwd / Path(source).expanduser())}{colon}{rest}"


def check(spec: Spec, folder: RunFolder) -> Checked | None:
    """Check the container of a run; return what was found, None without a container.

    Args:
        folder: the future folder of the run.

    Raises:
        UserError: it lacks something that ranks need.
    """
    container = spec.container
    if container is None:
        return None
    named = f"{container.image} ({container.starter})"
    if not spec.nodes_are_simulated and not is_on_cluster():
        return Checked(f"{named}: not checked, as this is no machine of a cluster", is_complete=False)
    for mount in map(Mount.parse, container.mounts):
        if not os.path.exists(mount.source):
            raise UserError(f"mount {mount}: there is no {mount.source} here: check --mount, or `mounts:` in mgpu.yaml")
    if container.starter == "pyxis":
        _check_pyxis(spec, container)
        return Checked(f"{named}: it starts with the job, and was not checked", is_complete=False)
    if (program := _missing_program(spec, container)) is not None:
        if spec.setup:
            why = f"{program} is not on PATH before the cluster's setup"
            return Checked(f"{named}: not checked, as {why}", is_complete=False)
        raise UserError(
            f"container {container.image}: {program} is not on PATH: load its module here, or in `setup:` of mgpu.yaml"
        )
    try:
        facts = probe(container, mounts_without_package(spec, folder), list(_needed(spec)))
    except ContainerProblem as error:
        if spec.nodes_are_simulated or error.is_known:
            raise
        return Checked(f"{named}: not checked: {error}", is_complete=False)
    if (problem := facts.problem) is not None:
        raise UserError(f"container {container.image}: {problem}")
    return Checked(f"{named}: {facts.words}")


def is_on_cluster() -> bool:
    """Return whether this machine can submit to SLURM; a rehearsal needs no SLURM."""
    return shutil.which("sbatch") is not None


def _missing_program(spec: Spec, container: Container) -> str | None:
    """Return the program of the runtime if it is not on this machine."""
    program = PROGRAMS.get(container.starter, container.command[0] if container.command else "")
    path = spec.environment.get("PATH", os.environ.get("PATH"))
    return None if shutil.which(program, path=path) else program


def _check_pyxis(spec: Spec, container: Container) -> None:
    """Raise UserError if srun cannot start the container."""
    if spec.nodes_are_simulated:
        raise UserError(f"container {container.image}: Pyxis is a plugin of srun: use another runtime on this machine")
    shown = subprocess.run(["srun", "--help"], capture_output=True, text=True, check=False, timeout=SRUN_SECONDS)
    if "--container-image" not in shown.stdout:
        raise UserError(
            f"container {container.image}: this site's srun has no --container-image (Pyxis): use another runtime, as"
            " `runtime:` of `container:` in mgpu.yaml"
        )


def _needed(spec: Spec) -> Iterator[str]:
    """Yield the distributions that ranks import, besides this package."""
    yield "PyYAML"
    if not spec.target.is_command:
        yield "torch"
    if spec.kind == "sweep":
        yield "optuna"


class ContainerProblem(UserError):
    """A container does not start here, or has no Python."""

    def __init__(self, text: str, is_known: bool) -> None:
        """
        Args:
            is_known: whether it is the image's fault, and therefore the same on all nodes.
        """
        super().__init__(text)
        self.is_known = is_known


@dataclass(frozen=True)
class ImageFacts:
    """The Python of an image, and the versions of distributions; None for those that it lacks."""

    python: tuple[int, ...]
    packages: dict[str, str | None]
    """Of those that ranks import."""

    @property
    def words(self) -> str:
        found = {"Python": ".".join(map(str, self.python))} | self.packages
        return ", ".join(f"{name} {version}" for name, version in found.items() if version)

    @property
    def problem(self) -> str | None:
        """Return the first thing that is wrong, with its fix; None if ranks can run."""
        if self.python < OLDEST_PYTHON:
            return f"it has Python {'.'.join(map(str, self.python))}: use an image with 3.10 or newer"
        if missing := [name for name, version in self.packages.items() if version is None]:
            return f"its Python has no {missing[0]}: install it in the image"
        torch = self.packages.get("torch")
        if torch is not None and interpreter.numbers(torch) < OLDEST_TORCH:
            return f"it has torch {torch}: use an image with 2.6 or newer"
        return None


def probe(container: Container, mounts: Sequence[Mount], names: Sequence[str]) -> ImageFacts:
    """Start the container here, with all mounts, and ask its Python for versions.

    Raises:
        ContainerProblem: it does not start, or has no Python.
    """
    if container.starter == "charliecloud" and os.access(container.image, os.W_OK):
        # this makes the places for the mounts, which ranks, who do not change the image, could not
        container = replace(container, options=(*container.options, "--write"))
    command = inside([container.python, "-B", "-c", _PROBE, *names], packages="")
    words = container.wrapped(command, mounts, "/", has_gpus=False)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ContainerProblem(f"container {container.image} does not start here: {error}", is_known=False) from None
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = said[-1] if said else f"exit code {done.returncode}"
    if done.returncode == NO_PROGRAM and last.startswith("env:"):
        raise ContainerProblem(
            f"container {container.image}: it has no {container.python}: name its Python as `python:` of `container:`"
            " in mgpu.yaml",
            is_known=True,
        )
    if last.startswith("ch-run") and any(words in last for words in _NO_PLACE):
        places = " ".join(mount.target for mount in mounts if not Path(container.image + mount.target).exists())
        raise ContainerProblem(
            f"container {container.image}: it has no folders to mount on: make {places} in the image", is_known=True
        )
    try:
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise ContainerProblem(f"container {container.image} does not start here: {last}", is_known=False) from None
    return ImageFacts(tuple(facts["python"]), facts["packages"])
