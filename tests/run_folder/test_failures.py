"""What an attempt failed of, by what was recorded of it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace

import click
import pytest

from mgpu_slurm.cli import main
from mgpu_slurm.run_folder import failures
from mgpu_slurm.run_folder.failures import cause_of, cause_of_reason, first_stuck, node_of
from mgpu_slurm.run_folder.record_types import Failure

NO_LAUNCH = "srun: error: Task launch for StepId=42.0 failed on node n2: Communication failure"


def of_rank(error: str, message: str, consequence: bool = False) -> Failure:
    return Failure(rank=1, node="n2", error=error, message=message, consequence=consequence)


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        (Failure(message="rank 1 was killed by SIGKILL"), "killed"),
        (Failure(message="rank 1 on n2: Killed"), "killed"),
        (Failure(message="srun was ended by SIGKILL"), "killed"),
        (Failure(message=NO_LAUNCH), "launch"),
        (Failure(message="srun: error: Unable to confirm allocation for job 1: Unspecified error"), "launch"),
        (Failure(message="srun: error: Unable to create step for job 9: Zero Bytes were transmitted"), "launch"),
        (Failure(message="srun waited for 60 s, and SLURM did not start the ranks' step"), "held-up"),
        (of_rank("RuntimeError", "Connection closed by peer [127.0.0.1]:4711", consequence=True), "connection"),
        (of_rank("DistNetworkError", "Broken pipe"), "connection"),
        (of_rank("DistNetworkError", "failed to recv, got 0 bytes. Connection was likely closed."), "connection"),
        (of_rank("OSError", str(OSError(errno.ESTALE, os.strerror(errno.ESTALE), "data.bin"))), "disk"),
        (of_rank("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"), "gpu"),
        (of_rank("Stuck", "no progress for 30 min since step 8: it is at train.py:12 in load"), "stuck"),
        (of_rank("RuntimeError", "No CUDA GPUs are available"), "gpu"),
    ],
)
def test_cluster_faults_are_recognized(failure: Failure, name: str) -> None:
    cause = cause_of(failure)
    assert (cause.name, cause.is_cluster_fault, cause.excludes_node) == (name, True, name in ("gpu", "launch"))


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("its supervisor process was killed", "supervisor"),
        ("the run it waited for did not complete", "dependency"),
        ("waited for run first, which is FAILED", "dependency"),
        ("two attempts in a row reached the time limit without a checkpoint", "no-checkpoint-in-time"),
        # wordings of version 0.1
        ("two attempts in a row ended by the time limit without a checkpoint", "no-checkpoint-in-time"),
        ("what it waited for is not to be found (there is no run 'first')", "dependency-gone"),
        ("the run it waited for no longer exists (there is no run 'first'): submit it again", "dependency-gone"),
    ],
)
def test_cause_is_recognized_from_the_reason_of_a_run(reason: str, name: str) -> None:
    cause = cause_of_reason(reason)
    assert cause is not None
    assert cause.name == name


@pytest.mark.parametrize(
    ("error", "message", "name"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu-memory"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "gpu-library"),
        ("AcceleratorError", "CUDA error: device-side assert triggered", "gpu-assert"),
        (
            "DistBackendError",
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE,"
            " Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
            "collective-timeout",
        ),
        ("RendezvousError", "waited 300 s: ranks 1, 3 have not come", "rendezvous"),
        ("RuntimeError", "DataLoader worker (pid 4711) is killed by signal: Killed. ", "host-memory"),
    ],
)
def test_gpu_and_cluster_errors_of_torch_are_recognized(error: str, message: str, name: str) -> None:
    assert cause_of(of_rank(error, message)).name == name


ADVICE = sorted({cause.fix for cause in vars(failures).values() if isinstance(cause, failures.Cause)})


@pytest.mark.parametrize("advice", ADVICE)
def test_commands_and_flags_in_the_advice_exist(advice: str) -> None:
    commands: dict[str, click.Command] = main.cli.commands
    flags = {flag for command in commands.values() for option in command.params for flag in option.opts}
    for call in re.findall(r"`mgpu-slurm ([^`]+)`", advice):
        name, *words = call.partition(" -- ")[0].split()
        own = {flag for option in commands[name].params for flag in option.opts}
        assert {word for word in words if word.startswith("--")} <= own, call
    assert set(re.findall(r"--[a-z-]+", advice)) <= flags
    assert set(re.findall(r"`([a-z]+)(?: |`)", advice)) <= {*commands, "df", "sacct", "dmesg", "setup"}


@pytest.mark.parametrize("message", ["rank 0 on n1 was ended by SIGTERM", "rank 1 on n2: Terminated"])
def test_sigterm_is_recognized_as_terminated(message: str) -> None:
    cause = cause_of(Failure(message=message))
    assert (cause.name, cause.is_cluster_fault) == ("terminated", False)


def test_program_that_a_node_lacks_is_recognized() -> None:
    said = "slurmstepd-n2: error: execve(): apptainer: No such file or directory"
    assert cause_of(Failure(message=f"ranks 2-3 on n2 ended with exit code 2: {said}")).name == "command"


def test_cause_of_a_script_is_read_from_the_end_of_its_log() -> None:
    said = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'nowhere'\n"
    failure = Failure(message="rank 0 ended with exit code 1: ModuleNotFoundError: No module named 'nowhere'")
    assert cause_of(failure, said).name == "import"
    assert cause_of(failure).name == "program"
    assert cause_of(Failure()).name == "unknown"
    # the last error, not one that was seen to
    handled = "[rank0]: ConnectionResetError: Connection reset by peer\n[rank0]: ValueError: no data\nbye\n"
    assert cause_of(failure, handled).name == "program"


def test_stacks_of_a_crash_do_not_hide_the_error_before_them() -> None:
    stacks = (
        "Fatal Python error: Aborted\n\nCurrent thread 0x0001 (most recent call first):\n"
        + 50 * '  File "a.py", line 1 in f\n'
    )
    said = f"terminate called after throwing an instance of 'std::bad_alloc'\n{stacks}"
    assert cause_of(Failure(message="rank 0 was killed by SIGABRT"), said).name == "host-memory"
    assert cause_of(Failure(message="rank 0 was killed by SIGABRT"), stacks).name == "crash"


@pytest.mark.parametrize(
    "failure",
    [
        of_rank("ValueError", "the data is broken"),
        of_rank("FileNotFoundError", "[Errno 2] No such file or directory: 'data.bin'"),
        of_rank("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        of_rank("AcceleratorError", "CUDA error: device-side assert triggered"),
        Failure(message="rank 1 on n2 ended with exit code 1: ValueError: Killed"),
        Failure(message="rank 1 was ended by SIGSEGV"),
        Failure(message="rank 1 on n2: Out Of Memory"),
        Failure(message="srun: error: Unable to create step for job 9: Invalid generic resource (gres) specification"),
        of_rank("DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:77, invalid usage. Duplicate GPU detected"),
        Failure(),
    ],
)
def test_program_errors_are_not_cluster_faults(failure: Failure) -> None:
    assert not cause_of(failure).is_cluster_fault


def stuck(rank: int, waits: bool, collectives: int = 0, place: int = 0) -> Failure:
    record = of_rank("Stuck", "no progress for 30 min since step 8: it waits for other ranks", waits)
    return replace(
        record,
        rank=rank,
        collectives=collectives,
        doing=f"is in place {place}",
        time=f"2026-01-01T00:00:0{rank}",
    )


class TestStuckRanks:
    """Which of them holds up the others."""

    def test_rank_that_does_not_wait_is_first(self) -> None:
        assert first_stuck([stuck(0, True, 3), stuck(1, False, 3), stuck(2, True, 3)], 3) == stuck(1, False, 3)

    def test_if_all_wait_the_rank_with_the_fewest_collectives_is_first(self) -> None:
        assert first_stuck([stuck(0, True, 4), stuck(1, True, 4), stuck(2, True, 3)], 3) == stuck(2, True, 3)

    def test_ranks_that_wait_in_different_places_are_both_named(self) -> None:
        found = first_stuck([stuck(0, True, place=1), stuck(1, True, place=2)], 2)
        assert found is not None
        assert found.message.endswith("it waits for other ranks, and rank 1 is in place 2")

    def test_ranks_without_a_record_are_named_as_unresponsive(self) -> None:
        found = first_stuck([stuck(0, True), stuck(2, True)], 4)
        assert found is not None
        assert found.message == (
            "ranks 1, 3 stopped responding, and rank 0 made no progress for 30 min since step 8:"
            " it waits for other ranks"
        )
        assert cause_of(found).name == "stuck"

    def test_rank_that_does_not_wait_comes_before_unresponsive_ones(self) -> None:
        assert first_stuck([stuck(0, True), stuck(2, False)], 4) == stuck(2, False)

    def test_lost_connection_as_a_consequence_is_ignored(self) -> None:
        lost = replace(of_rank("RuntimeError", "Connection closed by peer", consequence=True), rank=2)
        assert first_stuck([stuck(0, True), stuck(1, False), lost], 3) == stuck(1, False)

    def test_no_rank_counts_as_first_stuck_after_an_error(self) -> None:
        assert first_stuck([stuck(0, True), of_rank("ValueError", "broken")], 2) is None
        assert first_stuck([], 2) is None


def test_node_is_found_if_the_failure_names_one() -> None:
    def place(failure: Failure) -> str | None:
        return node_of(failure, cause_of(failure))

    assert place(of_rank("ValueError", "broken")) == "n2"
    assert place(Failure(message="rank 1 on n2: Killed")) == "n2"
    assert place(Failure(message="rank 1 on gpu-07.cluster ended with exit code 1")) == "gpu-07.cluster"
    assert place(Failure(message=NO_LAUNCH)) == "n2"
    # of several nobody knows which, and a machine has no other node
    assert place(Failure(message="ranks 1-2 on n[1-2]: Killed")) is None
    assert place(Failure(message="rank 1 was killed by SIGKILL")) is None
    # who waited was not the one
    assert place(of_rank("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete")) is None
    assert place(of_rank("RuntimeError", "Connection closed by peer", consequence=True)) is None


def test_warning_of_this_package_is_not_the_cause() -> None:
    """The disk was full for a while, and later the rank was killed."""
    said = "mgpu_slurm: WARNING: metrics are kept in memory for now: [Errno 28] No space; training continues\n"
    killed = Failure(message="rank 0 was killed by SIGKILL", who="rank 0")
    assert cause_of(killed, f"{said}[  1]  step 7      loss 0.1\n") is failures.KILLED
