"""Checks the cluster file, mgpu.yaml: whether it is valid, and whether this SLURM accepts its clusters' flags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mgpu_slurm.core import layout
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.retry import Note
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.executors import slurm_queue
from mgpu_slurm.submission import cluster_file as clusters
from mgpu_slurm.submission import plan
from mgpu_slurm.submission.cluster_file import ClusterFile
from mgpu_slurm.submission.plan import Request


def findings_of_file(cwd: Path, note: Note, slurm_answers: bool) -> Iterator[Finding]:
    """Check the cluster file, and with SLURM the flags of its clusters.

    Args:
        note: Called while waiting for SLURM.
        slurm_answers: Whether SLURM can be queried.
    """
    files = [str(path) for path in (clusters.user_file(), cwd / clusters.FILE_NAME) if path.exists()]
    if not files:
        text = f"no {clusters.FILE_NAME} (here or {clusters.user_file()}): only command-line options are used"
        yield check_results.ok("cluster file", text)
        if slurm_answers:
            yield _taken(None, cwd, note, is_meant=True)
    else:
        try:
            file = clusters.load(cwd)
        except UserError as error:
            yield check_results.failed("cluster file", str(error), "fix the file")
            return
        yield check_results.ok("cluster file", f"{' and '.join(files)}: clusters {', '.join(file.clusters) or 'none'}")
        if slurm_answers:
            yield from _cluster_findings(file, cwd, note)


def _cluster_findings(file: ClusterFile, cwd: Path, note: Note) -> Iterator[Finding]:
    for name in file.clusters:
        if name != "local":
            yield _taken(name, cwd, note, is_meant=name == file.cluster or len(file.clusters) == 1)


def _taken(name: str | None, cwd: Path, note: Note, is_meant: bool) -> Finding:
    """Check whether sbatch would accept a job of one node with a cluster's flags; nothing is queued.

    Args:
        name: Name of the cluster; None for a job without one.
        is_meant: Whether it is the default cluster; others may belong to another site.
    """
    what = f"cluster {name!r}" if name else "a job without a cluster file"
    request = Request(command=("true",), executor="slurm", cluster=name, project=cwd, name="doctor")
    try:
        made = plan.make(request, cwd, layout.runs_root(), note)
        start = slurm_queue.check(made.spec, made.folder)
    except (UserError, ClusterError) as error:
        if is_meant:
            fix = "fix its flags in mgpu.yaml" if name else "add the missing options under flags: in mgpu.yaml"
            return check_results.failed("flags", f"{what}: {error}", fix)
        fix = "ignore this if that cluster is at another site"
        return check_results.warning("flags", f"{what} does not fit this SLURM: {error}", fix)
    assert start is not None
    return check_results.ok("flags", f"{what}, on one node: {start.sentence}")
