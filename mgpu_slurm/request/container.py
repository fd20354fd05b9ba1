"""The container that ranks run in: its image, its mounts, and the command of the runtime that starts a rank in it.

The forms of the command lines are those of the runtimes' manuals: apptainer-exec(1), ch-run(1) and NVIDIA's Pyxis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mgpu_slurm.core.errors import UserError

Runtime = Literal["apptainer", "singularity", "charliecloud", "pyxis", "command"]

NONE = "none"
"""In place of an image: no container, whatever the cluster file says."""

PROGRAMS = {"apptainer": "apptainer", "singularity": "singularity", "charliecloud": "ch-run"}
"""The programs that start a container; Pyxis is a plugin of srun."""

_BY_SUFFIX: dict[str, Runtime] = {".sif": "apptainer", ".sqsh": "pyxis", ".sqfs": "charliecloud"}

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_PLACES = re.compile(r"\{(image|workdir|source|target)\}")

_UNSET = ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that lead Python to packages of the host, which were built for another Python."""


@dataclass(frozen=True)
class Mount:
    """A folder or file of a node that the container sees."""

    source: str
    target: str
    read_only: bool = False

    def __post_init__(self) -> None:
        for path in (self.source, self.target):
            if not path.startswith("/") or set(path) & set(":,"):
                raise UserError(f"{path!r} cannot be mounted in a container: it needs an absolute path without : and ,")

    @staticmethod
    def parse(text: str) -> Mount:
        """Return the mount from `SOURCE[:TARGET][:ro]`.

        Raises:
            UserError: it has another form, or a path that is not absolute.
        """
        *paths, last = text.split(":")
        read_only = last == "ro"
        paths = paths if read_only else [*paths, last]
        if len(paths) not in (1, 2) or not all(path.startswith("/") for path in paths):
            raise UserError(
                f"--mount {text!r}: expected SOURCE[:TARGET][:ro] with absolute paths, such as /data or /data:/mnt:ro"
            )
        return Mount(paths[0], paths[-1], read_only)

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"

    def contains(self, other: Mount) -> bool:
        """Return whether the other one shows nothing that this one does not show in the same place."""
        is_plain = self.source == self.target and other.source == other.target
        return is_plain and self.read_only <= other.read_only and Path(other.source).is_relative_to(self.source)


@dataclass(frozen=True)
class Container:
    """An image, and how a site runs it; the keys of `container:` in the cluster file."""

    image: str = ""
    """The path of a file or folder, or a name that the runtime understands; empty in a cluster file that leaves the
    choice to `--container`."""
    runtime: Runtime | None = None
    """None for the one that the image's form shows."""
    mounts: tuple[str, ...] = ()
    """Folders and files that ranks see besides the run's own, as `SOURCE[:TARGET][:ro]`."""
    options: tuple[str, ...] = ()
    """Further options of the runtime, such as `--rocm`."""
    command: tuple[str, ...] = ()
    """For other runtimes: the words before the command of a rank, with `{image}` and `{workdir}`. A word with
    `{source}` and `{target}` is repeated for each mount."""
    python: str = "python3"
    """The Python of the image."""

    def __post_init__(self) -> None:
        for mount in self.mounts:
            Mount.parse(mount)
        if self.command and self.runtime not in (None, "command"):
            raise UserError(f"command and runtime {self.runtime} exclude each other: leave one out")
        if self.runtime == "command" and not self.command:
            raise UserError("runtime command needs `command:`, the words that start a container")
        if self.command and not any("{image}" in word for word in self.command):
            raise UserError("command: no word has {image}: put it where the image belongs")

    @property
    def is_file(self) -> bool:
        """Return whether the image is a file or folder, not a name."""
        return self.image.startswith("/")

    @property
    def starter(self) -> Runtime:
        """Return the runtime: the given one, or the one that the image's form shows.

        Raises:
            UserError: the image may be one of several runtimes.
        """
        if self.command:
            return "command"
        if self.runtime is not None:
            return self.runtime
        if self.is_file:
            found = _BY_SUFFIX.get(Path(self.image).suffix)
            if found is None and Path(self.image).is_dir():
                found = "charliecloud"
        else:
            found = "apptainer" if "://" in self.image else "pyxis" if "#" in self.image else None
        if found is None:
            raise UserError(
                f"container {self.image!r}: the name does not show its runtime: add `runtime:` (apptainer, charliecloud"
                " or pyxis) to `container:` in mgpu.yaml"
            )
        return found

    def srun_options(self, mounts: Iterable[Mount], workdir: str) -> list[str]:
        """Return the options of srun that start its tasks in the container; none for a runtime with a program."""
        if self.starter != "pyxis":
            return []
        mounted = ",".join(map(str, mounts))
        return [
            f"--container-image={self.image}",
            *([f"--container-mounts={mounted}"] if mounted else []),
            f"--container-workdir={workdir}",
            *self.options,
        ]

    def wrapped(self, words: Sequence[str], mounts: Iterable[Mount], workdir: str, has_gpus: bool) -> list[str]:
        """Return the command that runs another one in the container.

        Args:
            words: the command inside.
            workdir: its working directory.
            has_gpus: whether it needs the node's GPUs.
        """
        mounts = list(mounts)
        match self.starter:
            case "pyxis":
                return list(words)
            case "apptainer" | "singularity" as runtime:
                start = [PROGRAMS[runtime], "exec", f"--pwd={workdir}", *(["--nv"] if has_gpus else [])]
                start += [f"--bind={mount}" for mount in mounts]
                return [*start, *self.options, self.image, *words]
            case "charliecloud":
                return [*self._charliecloud(mounts, workdir), *self.options, self.image, "--", *words]
            case "command":
                return [*self._filled(mounts, workdir), *words]

    def _charliecloud(self, mounts: Iterable[Mount], workdir: str) -> list[str]:
        # it knows no read-only mounts, and keeps the host's PATH, on which there may be a Python of the host
        start = [PROGRAMS["charliecloud"], f"--cd={workdir}", f"--set-env=PATH={_SYSTEM_PATH}"]
        if not Path(self.image).is_dir() or Path(self.image, "ch/environment").exists():
            start.append("--set-env")
        return start + [f"--bind={mount.source}:{mount.target}" for mount in mounts]

    def _filled(self, mounts: Sequence[Mount], workdir: str) -> Iterable[str]:
        for word in self.command:
            is_for_mount = "{source}" in word or "{target}" in word
            for mount in mounts if is_for_mount else (None,):
                values = {"image": self.image, "workdir": workdir}
                values |= {} if mount is None else {"source": mount.source, "target": mount.target}
                yield _PLACES.sub(lambda match, values=values: values[match[1]], word)  # type: ignore[misc]


def inside(words: Sequence[str], packages: str) -> list[str]:
    """Return a command with the variables that Python needs in a container.

    Args:
        packages: the folder to import this package from.
    """
    unset = [word for name in _UNSET for word in ("-u", name)]
    # the user's own packages were installed for the host's Python
    return ["env", *unset, "PYTHONNOUSERSITE=1", f"PYTHONPATH={packages}", *words]


def without_covered(mounts: Iterable[Mount]) -> list[Mount]:
    """Return the mounts without those that another one contains, each before those inside it."""
    found: list[Mount] = []
    for mount in sorted(dict.fromkeys(mounts), key=lambda mount: len(Path(mount.target).parts)):
        if not any(other.contains(mount) for other in found):
            found.append(mount)
    return found
