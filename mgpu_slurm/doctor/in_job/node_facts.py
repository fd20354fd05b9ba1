"""Checks each node's versions, cores and limits."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from mgpu_slurm.core.processes import cores
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


def measure_versions(team: Team, place: Place) -> Any:
    if not team.me.is_leader:
        return None
    submitted, here = preflight.versions(place.folder)
    assert submitted is not None
    return {
        "differences": preflight.differences(submitted, here),
        "python": here.python,
        "packages": len(here.packages),
    }


def judge_versions(answers: list[Answer]) -> list[Finding]:
    found = []
    for value, group in alike(answers):
        nodes = names([answer.member for answer in group])
        differences = value["differences"]
        if not differences:
            text = f"{nodes}: Python {value['python']} and all packages as at the submission"
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


def measure_cores(team: Team, place: Place) -> Any:
    ranks = team.size if place.is_one_machine else sum(other.node == team.me.node for other in team.members)
    asked = place.spec.resources.cpus_per_task
    return {"asked": asked, "usable": cores(), "on_machine": os.cpu_count() or 1, "ranks": ranks}


def judge_cores(answers: list[Answer]) -> list[Finding]:
    found = []
    for value, group in alike(answers):
        ranks = who([answer.member for answer in group])
        asked, usable = value["asked"], value["usable"]
        problem = None
        if asked is not None:
            problem = preflight.cores_warning(asked, value["ranks"], usable, value["on_machine"])
        if problem is not None:
            fix = "request as many cores per rank as there are, or check how the site binds tasks (TaskPlugin)"
            found.append(check_results.warning("cores", f"{ranks}: {problem}", fix))
        else:
            is_bound = usable < value["on_machine"] or value["ranks"] == 1
            share = "each" if is_bound else f"shared by {value['ranks']} ranks"
            words = "none asked for" if asked is None else f"{asked} asked for"
            found.append(check_results.ok("cores", f"{ranks}: {usable} cores {share} ({words})"))
    return found


# -- limits


def measure_limits(team: Team, place: Place) -> Any:
    if not team.me.is_leader:
        return None
    shared = os.statvfs("/dev/shm")
    return {
        "shared_memory": shared.f_bavail * shared.f_frsize,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": sorted(os.listdir(INFINIBAND)) if INFINIBAND.is_dir() else [],
    }


def judge_limits(answers: list[Answer]) -> list[Finding]:
    if not answers:
        return []
    least = min(answers, key=lambda answer: float(answer.value["shared_memory"]))
    free = least.value["shared_memory"]
    text = f"shared memory (/dev/shm): {free / GB:.1f} GB free on {least.member.node_name}"
    if free < SMALL_SHARED_MEMORY:
        fix = "loader workers pass batches through it: num_workers=0, or ask the site for a larger one"
        found = [check_results.warning("limits", f"{text}, which loader workers fill soon", fix)]
    else:
        found = [check_results.ok("limits", text)]
    fewest = min(answers, key=lambda answer: float(answer.value["files"]))
    if fewest.value["files"] < FEW_FILES:
        text = f"open files: {fewest.value['files']} for each process on {fewest.member.node_name} (ulimit -n)"
        found.append(check_results.warning("limits", text, "ask the site for a higher hard limit: large runs need it"))
    bounded = [a for a in answers if a.value["infiniband"] and a.value["locked"] != resource.RLIM_INFINITY]
    if bounded:
        limit, nodes = bounded[0].value["locked"] // 1024, names([answer.member for answer in bounded])
        text = f"locked memory: {limit} KB on {nodes} (ulimit -l), which have InfiniBand"
        found.append(
            check_results.warning("limits", text, "ask the site for memlock unlimited in jobs: NCCL needs it there")
        )
    return found
