"""Lock a run for one job at a time, among all jobs that were ever submitted for it.

Each submission has a token, and `claims/<token>` of the run contains the id of the first job that started with it.
SLURM may have accepted a submission twice, an earlier job may start after a later one was submitted, and a job that
SLURM restarts is the same job.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mgpu_slurm.core import records
from mgpu_slurm.core.files import sync_folder
from mgpu_slurm.core.layout import RunFolder


def take(folder: RunFolder, token: str, job_id: str) -> str:
    """Claim a run for a job permanently; return the id of the job that holds it, this one or another.

    Args:
        folder: of a single run.
        token: of the job's own submission.
        job_id: as SLURM's commands know it.
    """
    for later in [token, *_tokens_after(folder, token)]:
        holder = _claim(folder.claims / later, job_id)
        if holder != job_id:
            return holder
    return job_id


def _tokens_after(folder: RunFolder, token: str) -> list[str]:
    """Return the tokens of the run's later submissions, oldest first.

    A job claims these too, so that their jobs cannot take the run if they start later. If one of them has started
    already, it keeps the run.
    """
    tokens = [submission.token for submission in records.submissions_of(folder)]
    return tokens[tokens.index(token) + 1 :] if token in tokens else []


def _claim(path: Path, job_id: str) -> str:
    """Write the claim atomically if there is none yet; return the id of the job that holds it."""
    path.parent.mkdir(exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(job_id)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o640)
        # unlike a rename it fails if the name exists, also between two machines
        os.link(temporary, path)
        sync_folder(path.parent)
    except FileExistsError:
        return path.read_text()
    finally:
        os.unlink(temporary)
    return job_id


def holder(folder: RunFolder, token: str) -> str | None:
    """Return the id of the job that started with a token, or None.

    Args:
        folder: of a run or a group; for a group the id is the array's.
    """
    own = folder.claims / token
    if own.exists():
        return own.read_text()
    of_a_task = next(folder.tasks.glob(f"*/claims/{token}"), None)
    return None if of_a_task is None else of_a_task.read_text().partition("_")[0]
