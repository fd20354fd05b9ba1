"""The cluster file, mgpu.yaml: whether it can be read, and whether this SLURM takes what its clusters ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mgpu_slurm import findings, paths
from mgpu_slurm.errors import ClusterError, UserError
from mgpu_slurm.findings import Finding
from mgpu_slurm.launch import cluster as clusters
from mgpu_slurm.launch import plan, queueing
from mgpu_slurm.launch.cluster import ClusterFile
from mgpu_slurm.launch.plan import Request
from mgpu_slurm.patience import Note


def findings_of_file(cwd: Path, note: Note, slurm_answers: bool) -> Iterator[Finding]:
    """
    Args:
        note: hears that SLURM is waited for.
        slurm_answers: whether there is a SLURM to ask.
    """
    files = [str(path) for path in (clusters.user_file(), cwd / clusters.FILE_NAME) if path.exists()]
    if not files:
        text = f"no {clusters.FILE_NAME} here, nor {clusters.user_file()}: all comes from the command line"
        yield findings.ok("cluster file", text)
        if slurm_answers:
            yield _taken(None, cwd, note, is_meant=True)
    else:
        try:
            file = clusters.load(cwd)
        except UserError as error:
            yield findings.failed("cluster file", str(error), "mend the file there")
            return
        yield findings.ok("cluster file", f"{' and '.join(files)}: clusters {', '.join(file.clusters) or 'none'}")
        if slurm_answers:
            yield from _cluster_findings(file, cwd, note)


def _cluster_findings(file: ClusterFile, cwd: Path, note: Note) -> Iterator[Finding]:
    for name in file.clusters:
        if name != "local":
            yield _taken(name, cwd, note, is_meant=name == file.cluster or len(file.clusters) == 1)


def _taken(name: str | None, cwd: Path, note: Note, is_meant: bool) -> Finding:
    """Whether sbatch would take a job of one node with the flags of a cluster; nothing is queued.

    Args:
        name: of the cluster; None for a job without any.
        is_meant: whether it is the one for runs that name none; others may be of another site.
    """
    what = f"cluster {name!r}" if name else "a job without a cluster file"
    request = Request(command=("true",), executor="slurm", cluster=name, project=cwd, name="doctor")
    try:
        made = plan.make(request, cwd, paths.runs_root(), note)
        start = queueing.check(made.spec, made.folder)
    except (UserError, ClusterError) as error:
        if is_meant:
            mend = "mend its flags: in mgpu.yaml" if name else "give what it lacks by flags: in mgpu.yaml"
            return findings.failed("flags", f"{what}: {error}", mend)
        mend = "nothing to mend where that cluster is another site's"
        return findings.warning("flags", f"{what} does not fit this SLURM: {error}", mend)
    assert start is not None
    return findings.ok("flags", f"{what}, on one node: {start.sentence}")
