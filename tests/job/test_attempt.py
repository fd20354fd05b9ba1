"""An attempt whose helpers fail ends, and tells why."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import torch_versions
from mgpu_slurm.job import attempt
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import failures, records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, log


def test_failure_to_serve_the_rendezvous_ends_the_attempt_with_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def serve(listener: socket.socket) -> Any:
        listener.close()
        raise TypeError("this torch takes no listening socket")

    class Launch(attempt.Launch):
        job_id, names, address = "1", ["n1", "n2"], "127.0.0.1"

        def start(self, variables: dict[str, str]) -> dict[int, str]:
            # they would wait for each other
            ranks.append(subprocess.Popen(["sleep", "3600"], preexec_fn=attempt.own_group))
            return {ranks[0].pid: "rank 0"}

    ranks: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(torch_versions, "serve_store", serve)
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    records.update_state(folder, state="PENDING")
    spec = Spec("run", Target(command=("sleep", "3600")), "slurm", Resources(nodes=2))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, attempt.WATCHED)
    # of an attempt that was killed
    folder.secret(0).touch()
    try:
        ending = attempt.run_attempt(folder, spec, Launch())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # collected by the attempt
    ranks[0].wait()
    assert ending.code == 128 + signal.SIGKILL
    failure = records.read_failure(folder)
    assert failure is not None
    message = "the batch step could not serve the rendezvous: TypeError: this torch takes no listening socket"
    assert (failure.who, failure.message) == ("the batch step", message)
    assert failure.traceback is not None
    assert failure.traceback in capfd.readouterr().err
    assert failure.traceback.startswith("Traceback")
    assert failures.cause_of(failure) is failures.RENDEZVOUS
    assert records.line_of(failure) == message
    assert folder.secrets() == []


def test_rank_fails_if_its_helper_thread_fails(project: Project) -> None:
    project.write(
        "job.py",
        """
        import threading

        from torch.utils.data import TensorDataset
        import torch

        from mgpu_slurm.rank.communication.step_sync import StepSync


        def broken(self):
            raise ValueError("a broken helper")


        def train(run, config):
            if run.rank == 1:
                StepSync._answer = broken
            model = torch.nn.Linear(1, 1)
            data = run.loader(TensorDataset(torch.ones(8, 1)), batch_size=2)
            run.restore(model=model, data=data)
            for _ in data:
                run.save()
            threading.Event().wait()
        """,
    )
    folder, facts = project.run("job", "--nodes", "2", "--stuck-after", "0", "--retries", "0")
    assert (facts["state"], facts["reason"]) == ("FAILED", "rank 1 ended with exit code 1: ValueError: a broken helper")
    assert "mgpu_slurm: thread 'boundaries' of this process failed:\nTraceback" in log(folder, 1)
