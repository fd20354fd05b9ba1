"""Run a job on several numbers of nodes, each time for the few steps in which its speed is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note
from mgpu_slurm.registry import reach
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission import submit
from mgpu_slurm.submission.plan import Plan, Request

LOOK_PAUSE = 0.5
"""Seconds between two looks at a run."""


@dataclass
class SizeRun:
    """The run of one size."""

    nodes: int
    request: Request
    plan: Plan | None = None
    """That of the submission; None until it has a folder."""
    error: MgpuError | None = None
    """Why it could not be submitted, or waited for."""

    @property
    def folder(self) -> RunFolder | None:
        """The folder of a run that was submitted, or is just being submitted."""
        if self.plan is None or not self.plan.folder.path.exists():
            return None
        return self.plan.folder

    def submit(self, note: Note) -> None:
        """Submit the run, or record why that was refused."""
        try:
            submit.submit(self.request, note, self._created)
        except MgpuError as error:
            self.error = error
        else:
            assert self.folder is not None
            note(f"{counted(self.nodes, 'node')}: submitted run {self.folder.run}")

    def _created(self, made: Plan, _: RunFolder) -> None:
        # known before the run starts, so that Ctrl-C at any time finds it
        self.plan = made

    @property
    def is_queued(self) -> bool:
        """Whether it waits in a queue for resources of its own."""
        return self.plan is not None and self.plan.spec.is_queued

    def wait(self, note: Note) -> None:
        """Wait until the run has ended, or record why that cannot be known."""
        if self.folder is None:
            return
        try:
            watch = Watch(self.folder, note=note)
            while states.is_alive(watch.state().state):
                time.sleep(LOOK_PAUSE)
        except MgpuError as error:
            self.error = error


def sizes_from(text: str) -> list[int]:
    """Return the numbers of nodes in `1,2,4`, smallest first.

    Raises:
        UserError: it is no list of different numbers.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words) or len({*map(int, words)}) < len(words):
        raise UserError(f"--nodes {text}: expected different numbers of nodes, such as 1,2,4")
    return sorted(map(int, words))


def planned(request: Request, sizes: Sequence[int], scale: str | None, note: Note) -> list[SizeRun]:
    """Return the runs to start.

    Args:
        sizes: numbers of nodes, smallest first.
        scale: a config value that grows with the number of nodes.

    Raises:
        UserError: the value cannot grow.
    """
    requests = [replace(request, flags=request.flags | {"nodes": nodes}) for nodes in sizes]
    if scale is not None:
        smallest = _value(requests[0], scale, note)
        requests = [
            replace(each, values=_with_value(each.values, scale, smallest, nodes, sizes[0]))
            for each, nodes in zip(requests, sizes, strict=True)
        ]
    return [SizeRun(nodes, each) for nodes, each in zip(sizes, requests, strict=True)]


def _value(request: Request, key: str, note: Note) -> int:
    """Return the integer of that name in the job's config."""
    value = _found(request.values, key)
    if value is None:
        value = _found(submit.rehearse(request, note).whole_config, key)
    if value is None:
        raise UserError(f"--scale {key}: the config has no such value, or its default is unknown: add {key}=VALUE")
    if type(value) is not int:
        raise UserError(f"--scale {key}: {value!r} is not a whole number: name one, such as batch_size")
    return value


def _found(values: object, key: str) -> object:
    """Return a value by its dotted name; None if there is none."""
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return None
        values = values[name]
    return values


def _with_value(values: Config, key: str, smallest: int, nodes: int, fewest: int) -> Config:
    scaled, rest = divmod(smallest * nodes, fewest)
    if rest:
        raise UserError(f"--scale {key}: {smallest} x {nodes} / {fewest} is not a whole number: use another {key}")
    over: Config = {}
    configs.put(over, key, scaled, f"--scale {key}")
    return configs.merge(values, over)


def run_all(runs: Sequence[SizeRun], note: Note) -> None:
    """Start all runs and wait for their ends: together in a queue, and elsewhere one after the other."""
    for run in runs:
        run.submit(note)
        if not run.is_queued:
            run.wait(note)
    for run in runs:
        run.wait(note)


def cancel(runs: Sequence[SizeRun]) -> Iterator[str]:
    """Ask the runs that are alive to end, and yield their names."""
    for run in runs:
        # one that cannot be reached must not keep the others
        with suppress(MgpuError):
            if run.folder is not None and reach.cancel(run.folder):
                yield run.folder.run
