"""The local stand-in for a small SLURM: its node names, and the environment variables of its ranks.

These are pure functions; `supervisor` does the work.
"""

from __future__ import annotations

from mgpu_slurm.core import node_gpus
from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.core.node_gpus import VisibleGpus
from mgpu_slurm.core.processes import cores
from mgpu_slurm.request.spec import Spec

ADDRESS = "127.0.0.1"
"""All simulated nodes are this machine; nothing listens on another interface."""


def node_names(spec: Spec) -> list[str]:
    return [f"local{index + 1}" for index in range(spec.resources.nodes)]


def job_variables(spec: Spec, job_id: int, restarts: int) -> dict[str, str]:
    """Return the variables that SLURM sets in every process of a job, and srun in every task of its step.

    Names and forms are those of sbatch(1) and srun(1), OUTPUT ENVIRONMENT VARIABLES.
    """
    resources = spec.resources
    nodes, per_node = resources.nodes, resources.ranks_per_node
    node_list = compress(node_names(spec))
    tasks_per_node = str(per_node) if nodes == 1 else f"{per_node}(x{nodes})"
    job = {
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOBID": str(job_id),
        "SLURM_JOB_NAME": spec.run,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": node_list,
        "SLURM_NODELIST": node_list,
        "SLURM_NTASKS": str(resources.ranks),
        "SLURM_NPROCS": str(resources.ranks),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": tasks_per_node,
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_CPUS_ON_NODE": str(max(1, cores() // nodes)),
        "SLURM_SUBMIT_DIR": spec.project,
    }
    if resources.cpus_per_task is not None:
        job["SLURM_CPUS_PER_TASK"] = str(resources.cpus_per_task)
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": node_list,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(resources.ranks),
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
    }
    # gloo would otherwise look up this machine's host name, which can take a second or fail
    return job | step | {"GLOO_SOCKET_IFNAME": "lo"}


def rank_variables(spec: Spec, rank: int, gpus: VisibleGpus) -> dict[str, str]:
    """Return the variables that differ between ranks.

    Ranks fill one node after the other, as in srun's block distribution.

    Args:
        gpus: all GPUs that the run may use; each node gets an equal share, and its ranks see the whole share.
    """
    node, local = divmod(rank, spec.resources.ranks_per_node)
    variables = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": node_names(spec)[node],
    }
    per_node = spec.resources.gpus_per_node
    if per_node is not None:
        own = range(node * per_node, (node + 1) * per_node)
        variables |= gpus.chosen(own) if per_node else node_gpus.HIDDEN
    return variables
