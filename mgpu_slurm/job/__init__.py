"""What runs on the nodes of a job beside its ranks: the batch step, retries and requeues. It needs no torch."""

from __future__ import annotations

PARTS = {
    "batch": "mgpu_slurm.job.batch",
    "rank": "mgpu_slurm.training.entry",
    "worker": "mgpu_slurm.sweeps.worker.worker_entry",
    "supervisor": "mgpu_slurm.local_cluster.supervisor",
    "coordinator": "mgpu_slurm.local_cluster.coordinator",
}
"""The processes of a run, by the names that batch scripts have for them: modules may move while a job waits in its
queue, these names stay."""
