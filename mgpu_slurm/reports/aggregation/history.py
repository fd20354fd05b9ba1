"""Read the curves of runs: from `metrics.jsonl`, and for foreign runs from their event files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.metrics.event_reader import EventFile, read_files
from mgpu_slurm.registry import current_state
from mgpu_slurm.reports.aggregation.merging import Curve, EventFiles, newest, repeated
from mgpu_slurm.reports.aggregation.run_sources import EVENT_FILES, Source, runs_of
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.flat_config import flattened, identity
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import TRIALS, RunFolder
from mgpu_slurm.sweeps import hparams

On = Literal["step", "progress"]

PRUNED = "PRUNED"
"""The state of a pruned trial."""
STATES_OF_TRIALS = {"COMPLETE": states.COMPLETED, PRUNED: PRUNED, "FAIL": states.FAILED}


@dataclass
class History:
    """All curves of one run."""

    name: str
    place: str
    """The place in which it was found: its group, or the folder that was named."""
    state: str = ""
    """The state as in `status`; empty for a foreign run."""
    target: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """Config values by dotted name."""
    curves: dict[str, Curve] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Notes on what was not read, and why."""


def read(found: Sequence[Source], on: On, note: Note = quiet) -> list[History]:
    """Return the history of each run.

    Args:
        on: the numbering of the points; a run without such numbers gets a note.
        note: called if a cluster does not answer.
    """
    found = runs_of(found)
    # of all runs together, so that files are read in parallel
    without = [source for source in found if not _has_metrics(source)]
    events = _event_files([folder for source in without for folder in (source.curves, *source.parts)])
    states_by_run = _states([source.own for source in found if source.own is not None], note)
    specs: dict[RunFolder, Spec] = {}
    histories = []
    for source in found:
        if source.own is None:
            histories.append(_foreign(source, events, on))
            continue
        if source.own.group not in specs:
            # the YAML of a large group is parsed once
            specs[source.own.group] = read_spec(source.own.group)
        history = _own(source, source.own, specs[source.own.group], events.get(source.curves), on)
        history.state = states_by_run[source.own]
        histories.append(history)
    return histories


def _has_metrics(source: Source) -> bool:
    return source.own is not None and source.own.metrics.exists()


def _event_files(folders: list[Path]) -> dict[Path, list[EventFile]]:
    """Return the event files of each folder."""
    paths = {folder: [path for path in folder.glob(EVENT_FILES) if path.is_file()] for folder in folders}
    files = iter(read_files([path for found in paths.values() for path in found]))
    return {folder: list(itertools.islice(files, len(found))) for folder, found in paths.items()}


def _states(folders: list[RunFolder], note: Note) -> dict[RunFolder, str]:
    trials = {folder: _state_of_trial(folder) for folder in folders if folder.is_trial}
    # whole groups, so that their history is read once
    groups = dict.fromkeys(folder.group for folder in folders if folder not in trials)
    if not groups:
        return trials
    return trials | {folder: state.state for folder, state in current_state.current(groups, note)}


def _state_of_trial(folder: RunFolder) -> str:
    """Return the state in a trial's outcome; one without an outcome is running, or continues later."""
    for outcome in (folder.result, folder.failure):
        told = read_json(outcome)
        if told is not None:
            return STATES_OF_TRIALS.get(told.get("state"), states.UNKNOWN)
    if folder.path.parent.name == TRIALS:
        return states.UNKNOWN
    # the run of a trial with one of its seeds, which ended with the trial
    return _state_of_trial(RunFolder(folder.path.parent.parent))


# -- own runs


def _own(source: Source, folder: RunFolder, spec: Spec, files: list[EventFile] | None, on: On) -> History:
    target, config = identity_of(folder, spec if folder.task is None else spec.of_task(folder.task))
    history = History(source.name, source.place, target=target, config=config)
    if files is None:
        _read_metrics(folder.metrics, on, history)
    else:
        _read_events(files, on, history)
    return history


def identity_of(folder: RunFolder, spec: Spec) -> tuple[str, dict[str, Any]]:
    """Return the target of a run, and its config values by dotted name.

    Args:
        spec: of a trial, that of its sweep.
    """
    target, config = identity(spec)
    if folder.is_trial:
        config |= config_of_trial(folder)
    elif spec.config_base is not None and folder.config.exists():
        config |= flattened(configs.read_yaml(folder.config))
    return target, config


def config_of_trial(folder: RunFolder) -> dict[str, Any]:
    """Return the whole config of a trial; for one without a config, such as a command, its parameters."""
    if folder.config.exists():
        return flattened(configs.read_yaml(folder.config))
    return hparams.parameters_of(folder)


def _read_metrics(path: Path, on: On, history: History) -> None:
    writers: dict[str, dict[int, list[tuple[int, float]]]] = {}
    damaged = 0
    # an incomplete last line is being written, or its writer has died
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
            attempt, step = int(record.get("attempt", 1)), int(record[on])
            values = {str(name): float(value) for name, value in record["metrics"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            damaged += 1
            continue
        for name, value in values.items():
            writers.setdefault(name, {}).setdefault(attempt, []).append((step, value))
    most = 0
    for name, by_attempt in writers.items():
        points = [zip(*by_attempt[attempt], strict=True) for attempt in sorted(by_attempt)]
        arrays = [(np.asarray(steps, np.int64), np.asarray(values, np.float64)) for steps, values in points]
        history.curves[name] = newest(arrays)
        most = max(most, sum(repeated(steps) for steps, _ in arrays))
    if most:
        fix = ", --on progress keeps them apart" if on == "step" else ""
        history.notes.append(f"{counted(most, 'report')} superseded by a later one at the same {on}{fix}")
    if damaged:
        history.notes.append(f"{counted(damaged, 'damaged line')} of {path.name} skipped")


# -- foreign runs


def _foreign(source: Source, events: Mapping[Path, list[EventFile]], on: On) -> History:
    history = History(source.name, source.place)
    _read_events(events[source.curves], on, history)
    for part in source.parts:
        # the folder of `add_hparams` is named by the time, and its metrics say that they are of it
        has_config = any(file.config for file in events[part])
        _read_events(events[part], on, history, prefix="" if has_config else f"{part.relative_to(source.path)}/")
    history.config = flattened(_lightning_config(source.path) or history.config)
    return history


def _lightning_config(folder: Path) -> dict[str, Any]:
    """Return the config that Lightning's loggers write next to their event files; empty if it is not plain values."""
    path = folder / "hparams.yaml"
    if not path.is_file():
        return {}
    try:
        return configs.read_yaml(path)
    except UserError:
        return {}


def _read_events(files: list[EventFile], on: On, history: History, prefix: str = "") -> None:
    """
    Args:
        prefix: of the names of metrics.
    """
    if files and on != "step":
        note = f"its event files have no {on}"
        history.notes += [note] if note not in history.notes else []
        return
    for file in files:
        history.config |= file.config
        if file.damaged:
            history.notes.append(f"{counted(file.damaged, 'damaged record')} of {file.path.name} skipped")
    merged = EventFiles(files)
    history.curves |= {f"{prefix}{tag}": curve for tag, curve in merged.curves().items()}
    history.notes += merged.notes()
    if merged.repeated:
        points = counted(merged.repeated, "point")
        history.notes.append(f"{points} superseded by a later one of its writer at the same step")
