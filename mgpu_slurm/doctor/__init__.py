"""`doctor`: checks what this machine and its cluster offer to runs, and what prevents them, before any submission."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mgpu_slurm.core.retry import Note
from mgpu_slurm.doctor import check_results, machine_checks, slurm_checks
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.run_folder import layout


def look_here(cwd: Path, note: Note, will_be_proven: bool = False) -> Iterator[Finding]:
    """Yield the findings on this machine, as they are found; starts no job.

    Args:
        note: Called while waiting for SLURM.
        will_be_proven: Whether a job will be submitted afterwards.
    """
    torch = machine_checks.TorchQuestion()
    has_slurm = machine_checks.has_slurm()
    site = slurm_checks.Site()
    answers = has_slurm
    yield from _guarded("python", machine_checks.python_findings)
    yield from _guarded(
        "folders", lambda: machine_checks.folder_findings(cwd, layout.runs_root(), has_slurm, will_be_proven)
    )
    for finding in _guarded(
        "slurm", lambda: slurm_checks.findings_of_slurm(site) if has_slurm else machine_checks.local_findings()
    ):
        answers &= not is_silence(finding)
        yield finding
    yield from _guarded("cluster file", lambda: slurm_checks.findings_of_file(cwd, note, answers))
    yield from _guarded("torch", lambda: machine_checks.torch_findings(*torch.answer(), site.partitions_with_gpus))


def _guarded(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of one check; if the check itself fails, as on an unforeseen site, that is a finding too."""
    try:
        yield from look()
    except Exception as error:
        text = f"{check}: the check itself failed: {type(error).__name__}: {error}"
        yield check_results.failed(check, text, "this is a bug in mgpu_slurm: report it with this line")


def is_silence(finding: Finding) -> bool:
    """Return whether the finding is that SLURM is installed but does not answer: a job would only wait for it."""
    return finding.check == slurm_checks.CONTROLLER and finding.level == "failed"
