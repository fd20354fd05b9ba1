"""Handing the jobs of a run or group to SLURM."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from mgpu_slurm import paths, records, slurm
from mgpu_slurm.errors import ClusterError
from mgpu_slurm.hostlist import ranges
from mgpu_slurm.launch import script
from mgpu_slurm.launch.arrays import Array, split
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.spec import Spec


def submit(folder: RunFolder, spec: Spec, tasks: Sequence[int] | None = None, dependency: str = "") -> str:
    """Queues a complete run folder, or some runs of a group; the job id, those of several arrays joined by commas.

    Args:
        tasks: indices in the group; None for a run of its own.
        dependency: as sbatch says it.

    Raises:
        ClusterError: the cluster refused or did not answer; says which runs of a group it had taken.
    """
    if tasks is None:
        return _submit_one(folder, spec, None, dependency)
    job_ids: list[str] = []
    for array in split(tasks, slurm.max_array_size()):
        if spec.at_once is not None and job_ids:
            # the limit holds for each array, so they run one after the other
            dependency = f"afterany:{job_ids[-1]}"
        try:
            job_ids.append(_submit_one(folder, spec, array, dependency))
        except ClusterError as refused:
            if not job_ids:
                raise
            raise ClusterError(
                f"{refused}; the runs before {folder.run}/{array.tasks[0]} are queued as job {', '.join(job_ids)},"
                " and `resume` submits the others"
            ) from None
    return ",".join(job_ids)


def _submit_one(folder: RunFolder, spec: Spec, array: Array | None, dependency: str) -> str:
    # submitit costs a tenth of a second to import
    from mgpu_slurm.launch import submitit_executor

    token = script.new_token()
    text = script.render(spec, folder, token, array, dependency)
    paths.write_whole(folder.submission(array.first if array else 0), text)
    # whoever finds this without an answer after it can look for the job by its token
    tasks = {} if array is None else {"first": array.first, "tasks": ranges(array.tasks)}
    records.record_event(folder, "submitting", token=token, **tasks)
    try:
        job_id = submitit_executor.submit(text, folder, slurm.scrubbed_environment(os.environ))
    except ClusterError as refused:
        job_id = _found_in_queue(folder, token, refused)
    # not into the state: the job may be running by now, and the state is its own then
    records.record_event(folder, "submitted", job_id=job_id, token=token)
    return job_id


def _found_in_queue(folder: RunFolder, token: str, refused: ClusterError) -> str:
    """The job id of a submission that sbatch did not confirm: it may have queued the job all the same.

    Raises:
        ClusterError: it did not, and the folder of a run that never started is gone; or nobody can tell, and it stays.
    """
    try:
        job_id = slurm.job_marked(token)
    except ClusterError as silent:
        raise ClusterError(
            f"{refused}; whether the job is queued all the same is not known, because {silent}:"
            f" look for {token} in squeue -o '%i %k'"
        ) from None
    if job_id is None:
        if not records.submissions(folder)[:-1]:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise refused
    return job_id
