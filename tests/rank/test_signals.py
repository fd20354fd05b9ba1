"""Ctrl-C asks once to save and leave, and the second time ends at once; the lead signal spares compilers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from mgpu_slurm.rank.signals import Stop, StopFlag
from mgpu_slurm.request import parallelism
from mgpu_slurm.request.spec import TERMINATED_EXIT_CODE
from tests.forks import in_fork
from tests.support import wait_until

SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import mgpu_slurm

run = mgpu_slurm.attach()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = run.loader(TensorDataset(torch.ones(4, 1)), batch_size=1)
state = run.restore(model=model, optimizer=optimizer, data=data)
for epoch in state.epochs(1):
    for (batch,) in data:
        run.backward(model(batch).mean())
        run.update(optimizer)
        if run.step == 2:
            print("waits", flush=True)
            while not run._loop_control.stop.asked:
                time.sleep(0.01)
            {then}
"""


def started(folder: Path, then: str) -> subprocess.Popen[str]:
    environ = os.environ | {"MGPU_RUNS": str(folder)}
    command = [sys.executable, "-c", SCRIPT.format(then=then)]
    process = subprocess.Popen(command, text=True, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    return process


def test_first_ctrl_c_saves_and_stops_at_the_next_boundary(tmp_path: Path) -> None:
    process = started(tmp_path, "pass")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (TERMINATED_EXIT_CODE, "mgpu_slurm: stopped at step 2, asked to end\n", "")
    assert [path.name for path in tmp_path.glob("*/checkpoints/*")] == ["step-000000002"]


def test_second_ctrl_c_exits_without_saving(tmp_path: Path) -> None:
    process = started(tmp_path, "print('again', flush=True); time.sleep(600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "again\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, TERMINATED_EXIT_CODE)
    assert err.endswith("KeyboardInterrupt\n")
    assert list(tmp_path.glob("*/checkpoints/*")) == []


def survives_lead_signal(compiles: bool) -> tuple[bool, int]:
    """Return whether this rank has heard a lead signal that it and its child got, and how the child ended."""
    os.environ[parallelism.VARIABLE] = json.dumps({"compile": compiles})
    stop = StopFlag()
    stop.listen()
    stop.watch_signals(None, lambda: None)
    # as a compiler, it has no handler
    child = subprocess.Popen(["sleep", "100"])
    os.kill(child.pid, signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_until(lambda: stop.asked is Stop.REQUEUE)
    if compiles:
        child.terminate()
    return True, child.wait()


def test_compilers_of_a_run_survive_the_lead_signal_and_end_when_terminated() -> None:
    assert in_fork(survives_lead_signal, True) == (True, -signal.SIGTERM)
    assert in_fork(survives_lead_signal, False) == (True, -signal.SIGUSR2)
