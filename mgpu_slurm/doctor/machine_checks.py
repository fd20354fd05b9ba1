"""Checks this machine: its Python and packages, its torch, and the folders that runs need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mgpu_slurm.core import interpreter, node_gpus
from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.core.processes import cores
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding, span
from mgpu_slurm.registry import index

OLDEST_PYTHON = (3, 10)
DISTRIBUTION = "mgpu-slurm"
TORCH_WITHIN = 180.0
"""Seconds; a first import from a network file system may take more than a minute."""

LITTLE_SPACE = 5_000_000_000
FEW_INODES = 10_000

LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "squashfs", "tmpfs", "xfs", "zfs"}

_BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*>=\s*(?P<version>[0-9.]+)")


# -- Python and packages


def python_findings() -> Iterator[Finding]:
    version = interpreter.python()["version"]
    text = f"Python {version} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield check_results.failed("python", f"{text} is too old", f"use Python {oldest} or newer")
    else:
        yield check_results.ok("python", text)
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        text = f"{DISTRIBUTION} is not installed for this Python; it runs from a folder"
        yield check_results.warning(
            "packages", text, f"install it where nodes see it: {sys.executable} -m pip install ."
        )
        return
    yield from package_findings(requirements, interpreter.facts()["packages"])


def package_findings(requirements: list[str], packages: dict[str, str]) -> Iterator[Finding]:
    """Check whether all required packages are installed and new enough.

    Args:
        requirements: Requirements as in package metadata, such as `torch>=2.13`; those of extras are ignored.
        packages: Versions by normalized name.
    """
    bounds = [match for text in requirements if "extra ==" not in text and (match := _BOUND.match(text))]
    wrong = []
    for bound in bounds:
        version = packages.get(interpreter.normalized(bound["name"]))
        if version is None:
            wrong.append(f"no {bound['name']} (needs {bound['version']} or newer)")
        elif interpreter.numbers(version) < interpreter.numbers(bound["version"]):
            wrong.append(f"{bound['name']} {version} (needs {bound['version']} or newer)")
    if wrong:
        fix = f"{sys.executable} -m pip install --upgrade {DISTRIBUTION}"
        yield check_results.failed("packages", f"packages: {', '.join(wrong)}", fix)
    else:
        yield check_results.ok("packages", f"packages: all {len(bounds)} required ones present")


# -- torch


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch and torchvision, as `torch_probe` prints them."""

    version: str
    cuda: str | None
    """The CUDA or ROCm version that torch was built for; None for the CPU only."""
    gpus: list[str]
    gloo: bool
    nccl: bool
    seconds: float
    """Time that the import of torch took."""
    torchvision: str | None
    """Version; None if it is not installed, as it is an extra, or fails on import."""
    torchvision_problem: str = ""
    declared: bool = False
    """Whether torchvision's operators do not load with this torch, and were only declared."""


class TorchQuestion:
    """Imports torch in a separate process to get its facts. This takes seconds, so it is started early."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            interpreter.command(sys.executable, "mgpu_slurm.doctor.torch_probe"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )

    def answer(self) -> tuple[TorchFacts | None, str]:
        """Return the facts and an empty string; or None and the reason."""
        try:
            out, err = self._process.communicate(timeout=TORCH_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return None, f"did not import within {TORCH_WITHIN:g} s"
        if self._process.returncode != 0:
            last = (err.strip().splitlines() or [f"ended with exit code {self._process.returncode}"])[-1]
            return None, f"fails on import: {last}"
        return TorchFacts(**json.loads(out.splitlines()[-1])), ""


def torch_findings(facts: TorchFacts | None, problem: str, partitions_with_gpus: list[str]) -> Iterator[Finding]:
    """Judge the facts of `torch_probe`.

    Args:
        problem: The reason why there are no facts.
        partitions_with_gpus: Partitions with GPUs on this cluster.
    """
    if facts is None:
        yield check_results.failed("torch", f"torch {problem}", f"{sys.executable} -m pip install --upgrade torch")
        return
    built = f"for CUDA {facts.cuda}" if facts.cuda and facts.cuda[0].isdigit() else facts.cuda or "CPU only"
    seen = ", ".join(dict.fromkeys(facts.gpus)) or "none"
    text = f"torch {facts.version} ({built}; GPUs here: {seen}), imported in {span(facts.seconds)}"
    fix = "install a torch build for the nodes' GPUs (see pytorch.org), and submit from that environment"
    if not facts.gloo:
        yield check_results.failed("torch", f"{text}: built without gloo, which runs need", fix)
    elif facts.cuda is None and partitions_with_gpus:
        text += f": runs on the GPUs of {', '.join(partitions_with_gpus)} would compute on the CPU"
        yield check_results.warning("torch", text, fix)
    elif facts.cuda is None and Path("/proc/driver/nvidia/version").exists():
        yield check_results.warning(
            "torch", f"{text}: this machine has a GPU driver, but this torch does not use it", fix
        )
    else:
        yield check_results.ok("torch", text)
    if facts.torchvision is None and facts.torchvision_problem:
        fix = f"{sys.executable} -m pip install the torchvision for torch {facts.version}"
        text = f"torchvision fails on import: {facts.torchvision_problem}"
        yield check_results.warning("torchvision", text, fix)
    elif facts.torchvision is not None:
        without = " (its box operators do not load with this torch; everything else works)" if facts.declared else ""
        yield check_results.ok("torchvision", f"torchvision {facts.torchvision}{without}")


# -- folders


@dataclass(frozen=True)
class Mount:
    """The mount point and type of a file system."""

    place: str
    type: str


def parse_mounts(text: str) -> list[Mount]:
    """Parse proc(5)'s mountinfo."""
    found = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        if separator:
            place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
            found.append(Mount(place, after.split()[0]))
    return found


