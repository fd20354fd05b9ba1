"""Record some steps of a rank with torch's profiler, as a trace for Perfetto and for `mgpu-slurm profile`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mgpu_slurm.core import log_lines
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.request.profile_window import VARIABLE, ProfileWindow
from mgpu_slurm.run_folder.layout import RunFolder


def profiling(facts: RankInfo, folder: RunFolder, attempt: int) -> Profiling | None:
    """Return what records the steps that the environment of this rank names; None if it names none."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return None
    window = ProfileWindow.parse(given)
    return Profiling(window, folder, attempt, facts.rank) if window.records(facts.rank, facts.node) else None


class Profiling:
    """The trace of one rank. What fails is a warning: no training ends because of it."""

    def __init__(self, window: ProfileWindow, folder: RunFolder, attempt: int, rank: int) -> None:
        self._window = window
        self._trace = folder.trace(attempt, rank)
        self._profiler: Any = None
        self._is_over = False
        self._step = 0
        """The newest step of the run."""
        self._starts = max(0, window.first - 2)
        """The step after which the profiler starts: its first step is a warm-up, if there is one."""
        self._first = window.first
        """The first step that is recorded."""

    def fetched(self, step: int) -> None:
        """Record that a training loop got a batch, after this step of the run."""
        self._step = step
        if self._profiler is None and not self._is_over:
            with self._guard():
                self._start_if_due(step)

    def step_done(self, step: int) -> None:
        """Record the end of a step, by its number in the run."""
        self._step = step
        if self._is_over:
            return
        with self._guard():
            if self._profiler is not None:
                self._profiler.step()
            else:
                # the loop does not use a run.loader
                self._start_if_due(step)
            if step >= self._window.last:
                self._stop()

    def _start_if_due(self, step: int) -> None:
        if self._starts <= step < self._window.last:
            self._start(step)

    def close(self) -> None:
        """Stop a recording that is not over, and forget it; say that nothing was recorded."""
        if not self._is_over:
            steps = f"{self._window.first}-{self._window.last}"
            when = f"after step {self._step}" if self._step else "before a step"
            log_lines.warn(f"--profile {steps}: nothing was recorded: the attempt ended {when}")
        self._stop()

    def _stop(self) -> None:
        self._is_over = True
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.on_trace_ready = None
            with self._guard():
                profiler.stop()

    def _start(self, step: int) -> None:
        """Start recording after this step."""
        if torch_adapter.is_profiling():
            raise RuntimeError("another profiler is recording")
        # torch's profiler writes the stages of each recording to the log
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._first = max(self._window.first, step + 1)
        schedule = _schedule(self._window.last - self._first + 1, is_warm=self._first == step + 1)
        self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
        self._profiler.start()

    def _write(self, profiler: torch.profiler.profile) -> None:
        """Write the trace, whole or not at all."""
        self._trace.parent.mkdir(exist_ok=True)
        hidden = self._trace.with_name(f".{self._trace.name}")
        try:
            profiler.export_chrome_trace(str(hidden))
            os.replace(hidden, self._trace)
        finally:
            hidden.unlink(missing_ok=True)
        self._profiler = None
        log_lines.say(f"steps {self._first} to {self._window.last} were recorded: {self._trace}")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._is_over, self._profiler = True, None
            log_lines.warn(f"--profile: {type(error).__name__}: {error}; training continues")


def _schedule(steps: int, is_warm: bool) -> Any:
    with warnings.catch_warnings():
        # without a warm-up, the first step takes a little longer
        warnings.simplefilter("ignore")
        return torch.profiler.schedule(wait=0, warmup=0 if is_warm else 1, active=steps, repeat=1)
