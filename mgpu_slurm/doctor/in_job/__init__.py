"""The job of `doctor --submit`: every rank measures; rank 0 judges and writes the findings, line by line.

A check that fails or a rank that does not respond is a finding too, and the remaining checks still run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.doctor.in_job import gpus, network, node_facts, shared_files
from mgpu_slurm.doctor.in_job.team import Answer, Place, Team, who
from mgpu_slurm.rank.communication import rendezvous
from mgpu_slurm.rank.rank_info import from_environment
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run


@dataclass(frozen=True)
class Check:
    """One check of the job."""

    name: str
    measure: Callable[[Team, Place], Any]
    """Called on every rank; returns plain values, or None if this rank does not take part."""
    judge: Callable[[list[Answer]], list[Finding]]
    """Called on rank 0 with the ranks' measurements."""


CHECKS = (
    Check("versions", node_facts.measure_versions, node_facts.judge_versions),
    Check("cores", node_facts.measure_cores, node_facts.judge_cores),
    Check("limits", node_facts.measure_limits, node_facts.judge_limits),
    Check("gpus", gpus.measure_gpus, gpus.judge_gpus),
    Check("gpu health", gpus.measure_gpu_health, gpus.judge_gpu_health),
    Check("names", network.measure_names, network.judge_names),
    Check("ports", network.measure_ports, network.judge_ports),
    Check("rendezvous", network.measure_store, network.judge_store),
    Check("clocks", network.measure_clocks, network.judge_clocks),
    Check("shared folder", shared_files.measure_visibility, shared_files.judge_visibility),
    Check("file locks", shared_files.measure_locks, shared_files.judge_locks),
    Check("all-reduce", network.measure_gloo, network.judge_gloo),
    # last, because a time-out in NCCL ends the process
    Check("all-reduce", network.measure_nccl, network.judge_nccl),
)


def checkup(run: Run, config: dict[str, Any]) -> dict[str, float]:
    """Run all checks, as a normal job function; return the number of findings of each level."""
    folder = RunFolder(run.folder)
    facts = from_environment()
    begun = time.perf_counter()
    store = rendezvous.connect(facts, os.environ, rendezvous.ARRIVAL_TIMEOUT)
    place = Place(folder, read_spec(folder), run.device, run.attempt, time.perf_counter() - begun)
    team = Team(store, facts)
    # left by a previous attempt
    if run.is_main:
        folder.checkup.unlink(missing_ok=True)
    counts = dict.fromkeys(("ok", "warning", "failed"), 0.0)
    for number, check in enumerate(CHECKS):
        for finding in run_check(check, team, place, number):
            append_jsonl(folder.checkup, finding.plain)
            counts[finding.level] += 1
            print("\n".join(finding.lines()), flush=True)
    return counts


def run_check(check: Check, team: Team, place: Place, number: int) -> list[Finding]:
    """Measure on this rank; on rank 0, also judge the measurements of all ranks and return the findings."""
    try:
        value = {"measured": check.measure(team, place)}
    except Exception as error:
        value = {"problem": f"{type(error).__name__}: {error}"}
    told = team.gather(f"{number}", value)
    if not team.is_first:
        return []
    answers = [Answer(team.members[rank], found["measured"]) for rank, found in told.items() if "measured" in found]
    found = check.judge([answer for answer in answers if answer.value is not None])
    return found + problems(check.name, team, told)


def problems(name: str, team: Team, told: dict[int, Any]) -> list[Finding]:
    """Return a finding for each problem that kept ranks from measuring, with its ranks; silence is one too."""
    by_problem: dict[str, list[int]] = {}
    for rank, found in told.items():
        if "problem" in found:
            by_problem.setdefault(found["problem"], []).append(rank)
    for rank in range(team.size):
        if rank not in told:
            by_problem.setdefault(f"no answer within {team.patience:g} s", []).append(rank)
    fix = "look at the logs of those ranks"
    return [
        check_results.failed(name, f"{name}: {who([team.members[rank] for rank in ranks])}: {problem}", fix)
        for problem, ranks in by_problem.items()
    ]
