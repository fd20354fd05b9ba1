"""Workers of a sweep as real processes, which train nothing: they report values, write checkpoints, and may be killed
at a write to the study."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.client.messages import Assignment, Leave
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.study.journal import JournalFile
from tests.sweeps.client.test_copies import save_whole
from tests.sweeps.sweeps import worker

FORK = multiprocessing.get_context("fork")

WRITES = (
    "create_new_trial",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_intermediate_value",
    "set_trial_user_attr",
    "set_trial_system_attr",
    "set_study_system_attr",
)
"""The methods of Optuna's storages that write."""

REPORTS = (1, 2, 3, 6, 9)
"""Progress values at which a trial reports, and then saves a checkpoint."""


@dataclass(frozen=True)
class Death:
    """When a worker is killed."""

    write: int
    """Number of its write to the study, from 1."""
    how: str
    """`before` it, `after` it, or `torn`: while half of it is in the journal."""


def run(folder: RunFolder, number: int, attempt: int, death: Death | None = None) -> Any:
    """Start a worker, and return its process."""
    process = FORK.Process(target=_work, args=(folder, number, attempt, death))
    process.start()
    return process


def violations(folder: RunFolder) -> list[str]:
    """Return what workers have seen that must not be."""
    path = _violations(folder)
    return path.read_text().splitlines() if path.exists() else []


def _violations(folder: RunFolder) -> Path:
    return folder.path / "violations"


def _work(folder: RunFolder, number: int, attempt: int, death: Death | None) -> None:
    # on stderr, errors are still shown
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    client = worker(folder, number, attempt)
    client._shared.show = lambda **changes: None  # type: ignore[method-assign]
    client.settle()
    if death is not None:
        _doom(client, death)
    while True:
        order = client.next(Stop.NO)
        if isinstance(order, Leave):
            os._exit(order.exit_code)
        if order is not None:
            train(folder, client, order)


def _doom(client: StudyClient, death: Death) -> None:
    """Let the process be killed at a write."""
    storage = client._shared.study._storage
    count = 0

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == death.write and death.how == "before":
                kill()
            if count == death.write and death.how == "torn":
                _tear(storage)
            done = write(*given, **named)
            if count == death.write:
                kill()
            return done

        return call

    for name in WRITES:
        setattr(storage, name, wrapped(getattr(storage, name)))


def _tear(storage: Any) -> None:
    """Let the next write to the journal stop in the middle of a record."""
    journal = storage._backend
    assert isinstance(journal, JournalFile)

    def write_half(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    journal._write_whole = write_half  # type: ignore[method-assign]


@contextmanager
def _alone(folder: RunFolder, order: Assignment) -> Iterator[None]:
    """Note it if another worker trains the same trial."""
    with open(folder.of_trial(order.number).path / "busy", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with open(_violations(folder), "a") as noted:
                noted.write(f"two workers train trial {order.number}\n")
        yield


def value_of(x: float, progress: int) -> float:
    return x * progress / (progress + 1)


def train(folder: RunFolder, client: StudyClient, order: Assignment) -> None:
    with _alone(folder, order):
        end = _trained(folder, client, order)
    # from here on, another worker may continue it
    end()


def _trained(folder: RunFolder, client: StudyClient, order: Assignment) -> Callable[[], None]:
    """Train a trial, and return what ends it here."""
    trial = folder.of_trial(order.number)
    saved = newest_checkpoint(trial)
    began = 0 if saved is None else int(saved.name.removeprefix("step-"))
    x = float(order.values["x"])
    for progress in REPORTS:
        if progress <= began:
            continue
        verdict = client.report(progress, {"score": value_of(x, progress)})
        if verdict.prune_reason is not None:
            return partial(client.prune, verdict.prune_reason, progress)
        if not trial.checkpoint(progress).exists():
            save_whole(folder, order.number, progress)
        if verdict.pauses:
            return partial(client.pause, progress)
    return partial(client.complete, {"score": value_of(x, REPORTS[-1])}, {}, step=REPORTS[-1], progress=REPORTS[-1])


def writes_of(folder: RunFolder) -> int:
    """Return how many writes to the study one worker makes in the whole sweep."""
    client = worker(folder, 0)
    count = 0

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            return write(*given, **named)

        return call

    storage = client._shared.study._storage
    for name in WRITES:
        setattr(storage, name, counted(getattr(storage, name)))
    while not isinstance(order := client.next(Stop.NO), Leave):
        assert order is not None
        train(folder, client, order)
    return count
