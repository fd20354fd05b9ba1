"""Whether an attempt that has failed is worth another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.files import write_json
from mgpu_slurm.job import retry_policy
from mgpu_slurm.job.retry_policy import Retry
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event

KILLED = {"message": "rank 1 on n2: Killed"}
BROKEN = {"rank": 0, "node": "n1", "error": "ValueError", "message": "broken"}
NO_GPU = {"rank": 0, "node": "n1", "error": "RuntimeError", "message": "No CUDA GPUs are available"}


class Failing:
    """A run whose attempts fail one after the other."""

    def __init__(self, path: Path, gpus: int = 1, **options: Any) -> None:
        self.folder = RunFolder(path)
        self.spec = Spec("run", Target(function="jobs:train"), "slurm", Resources(gpus_per_node=gpus), **options)
        self.retried: list[Event] = []

    def fails(self, failure: dict[str, Any], code: int = 1) -> Retry | None:
        if failure:
            write_json(self.folder.failure, failure)
        retry = retry_policy.due(self.folder, self.spec, code, self.retried)
        if retry is not None:
            self.retried.append(retry.write_down(self.folder))
        return retry

    def numbers(self, *failures: dict[str, Any]) -> list[int | None]:
        return [retry and retry.number for retry in map(self.fails, failures)]

    def saves(self, step: int) -> None:
        self.folder.checkpoint(step).mkdir(parents=True)


@pytest.fixture
def failing(tmp_path: Path) -> Failing:
    return Failing(tmp_path)


def test_cluster_failures_are_retried_and_progress_resets_the_count(failing: Failing) -> None:
    assert failing.numbers(KILLED, KILLED) == [1, 2]
    failing.saves(5)
    assert failing.numbers(KILLED, KILLED, KILLED, KILLED) == [1, 2, 3, None]
    failing.saves(6)
    assert failing.numbers(KILLED) == [1]


def test_program_error_is_not_retried(failing: Failing) -> None:
    assert failing.numbers(BROKEN) == [None]


@pytest.mark.parametrize(("retries", "expected"), [(0, [None]), (2, [1, 2, None])])
@pytest.mark.parametrize("failure", [KILLED, BROKEN])
def test_explicit_retries_apply_to_all_failures(
    tmp_path: Path, retries: int, expected: list[int | None], failure: dict[str, Any]
) -> None:
    assert Failing(tmp_path, retries=retries).numbers(*[failure] * len(expected)) == expected


def test_attempt_is_retried_as_long_as_it_finds_a_smaller_size(failing: Failing) -> None:
    full = {"rank": 1, "node": "n2", "error": "OutOfMemoryError", "message": "CUDA out of memory"}
    told = []
    for attempt, samples in ((1, 8), (2, 4), (3, 0)):
        records.record_event(failing.folder, "started", attempt=attempt)
        if samples:
            write_json(failing.folder.memory, {"samples": samples, "first": samples, "attempt": attempt})
        told.append(failing.fails(full))
    assert [retry and retry.words for retry in told] == [
        "restarting (1 of 4): rank 1 on n2: OutOfMemoryError: CUDA out of memory; next with 8 samples at once",
        "restarting (2 of 4): rank 1 on n2: OutOfMemoryError: CUDA out of memory; next with 4 samples at once",
        None,
    ]


@pytest.mark.parametrize("code", [0, 75])
def test_exit_codes_0_and_75_are_not_retried(failing: Failing, code: int) -> None:
    assert failing.fails(KILLED, code) is None


def test_sweep_worker_is_not_retried(tmp_path: Path) -> None:
    assert Failing(tmp_path, kind="sweep").numbers(KILLED) == [None]


def test_sweep_worker_leaves_a_job_whose_step_never_starts(tmp_path: Path) -> None:
    held_up = {"message": "srun waited for 90 s, and SLURM did not start the ranks' step"}
    retry = Failing(tmp_path, kind="sweep").fails(held_up)
    assert retry is not None
    assert retry.leaves_job


def test_killed_supervisor_is_retried(failing: Failing) -> None:
    retry = failing.fails({}, code=-9)
    assert retry is not None
    assert retry.why == "the supervisor was killed by SIGKILL"


class TestNodes:
    def test_node_that_fails_twice_in_a_row_is_avoided_from_then_on(self, failing: Failing) -> None:
        found = [failing.fails(failure) for failure in (KILLED, KILLED, {"message": "rank 0 on n3: Killed"})]
        assert [retry and retry.avoid for retry in found] == [(), ("n2",), ("n2",)]

    def test_node_is_not_avoided_if_the_run_made_progress_in_between(self, failing: Failing) -> None:
        failing.fails(KILLED)
        failing.saves(5)
        retry = failing.fails(KILLED)
        assert retry is not None
        assert retry.avoid == ()

    def test_node_whose_gpu_is_gone_is_avoided_at_once(self, failing: Failing) -> None:
        retry = failing.fails(NO_GPU)
        assert retry is not None
        assert retry.avoid == ("n1",)

    def test_missing_gpu_is_not_retried_if_none_was_requested(self, tmp_path: Path) -> None:
        assert Failing(tmp_path, gpus=0).fails(NO_GPU) is None


def test_retry_is_recorded_in_history_and_state(failing: Failing) -> None:
    failing.saves(5)
    failing.fails(NO_GPU)
    (event,) = records.events(failing.folder)
    why = "rank 0 on n1: RuntimeError: No CUDA GPUs are available"
    told = {"why": why, "node": "n1", "checkpoint": 5, "avoid": ["n1"], "pause": 0.0}
    assert event == Event.from_json({"event": "retried", "time": event.time, **told})
    state = records.read_state(failing.folder)
    assert (state.state, state.reason) == ("REQUEUED", f"restarting (1 of 3): {why}")


def test_retries_wait_for_the_configured_pauses(failing: Failing) -> None:
    found = [failing.fails(KILLED) for _ in range(3)]
    assert [retry and retry.pause for retry in found] == list(retry_policy.PAUSES)
    assert sorted(set(retry_policy.PAUSES)) == list(retry_policy.PAUSES)


AT_LIMIT, NOT_AT_LIMIT = True, False


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        # the newest checkpoint at the end of each attempt, and whether it ended by its time limit
        ([(5, AT_LIMIT), (5, AT_LIMIT), (5, AT_LIMIT)], "step-000000005"),
        ([(5, AT_LIMIT), (5, AT_LIMIT), (5, NOT_AT_LIMIT), (5, AT_LIMIT)], "step-000000005"),
        ([(None, AT_LIMIT), (None, AT_LIMIT)], "without a checkpoint"),
        ([(5, AT_LIMIT), (5, AT_LIMIT), (6, AT_LIMIT), (6, AT_LIMIT)], ""),
        ([(5, AT_LIMIT), (5, AT_LIMIT), (6, NOT_AT_LIMIT), (6, AT_LIMIT)], ""),
        ([(5, NOT_AT_LIMIT), (5, NOT_AT_LIMIT), (5, NOT_AT_LIMIT)], ""),
    ],
)
def test_two_time_limits_without_a_newer_checkpoint_prevent_a_requeue(
    failing: Failing, ends: list[tuple[int | None, bool]], expected: str
) -> None:
    reasons, requeued = [], []
    for step, is_at_limit in ends:
        records.record_event(failing.folder, "started", **retry_policy.checkpoint_fact(failing.folder))
        if step is not None and not failing.folder.checkpoint(step).exists():
            failing.saves(step)
        asked = retry_policy.requeue_event(failing.folder, failing.spec, lambda is_at_limit=is_at_limit: is_at_limit)
        reasons.append(retry_policy.why_no_requeue(failing.spec, requeued, asked))
        requeued.append(asked)
    assert reasons[:-1] == [""] * (len(ends) - 1)
    assert (expected in reasons[-1]) if expected else (reasons[-1] == "")


def test_attempts_of_version_0_1_do_not_prevent_a_requeue(failing: Failing) -> None:
    failing.saves(5)
    for _ in range(3):
        records.record_event(failing.folder, "started")
        assert retry_policy.requeue_event(failing.folder, failing.spec, lambda: True).in_vain is False


def test_requeue_of_commands_and_sweep_workers_needs_no_checkpoint(tmp_path: Path) -> None:
    worker = Failing(tmp_path, kind="sweep")
    command = Spec("run", Target(command=("true",)), "slurm", Resources())
    for spec in (worker.spec, command):
        records.record_event(worker.folder, "started", **retry_policy.checkpoint_fact(worker.folder))
        assert retry_policy.requeue_event(worker.folder, spec, lambda: True).in_vain is False
