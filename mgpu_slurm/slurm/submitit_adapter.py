"""Submit jobs with submitit. The only module that imports it.

submitit passes a script to sbatch and reads the answer. The script is ours, and the file that submitit pickles next to
it is never read: the job's ranks read `spec.yaml`.

Submitit may change the private names that are overridden here in any version. This module was written for submitit
1.5.4, which is also the oldest supported version; its test checks each name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import sbatch
from mgpu_slurm.slurm.commands import SlurmUnavailable

_SUBMITIT_PATTERNS = ("%j", "%t", "%A", "%a")


class _ScriptExecutor(SlurmExecutor):
    """Submits a script that is already written."""

    def __init__(self, folder: str, script: str) -> None:
        super().__init__(folder)
        self._script = script

    @classmethod
    def affinity(cls) -> int:
        # a login node needs only sbatch, but submitit's own method requires srun
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # submitit's own has no time limit
        return sbatch.command("--parsable", str(submission_file_path))

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        # submitit's own would take the first "job 500" in a banner
        return sbatch.job_id_in(string if isinstance(string, str) else string.decode(errors="replace"))


def submit(script: str, folder: RunFolder, environ: Mapping[str, str]) -> str:
    """Submit a batch script and return the id of its job.

    Args:
        folder: submitit keeps its files in `submitit/` below it.
        environ: the environment of sbatch, and so of the job (see `commands.scrubbed_environment`). This process's own
            environment is changed to it during the call.

    Raises:
        SlurmUnavailable: a job may be queued nevertheless (see `sbatch.ExactlyOnceSubmission`).
        ClusterError: there is no sbatch, or it refused.
    """
    place = str(folder.path / "submitit")
    if any(pattern in place for pattern in _SUBMITIT_PATTERNS):
        raise UserError(
            f"runs folder {str(folder.path.parent)!r}: SLURM replaces %j, %t, %A and %a:"
            " set MGPU_RUNS to another folder"
        )
    if shutil.which("sbatch", path=environ.get("PATH", "")) is None:
        raise ClusterError("no sbatch on PATH: log in to the cluster, or run here with --executor local")
    with _process_environment(environ):
        try:
            return str(_ScriptExecutor(place, script).submit(int).job_id)
        except FailedJobError as error:
            failed = error.__cause__
            if not isinstance(failed, subprocess.CalledProcessError):
                raise SlurmUnavailable(f"waiting for sbatch failed: {failed}") from None
            raise sbatch.failure(failed.returncode, failed.output) from None


@contextlib.contextmanager
def _process_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment, changing only what differs: other threads may read it meanwhile."""
    before = dict(os.environ)
    _change_environment(wanted)
    try:
        yield
    finally:
        _change_environment(before)


def _change_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
