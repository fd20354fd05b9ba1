"""What a simulated cluster tells its ranks."""

from __future__ import annotations

import pytest

from mgpu_slurm.executors import simulated
from mgpu_slurm.request.spec import Resources, Spec, Target


def spec(**resources: int) -> Spec:
    return Spec(run="r", target=Target(command=("true",)), executor="local", resources=Resources(**resources))


def test_nodes_get_equal_shares_of_the_gpus_and_ranks_see_their_nodes_whole_share() -> None:
    asked = spec(nodes=2, gpus_per_node=2)
    seen = [simulated.rank_variables(asked, rank, ["0", "1", "2", "5"]) for rank in range(4)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["0,1", "0,1", "2,5", "2,5"]
    assert [one["SLURM_LOCALID"] for one in seen] == ["0", "1", "0", "1"]
    assert [one["SLURMD_NODENAME"] for one in seen] == ["local1", "local1", "local2", "local2"]


def test_no_gpus_asked_hides_them_and_unsaid_leaves_them_alone() -> None:
    assert simulated.rank_variables(spec(gpus_per_node=0), 0, [])["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in simulated.rank_variables(spec(), 0, [])


@pytest.mark.parametrize(
    ("visible", "gpus"), [("0,3", ["0", "3"]), ("GPU-8f2", ["GPU-8f2"]), ("", []), ("-1", []), ("0,-1,2", ["0"])]
)
def test_gpus_that_the_user_chose_are_the_machines(visible: str, gpus: list[str]) -> None:
    assert simulated.visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_job_variables_have_slurms_forms() -> None:
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