def file_system(path: Path, mounts: list[Mount]) -> str:
    """Return the type of the file system that contains an absolute path; empty if no mount does."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.place)]
    # of several mounts on one place, the last hides the others
    return max(enumerate(holding), key=lambda pair: (len(pair[1].place), pair[0]))[1].type if holding else ""


def folder_findings(cwd: Path, runs: Path, has_slurm: bool, will_be_proven: bool) -> Iterator[Finding]:
    """Check whether nodes can see the folders that a run needs, and whether these are writable.

    Args:
        will_be_proven: Whether a job is about to show what nodes see.
    """
    if has_slurm:
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
        environment, base = Path(sys.prefix).resolve(), Path(os.path.realpath(sys.executable))
        places = {"the environment": environment, "its Python": base, "this folder": cwd, "the runs folder": runs}
        yield from shared_findings({name: _existing(path) for name, path in places.items()}, mounts, will_be_proven)
    yield from writable_findings("runs folder", runs, "set MGPU_RUNS to a folder of your own, on a large file system")
    fix = "set XDG_STATE_HOME to a folder of your own; until then runs are found from their own folder only"
    yield from writable_findings("index of runs", index.state_home(), fix, small=True)


def shared_findings(places: dict[str, Path], mounts: list[Mount], will_be_proven: bool) -> Iterator[Finding]:
    types = {name: file_system(path.resolve(), mounts) for name, path in places.items()}
    for type_, names in _by_type(types).items():
        listed = ", ".join(f"{name} ({places[name]})" for name in names)
        text = f"{listed}: on {type_ or 'an unknown file system'}"
        if type_ not in LOCAL_FILE_SYSTEMS:
            yield check_results.ok("shared", text)
        elif will_be_proven:
            yield check_results.ok("shared", f"{text}; the job below checks that nodes see it")
        else:
            fix = "`doctor --submit` checks that; usually it is on a network file system"
            yield check_results.warning("shared", f"{text} of this machine, which nodes may not see", fix)


def _by_type(types: dict[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, type_ in types.items():
        grouped.setdefault(type_, []).append(name)
    return grouped


def _existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent, in which the missing part would be created."""
    return next(place for place in [path, *path.parents] if place.exists())


def writable_findings(name: str, folder: Path, fix: str, small: bool = False) -> Iterator[Finding]:
    """Check whether a folder is writable or can be created, and how much space is free."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        level = check_results.warning if small else check_results.failed
        yield level("folders", f"{name} {folder}: not writable ({error.strerror})", fix)
        return
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    text = f"{name} {folder}: writable, {human_size(free)} free"
    # file systems that create inodes on demand report 0
    if not small and (free < LITTLE_SPACE or 0 < room.f_favail < FEW_INODES):
        files = f" and room for {room.f_favail} files" if 0 < room.f_favail < FEW_INODES else ""
        yield check_results.warning("folders", f"{text}{files}, which checkpoints fill soon", fix)
    else:
        yield check_results.ok("folders", text)


# -- without SLURM


def local_findings() -> Iterator[Finding]:
    """Report the resources of the local executor."""
    gpus = len(node_gpus.of_this_machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{cores()} cores, {human_size(memory)} of memory, {gpus or 'no'} GPU{'s' if gpus != 1 else ''}"
    yield check_results.ok("slurm", f"no sbatch on PATH: runs use the local executor, with {text}")


def has_slurm() -> bool:
    return shutil.which("sbatch") is not None
