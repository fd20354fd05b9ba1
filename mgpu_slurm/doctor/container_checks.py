"""Check the container of the cluster file, or of the call: Python, torch and mounts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.retry import Note
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.doctor.job_checks import TARGET
from mgpu_slurm.run_folder import layout
from mgpu_slurm.submission import cluster_file, containers, plan
from mgpu_slurm.submission.plan import Request

CHECK = "container"


def container_findings(request: Request, cwd: Path, note: Note) -> Iterator[Finding]:
    """Start the container on this machine and yield what it has.

    Yield nothing if there is none, nor if the cluster file is wrong, which is a finding of its own, or has several
    clusters of which none was chosen.
    """
    try:
        default = cluster_file.load(cwd).named(request.cluster).container
    except MgpuError:
        default = None
    if request.container is None and default is None:
        # without asking SLURM for a plan
        return
    try:
        made = plan.make(replace(request, target=TARGET, name="doctor", project=cwd), cwd, layout.runs_root(), note)
        found = containers.check(made.spec, made.folder)
    except MgpuError as problem:
        yield check_results.failed(CHECK, str(problem), "fix that and try again")
        return
    if found is None:
        return
    if found.is_complete:
        yield check_results.ok(CHECK, f"container {found.words}")
    else:
        fix = "`doctor --submit` checks it on the nodes"
        yield check_results.warning(CHECK, f"container {found.words}", fix)
