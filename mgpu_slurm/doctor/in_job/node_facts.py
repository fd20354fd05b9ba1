"""Checks each node's versions, cores and limits."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.core.processes import cores, cores_of_machine
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.doctor.in_job.team import Answer, Place, Team, alike, names, who
from mgpu_slurm.rank import preflight

GB = 1 << 30

SMALL_SHARED_MEMORY = 1 * GB
FEW_FILES = 4096
"""A rank of a large job has a connection to every other rank, and a loader one to every worker."""

INFINIBAND = Path("/sys/class/infiniband")


# -- versions


@dataclass(frozen=True)
class NodeVersions:
    """How a node's versions differ from those at the submission."""

    differences: list[str]
    python: str
    packages: int
    """Number of installed packages."""
    in_container: bool = False
    """Whether they are those of an image, which nobody has compared."""


def measure_versions(team: Team, place: Place) -> Any:
    if not team.me.is_leader:
        return None
    submitted, here = preflight.versions(place.folder)
    assert submitted is not None
    in_container = place.spec.container is not None
    differences = [] if in_container else preflight.differences(submitted, here)
    return asdict(NodeVersions(differences, here.python, len(here.packages), in_container))


def judge_versions(answers: list[Answer]) -> list[Finding]:
    found = []
    for value, group in alike(answers):
        nodes = names([answer.member for answer in group])
        versions = NodeVersions(**value)
        differences = versions.differences
        if not differences:
            packages = (
                f"{versions.packages} packages of the image"
                if versions.in_container
                else "all packages as at submission"
            )
            text = f"{nodes}: Python {versions.python} and {packages}"
            found.append(check_results.ok("versions", text))
            continue
        level = (
            check_results.failed
            if differences[0].startswith(("Python", "torch", "no torch"))
            else check_results.warning
        )
        fix = "put the environment on a file system that all nodes share, and submit from it"
        found.append(level("versions", f"{nodes}: {', '.join(differences)}", fix))
    return found


# -- cores


@dataclass(frozen=True)
class Cores:
    """The cores of a rank."""

    asked: int | None
    usable: int
    on_machine: int
    ranks: int
    """Number of ranks on its node."""


def measure_cores(team: Team, place: Place) -> Any:
    ranks = team.size if place.is_one_machine else sum(other.node == team.me.node for other in team.members)
    asked = place.spec.resources.cpus_per_task
    return asdict(Cores(asked, usable=cores(), on_machine=cores_of_machine(), ranks=ranks))


def judge_cores(answers: list[Answer]) -> list[Finding]:
    found = []
    for value, group in alike(answers):
        ranks = who([answer.member for answer in group])
        own = Cores(**value)
        problem = None
        if own.asked is not None:
            problem = preflight.cores_warning(own.asked, own.ranks, own.usable, own.on_machine)
        if problem is not None:
            fix = "request as many cores per rank as there are, or check how the site binds tasks (TaskPlugin)"
            found.append(check_results.warning("cores", f"{ranks}: {problem}", fix))
        else:
            is_bound = own.usable < own.on_machine or own.ranks == 1
            share = "each" if is_bound else f"shared by {own.ranks} ranks"
            words = "none requested" if own.asked is None else f"{own.asked} requested"
            found.append(check_results.ok("cores", f"{ranks}: {own.usable} cores {share} ({words})"))
    return found


# -- limits


@dataclass(frozen=True)
class Limits:
    """The limits of processes on a node."""

    shared_memory: int
    """Free bytes."""
    files: int
    """Open files of a process."""
    locked: int
    """Bytes of locked memory."""
    infiniband: list[str]
    """Names of the adapters."""


def measure_limits(team: Team, place: Place) -> Any:
    if not team.me.is_leader:
        return None
    shared = os.statvfs("/dev/shm")
    limits = Limits(
        shared_memory=shared.f_bavail * shared.f_frsize,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=sorted(os.listdir(INFINIBAND)) if INFINIBAND.is_dir() else [],
    )
    return asdict(limits)


def judge_limits(answers: list[Answer]) -> list[Finding]:
    if not answers:
        return []
    limits = [(answer.member, Limits(**answer.value)) for answer in answers]
    member, least = min(limits, key=lambda pair: pair[1].shared_memory)
    text = f"shared memory (/dev/shm): {least.shared_memory / GB:.1f} GB free on {member.node_name}"
    if least.shared_memory < SMALL_SHARED_MEMORY:
        fix = "loader workers pass batches through it: use num_workers=0, or ask the site for more"
        found = [check_results.warning("limits", f"{text}, which loader workers fill soon", fix)]
    else:
        found = [check_results.ok("limits", text)]
    member, fewest = min(limits, key=lambda pair: pair[1].files)
    if fewest.files < FEW_FILES:
        text = f"open files: {fewest.files} for each process on {member.node_name} (ulimit -n)"
        found.append(check_results.warning("limits", text, "ask the site for a higher hard limit: large runs need it"))
    bounded = [pair for pair in limits if pair[1].infiniband and pair[1].locked != resource.RLIM_INFINITY]
    if bounded:
        limit, nodes = bounded[0][1].locked // 1024, names([member for member, _ in bounded])
        text = f"locked memory: {limit} KB on {nodes} (ulimit -l), which have InfiniBand"
        found.append(
            check_results.warning("limits", text, "ask the site for memlock unlimited in jobs: NCCL needs it there")
        )
    return found
