"""Compare a rank's environment with the run's request: different versions, too few cores, a shared GPU.

Each check is a pure function that returns a warning, or None. The checks are cheap enough for the start of every run,
and `doctor --submit` uses them too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core import interpreter, log_lines, node_gpus
from mgpu_slurm.core.files import append_jsonl, read_json
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.hostlist import ranges
from mgpu_slurm.core.processes import cores, cores_of_machine
from mgpu_slurm.request.spec import SETUP_FAILED_VARIABLE
from mgpu_slurm.run_folder.layout import RunFolder

if TYPE_CHECKING:
    from mgpu_slurm.rank.rank_info import RankInfo
    from mgpu_slurm.request.spec import Spec

SHOWN_DIFFERENCES = 5

RankGpu = tuple[str, str | None]
"""The name of a rank's node, and the identity of its GPU."""


@dataclass(frozen=True)
class Versions:
    """The versions of Python and of the installed packages, by name."""

    python: str
    packages: Mapping[str, str]

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Versions:
        """Return those in `environment.json`, or in `interpreter.facts()` of this process."""
        return Versions(facts["python"]["version"], facts["packages"])


def warnings_at_start(spec: Spec, folder: RunFolder, facts: RankInfo) -> list[str]:
    """Return the warnings that do not need torch; one rank per node checks versions."""
    found = []
    if facts.rank == 0:
        found.append(setup_warning(os.environ.get(SETUP_FAILED_VARIABLE)))
    # a container has packages of its own
    if not spec.nodes_are_simulated and facts.local_rank == 0 and spec.container is None:
        # with simulated nodes, a rank is a fork of the process that the submission started
        found.append(version_warning(*versions(folder)))
    asked = spec.resources.cpus_per_task
    if asked is not None:
        ranks = facts.world_size if spec.nodes_are_simulated else facts.local_world_size
        found.append(cores_warning(asked, ranks, cores(), cores_of_machine()))
    found.append(instances_warning(spec.resources.gpus_per_node, spec.resources.ranks_per_node, os.environ))
    return [warning for warning in found if warning is not None]


def instances_warning(asked: int | None, ranks_on_node: int, environ: Mapping[str, str]) -> str | None:
    """Warn of MIG instances that no rank can use.

    Args:
        asked: GPUs per node.
    """
    found = node_gpus.visible(environ)
    if found is None or not found.are_instances or (asked or 0) <= ranks_on_node:
        return None
    return (
        f"requested {counted(asked or 0, 'MIG instance')} for {counted(ranks_on_node, 'rank')} of a node, but CUDA uses"
        " one for each process: request as many ranks (--ntasks-per-node), or a larger instance"
    )


def setup_warning(failed: str | None) -> str | None:
    """Warn if a line of the cluster's `setup` failed, because ranks may then run in a different environment."""
    return f"this line of the cluster's setup failed: {failed}" if failed else None


def versions(folder: RunFolder) -> tuple[Versions | None, Versions]:
    """Return the versions at the submission, or None if they were not recorded, and those of this node."""
    submitted = read_json(folder.environment)
    return submitted and Versions.from_json(submitted), Versions.from_json(interpreter.facts())


def version_warning(submitted: Versions | None, here: Versions) -> str | None:
    """Warn of packages that a node lacks, or has in a different version than the submission."""
    found = differences(submitted, here) if submitted is not None else []
    if not found:
        return None
    more = f" and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
    return f"this node has {', '.join(found[:SHOWN_DIFFERENCES])}{more}"


def differences(submitted: Versions, here: Versions) -> list[str]:
    """Describe the differences: Python, then torch, then the rest by name; additional packages do not count."""
    found = []
    if submitted.python != here.python:
        found.append(f"Python {here.python} instead of {submitted.python}")
    packages = submitted.packages
    for name in sorted(packages, key=lambda name: (name != "torch", name)):
        version = here.packages.get(name)
        if version is None:
            found.append(f"no {name} ({packages[name]} at the submission)")
        elif version != packages[name]:
            found.append(f"{name} {version} instead of {packages[name]}")
    return found


def cores_warning(asked: int, ranks_on_node: int, usable: int, on_machine: int) -> str | None:
    """Warn if a rank has fewer cores than `--cpus-per-task` requests.

    Args:
        ranks_on_node: number of ranks that share the cores, unless each rank is bound to separate ones.
        usable: number of cores that this process may run on.
        on_machine: number of cores of the node; a process that may run on all of them is not bound to any.
    """
    if usable < asked:
        return f"requested {asked} cores per rank, but this rank may use {usable}"
    if usable == on_machine and usable < asked * ranks_on_node:
        return f"requested {asked} cores per rank, but {ranks_on_node} ranks share the {usable} of this node"
    return None


def missing_gpus_warning(asked: int | None, visible: int) -> str | None:
    """Warn if a rank sees none of the requested GPUs, because it would silently train on the CPU.

    Fewer GPUs than requested are not an error, because some sites bind one GPU to each rank.
    """
    if not asked or visible:
        return None
    return f"requested {counted(asked, 'GPU')} per node, but torch sees none: running on the CPU"


def shared_gpu_warnings(gpus: Sequence[RankGpu]) -> dict[int, str]:
    """Return warnings by rank for the ranks that share a GPU.

    Args:
        gpus: nodes and GPUs of all ranks, in the order of the ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (_, gpu) in enumerate(gpus):
        if gpu is not None:
            ranks.setdefault(gpu, []).append(rank)
    return {
        rank: f"ranks {ranges(sharing)} compute on the same GPU, {gpu} of {gpus[rank][0]}, and communicate without NCCL"
        for gpu, sharing in ranks.items()
        if len(sharing) > 1
        for rank in sharing
    }


def warn(warnings: Sequence[str], folder: RunFolder, attempt: int, facts: RankInfo) -> None:
    """Print warnings to the rank's log, and record them so that followers of another rank's log see them."""
    for text in warnings:
        log_lines.say(f"warning: {text}")
        # a warning must not make the run fail, and a script that was not submitted has no logs
        with contextlib.suppress(OSError):
            record = {"rank": facts.rank, "node": facts.node_name, "text": text}
            append_jsonl(folder.rank_warnings(attempt, facts.rank), record)
