"""The processes on a job's nodes other than its ranks: the batch step, retries and requeues. Does not need torch."""

from __future__ import annotations

PARTS = {
    "batch": "mgpu_slurm.job.batch",
    "rank": "mgpu_slurm.training.entry",
    "worker": "mgpu_slurm.sweeps.worker.worker_entry",
    "supervisor": "mgpu_slurm.local_cluster.supervisor",
    "coordinator": "mgpu_slurm.local_cluster.coordinator",
    "tracker": "mgpu_slurm.trackers.tracker_process",
}
"""The processes of a run, by the names that batch scripts use. These names are stable: a module may move while a job
waits in the queue."""
