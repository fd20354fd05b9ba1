"""Send a run from processes that are killed, one after the other, and read back what its tracker has.

A process of its own: `python -m tests.trackers.deaths FOLDER WHERE`. It imports the tracker's library once, and forks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mgpu_slurm.core import processes
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.trackers import sending
from mgpu_slurm.trackers.adapters import mlflow_tracker
from mgpu_slurm.trackers.adapters.mlflow_tracker import MlflowTracker
from mgpu_slurm.trackers.destinations import Destination
from mgpu_slurm.trackers.tracker import Tracker
from tests.trackers import reading

MOST = 40
"""Deaths after which something must have gone wrong."""


FIRST = 0.004
"""Seconds for which the first process sends, before it dies at any moment; each has half as much more."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_each_report(kind: type[Tracker]) -> None:
    send = kind.send

    def send_one(self: Tracker, reports: Sequence[Report]) -> None:
        send(self, reports[:1])
        if reports:
            die()

    kind.send = send_one  # type: ignore[method-assign]


def after_each_call(kind: type[Tracker]) -> None:
    """Die after each call of MLflow, of which a report needs several."""
    assert kind is MlflowTracker
    mlflow_tracker.METRICS_PER_CALL = 2
    client = __import__("mlflow").MlflowClient
    log = client.log_batch
    died = []

    def log_one(self: Any, run_id: str, metrics: Sequence[Any] = (), **others: Any) -> None:
        log(self, run_id, metrics=metrics, **others)
        died.append(len(metrics))
        # each process comes one call further
        if metrics and len(died) >= int(os.environ["CALLS"]):
            die()

    client.log_batch = log_one


def while_sending(kind: type[Tracker]) -> None:
    """Die at another moment each time."""
    send = kind.send

    def send_for_a_while(self: Tracker, reports: Sequence[Report]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: die())
        if (seconds := float(os.environ["SECONDS"])) > 0:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        for each in reports:
            send(self, [each])

    kind.send = send_for_a_while  # type: ignore[method-assign]


WHERE: dict[str, Callable[[type[Tracker]], None]] = {
    "report": after_each_report,
    "call": after_each_call,
    "moment": while_sending,
}


def send_once(folder: RunFolder, where: str) -> None:
    from mgpu_slurm.trackers.adapters import wandb_tracker

    spec = read_spec(folder)
    (destination,) = map(Destination.parse, spec.sinks)
    os.environ[processes.SINK_VARIABLE] = str(folder.path)
    processes.end_marked(processes.SINK_VARIABLE, str(folder.path))
    WHERE[where](MlflowTracker if destination.tracker == "mlflow" else wandb_tracker.WandbTracker)
    sender = sending.Sender(folder, spec, [destination])
    sender.look(is_job_over=True)
    assert not sender.problems, sender.problems


def main(folder: RunFolder, where: str) -> None:
    (destination,) = map(Destination.parse, read_spec(folder).sinks)
    # imported before the forks
    for name in ("mlflow", "mlflow.store.tracking.sqlalchemy_store") if destination.tracker == "mlflow" else ("wandb",):
        __import__(name)
    deaths = 0
    for number in range(MOST):
        os.environ |= {"CALLS": str(1 + number // 2), "SECONDS": str(FIRST * 1.5**number if number < 12 else 0)}
        child = os.fork()
        if child == 0:
            try:
                send_once(folder, where)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(json.dumps({"deaths": deaths, "points": reading.read(folder, destination.tracker)}))
            return
        deaths += 1
    raise AssertionError(f"{deaths} deaths")


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])), sys.argv[2])
