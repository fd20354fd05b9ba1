"""The state of runs, groups and sweeps: human-readable, and as facts for programs."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.reports import sweep_status
from mgpu_slurm.reports.live.status_choice import Choice
from mgpu_slurm.reports.live.status_table import group_of, overview, table
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.records import read_memory, read_state

Found = Sequence[tuple[RunFolder, RunState]]

FACTS = (
    "run",
    "kind",
    "state",
    "job_id",
    "attempts",
    "nodes",
    "ranks",
    "step",
    "progress",
    "total",
    "metrics",
    "curves",
    "submitted",
    "started",
    "ended",
    "reason",
)
"""The keys of each run in `status --json`, with `group` and `left_seconds`; programs rely on them."""


def facts(state: RunState) -> dict[str, Any]:
    """Return the machine-readable state; for a sweep also its trials, its best trial and its workers."""
    found = {name: getattr(state, name) for name in FACTS}
    found |= {"curves": state.curves or {}, "group": group_of(state.run)}
    left = state.seconds_left(datetime.now(timezone.utc))
    found |= {"left_seconds": None if left is None else round(left, 1)}
    if isinstance(state, sweep_state.SweepState):
        found |= {
            "trials": state.trials,
            "best": state.best and state.best.to_json(),
            "front": [trial.to_json() for trial in state.front],
            "workers": list(map(facts, state.workers)),
        }
    return found


def as_one(found: Found, asked: Sequence[RunFolder] = ()) -> list[RunState]:
    """Return the state of each run once, with a sweep's workers merged into one unless single ones were asked for."""
    single = [folder.group for folder in asked if folder.task is not None]
    return sweep_state.as_one(list(dict(found).items()), without=single)


def choice_among(found: Found, filters: Sequence[str], sort: str | None) -> Choice:
    """Return the choice of `--filter` and `--sort` among these runs and their groups."""
    return Choice(filters, sort, {each.run: each for folder, _ in found for each in (folder.group, folder)})


def lines(
    found: Found,
    asked: Sequence[RunFolder],
    room: os.terminal_size | None,
    filters: Sequence[str] = (),
    sort: str | None = None,
) -> list[str]:
    """Return the human-readable lines.

    Args:
        asked: the named runs; empty for an overview of all.
        room: the size of a terminal.
        filters: see `Choice`, as for `sort`.
    """
    choice = choice_among(found, filters, sort)
    if not asked:
        shown = as_one(found)
        if not shown:
            return [f"no runs yet: start one with `{program()} submit`"]
        choice.check(shown)
        return [overview(shown, room, choice) or _none_of(len(shown))]
    told: list[str] = []
    named = [folder for folder in dict.fromkeys(asked) if sweep_state.is_sweep(folder)]
    if named and choice.flags:
        raise UserError(f"{named[0].run} is a sweep:{choice.flags} is for runs; `{program()} report` sorts its trials")
    for folder in named:
        workers = [state for member, state in dict(found).items() if member.group == folder]
        told += [*sweep_status.lines(folder, workers, room.columns if room else None), ""]
    others = [state for folder, state in dict(found).items() if folder.group not in named]
    if others:
        choice.check(others)
        told += table(others, {folder.run for folder in asked}, room, choice).splitlines() or [_none_of(len(others))]
        below = [line for folder in asked if folder not in named for line in _model_lines(folder, len(asked) > 1)]
        indent = " " * len("strategy  ")
        told += (
            below
            if room is None
            else [part for line in below for part in textwrap.wrap(line, room.columns, subsequent_indent=indent)]
        )
    return told if others else told[:-1]


def _none_of(count: int) -> str:
    return f"none of {counted(count, 'run')} fulfils --filter"


def _model_lines(folder: RunFolder, is_named: bool) -> list[str]:
    """Return lines with the options for sharing the model, the speed of a run, and how many samples fit into memory, as
    far as it has them."""
    told = []
    with suppress(UserError):
        if (parallelism := read_spec(folder).parallelism).given:
            told.append(f"strategy  {parallelism.words}")
    if curves := read_state(folder).curves:
        told.append(f"speed     {_speed(curves)}")
    if (memory := read_memory(folder)) is not None:
        # the whole layout, of which most runs use little
        place = ", ".join(each for each in memory.of.split(", ") if not each.endswith(" 1"))
        told.append(f"memory    {counted(memory.samples, 'sample')} at once fit ({place})")
    return [f"{line}  ({folder.run})" for line in told] if is_named else told


def _speed(curves: Mapping[str, float]) -> str:
    """Return how fast steps were at the last report, and what they waited for."""
    parts = [f"{_step(curves['speed/step_seconds'])} a step"]
    if samples := curves.get("speed/samples_per_second"):
        parts.append(f"{_rate(samples)} samples/s")
    if tokens := curves.get("speed/tokens_per_second"):
        parts.append(f"{_rate(tokens)} tokens/s")
    if (wait := curves.get("speed/data_wait")) is not None:
        parts.append(f"waits for data {wait:.0%}")
    if (wait := curves.get("speed/communication_wait")) is not None:
        parts.append(f"for other ranks {wait:.0%}")
    if (utilization := curves.get("speed/mfu")) is not None:
        parts.append(f"MFU {utilization:.0%}")
    if power := curves.get("gpu/power_watts"):
        parts.append(f"GPUs busy {curves['gpu/utilization']:.0%} at {power:.0f} W")
    if reserved := curves.get("memory/peak_reserved_gib"):
        parts.append(f"peak {curves['memory/peak_allocated_gib']:.1f} GiB, {reserved:.1f} reserved")
    return "  ".join(parts)


def _step(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


def _rate(count: float) -> str:
    return f"{count:,.0f}" if count >= 1000 else f"{count:.4g}"
