"""What an attempt failed of, by what was recorded of it."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from mgpu_slurm.causes import cause_of, node_of


def of_rank(error: str, message: str, consequence: bool = False) -> dict[str, Any]:
    return {"rank": 1, "node": "n2", "error": error, "message": message, "consequence": consequence}


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        ({"message": "rank 1 was ended by SIGKILL"}, "killed"),
        ({"message": "rank 1 on n2: Killed"}, "killed"),
        ({"message": "srun was ended by SIGKILL"}, "killed"),
        ({"message": "srun: error: Task launch for StepId=42.0 failed on node n2: Communication failure"}, "launch"),
        (of_rank("RuntimeError", "Connection closed by peer [127.0.0.1]:4711", consequence=True), "connection"),
        (of_rank("OSError", str(OSError(errno.ESTALE, os.strerror(errno.ESTALE), "data.bin"))), "disk"),
        (of_rank("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"), "gpu"),
        (of_rank("RuntimeError", "No CUDA GPUs are available"), "gpu"),
    ],
)
def test_what_the_cluster_did(failure: dict[str, Any], name: str) -> None:
    cause = cause_of(failure)
    assert (cause.name, cause.is_clusters, cause.spoils_node) == (name, True, name == "gpu")


@pytest.mark.parametrize(
    "failure",
    [
        of_rank("ValueError", "the data is broken"),
        of_rank("FileNotFoundError", "[Errno 2] No such file or directory: 'data.bin'"),
        of_rank("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        of_rank("AcceleratorError", "CUDA error: device-side assert triggered"),
        {"message": "rank 1 on n2 ended with exit code 1: ValueError: Killed"},
        {"message": "rank 1 was ended by SIGSEGV"},
        {"message": "rank 1 on n2: Out Of Memory"},
        {},
    ],
)
def test_what_the_program_did(failure: dict[str, Any]) -> None:
    assert not cause_of(failure).is_clusters


def test_where() -> None:
    assert node_of(of_rank("ValueError", "broken")) == "n2"
    assert node_of({"message": "rank 1 on n2: Killed"}) == "n2"
    assert node_of({"message": "rank 1 on gpu-07.cluster ended with exit code 1"}) == "gpu-07.cluster"
    # of several nobody knows which, and a machine has no other node
    assert node_of({"message": "ranks 1-2 on n[1-2]: Killed"}) is None
    assert node_of({"message": "rank 1 was ended by SIGKILL"}) is None
