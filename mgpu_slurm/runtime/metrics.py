"""What rank 0 reports: TensorBoard event files, `metrics.jsonl` for programs, a line for people, and the live state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mgpu_slurm.paths import RunFolder, append_jsonl
from mgpu_slurm.records import now, read_state, update_state

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STATE_INTERVAL = 1.0
"""Seconds between two writes of the live state by the step count alone."""


def as_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers; tensors of one element count.

    Raises:
        TypeError: names the metric that is no number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            # a loss still has its graph
            numbers[name] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"metric {name!r}: expected a number, got {value!r}") from None
    return numbers


def result_of(returned: Any, last_metrics: dict[str, float]) -> dict[str, float]:
    """What a job function has returned, as numbers by name: the last metrics for nothing, `value` for a number."""
    if returned is None:
        return last_metrics
    return as_numbers(returned if isinstance(returned, dict) else {"value": returned})


def as_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class Reporter:
    """Rank 0's output. The other ranks have none."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._writer: SummaryWriter | None = None
        self.restored_step: int | None = None
        self._last_write = 0.0
        self._has_warned = False
        self._started = time.monotonic()

    def report(self, progress: int, step: int, metrics: dict[str, float]) -> None:
        record = {"progress": progress, "step": step, "time": now(), "attempt": self._attempt, "metrics": metrics}
        with self._disk_may_fail():
            append_jsonl(self._folder.metrics, record)
            writer = self._tensorboard()
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()
        self._write_state(step=step, progress=progress, metrics=metrics)
        elapsed = time.monotonic() - self._started
        print(f"[{progress:>3}]  step {step:<6} {as_text(metrics)}  ({elapsed:.1f} s)", flush=True)

    def step_done(self, step: int) -> None:
        """Keeps the live state's step fresh, at most once an interval."""
        if time.monotonic() - self._last_write >= STATE_INTERVAL:
            self._write_state(step=step)

    def close(self, step: int) -> None:
        self._write_state(step=step)
        if self._writer is not None:
            with self._disk_may_fail():
                self._writer.close()

    def _write_state(self, **changes: Any) -> None:
        self._last_write = time.monotonic()
        # a script that was not submitted has output, and no state that anybody keeps
        with self._disk_may_fail():
            # one that was given up with its node, and goes on there, does not speak for the attempt after it
            if self._folder.state.exists() and read_state(self._folder)["attempts"] <= self._attempt:
                update_state(self._folder, sync=False, **changes)

    @contextmanager
    def _disk_may_fail(self) -> Iterator[None]:
        """A full disk must not end a training for the sake of its curves; it is said once."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                print(f"mgpu_slurm: WARNING: metrics cannot be written: {error}; training goes on", flush=True)
            self._has_warned = True

    def _tensorboard(self) -> SummaryWriter:
        if self._writer is None:
            # costs 0.1 s to import, so only the rank that reports pays, and only when it does
            from torch.utils.tensorboard import SummaryWriter

            # an attempt that died after its last checkpoint left later steps behind: TensorBoard drops them. The first
            # attempt says so too: of a run's restarts, TensorBoard's own reader takes the first for its start
            purge = 0 if self.restored_step is None else self.restored_step + 1
            self._writer = SummaryWriter(str(self._folder.tensorboard), purge_step=purge)
        return self._writer
