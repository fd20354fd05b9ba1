"""What a simulated cluster tells its ranks."""

from __future__ import annotations

from mgpu_slurm.core.node_gpus import HIDDEN, VisibleGpus
from mgpu_slurm.local_cluster import simulated
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target


def spec(**resources: int) -> Spec:
    return Spec(run="r", target=Target(command=("true",)), executor="local", resources=Resources(**resources))


def test_ranks_see_all_gpus_of_their_simulated_node() -> None:
    asked = spec(nodes=2, gpus_per_node=2)
    gpus = VisibleGpus(("0", "1", "2", "5"))
    seen = [simulated.rank_variables(asked, rank, gpus) for rank in range(4)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["0,1", "0,1", "2,5", "2,5"]
    assert [one["SLURM_LOCALID"] for one in seen] == ["0", "1", "0", "1"]
    assert [one["SLURMD_NODENAME"] for one in seen] == ["local1", "local1", "local2", "local2"]


def test_zero_gpus_hides_them_and_no_request_leaves_them_visible() -> None:
    assert simulated.rank_variables(spec(gpus_per_node=0), 0, VisibleGpus(())).items() >= HIDDEN.items()
    assert not simulated.rank_variables(spec(), 0, VisibleGpus(())).keys() & HIDDEN.keys()


def test_job_variables_have_the_format_of_slurm() -> None:
    variables = simulated.job_variables(spec(nodes=3, ntasks_per_node=2, cpus_per_task=4), job_id=77, restarts=1)
    wanted = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "local[1-3]",
        "SLURM_STEP_NODELIST": "local[1-3]",
        "SLURM_NTASKS": "6",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_TASKS_PER_NODE": "2(x3)",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_RESTART_COUNT": "1",
    }
    assert variables | wanted == variables
