"""Rank facts from the variables of each launcher."""

from __future__ import annotations

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.rank_info import RankInfo, from_environment

BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_NODELIST": "rack[1-2]n7",
}
STEP = BATCH_SCRIPT | {
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "rack[1-2]n7",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}


def test_rank_is_read_from_srun_variables() -> None:
    assert from_environment(STEP) == RankInfo(2, 3, 0, 1, 1, "rack2n7")


def test_step_variables_take_precedence_over_job_variables() -> None:
    # a step of one task inside of a job of three
    one = STEP | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    one |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "rack2n7"}
    assert from_environment(one) == RankInfo(0, 1, 0, 1, 0, "rack2n7")


def test_batch_script_is_a_single_rank() -> None:
    assert from_environment(BATCH_SCRIPT).world_size == 1


def test_torchrun_variables_take_precedence_over_srun() -> None:
    assert from_environment(STEP | TORCHRUN | {"SLURMD_NODENAME": "rack2n7"}) == RankInfo(5, 8, 1, 4, 1, "rack2n7")


def test_empty_environment_is_a_single_rank() -> None:
    assert from_environment({}).world_size == 1


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not LOCAL_RANK"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x'"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 is outside of a world of 8 ranks"),
        ({name: value for name, value in STEP.items() if name != "SLURM_LOCALID"}, "not SLURM_LOCALID"),
    ],
)
def test_incomplete_or_invalid_launcher_variables_are_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_environment(environ)
