"""`doctor`: what this machine and its cluster can do for runs, and what is in the way, before anything is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    answers = has_slurm
    yield from _guarded("python", machine.python_findings)
    yield from _guarded("folders", lambda: machine.folder_findings(cwd, paths.runs_root(), has_slurm, will_be_proven))
    for finding in _guarded(
        "slurm", lambda: cluster.findings_of_slurm(site) if has_slurm else machine.local_findings()
    ):
        answers &= not is_silence(finding)
        yield finding
    yield from _guarded("cluster file", lambda: clusterfile.findings_of_file(cwd, note, answers))
    yield from _guarded("torch", lambda: machine.torch_findings(*torch.answer(), site.partitions_with_gpus))


def _guarded(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What one look finds; where it fails itself, for a site unlike any that was thought of, that is a finding too."""
    try:
        yield from look()
    except Exception as error:
        text = f"{check}: the check itself failed: {type(error).__name__}: {error}"
        yield findings.failed(check, text, "this is a fault of the program: report it with this line")


def is_silence(finding: Finding) -> bool:
    """Whether it says that SLURM is here and gives no answer: a job would only wait for it."""
    return finding.check == cluster.CONTROLLER and finding.level == "failed"
