"""`doctor`: what this machine and its cluster can do for runs, and what is in the way, before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mgpu_slurm import findings, paths
from mgpu_slurm.findings import Finding
from mgpu_slurm.observe.doctor import cluster, clusterfile, machine
from mgpu_slurm.patience import Note


def look_here(cwd: Path, note: Note, will_be_proven: bool = False) -> Iterator[Finding]:
    """What can be seen from here, as it is found; starts no job.

    Args:
        note: hears that SLURM is waited for.
        will_be_proven: a job will be submitted after it.
    """
    torch = machine.TorchQuestion()
    has_slurm = machine.has_slurm()
    site = cluster.Site()
    failed = False
    yield from machine.python_findings()
    yield from machine.folder_findings(cwd, paths.runs_root(), has_slurm, will_be_proven)
    if has_slurm:
        for finding in cluster.findings_of_slurm(site):
            failed |= finding.check == cluster.CONTROLLER and finding.level == "failed"
            yield finding
    else:
        yield from machine.local_findings()
    yield from clusterfile.findings_of_file(cwd, note, slurm_answers=has_slurm and not failed)
    yield from machine.torch_findings(*torch.answer(), site.partitions_with_gpus)


def slurm_is_silent(found: list[Finding]) -> bool:
    """Whether SLURM is here and gave no answer: a job would only wait for it."""
    return findings.has_failed(finding for finding in found if finding.check == cluster.CONTROLLER)
