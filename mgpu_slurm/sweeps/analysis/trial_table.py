"""All trials of a study as a table: for people, as JSON, or as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from optuna.study import Study
from optuna.trial import FrozenTrial

from mgpu_slurm.core.formatting import cut, duration, short_value
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study.snapshots import own_values_at

_LEAST_REASON = 20
"""Characters of a reason that are always shown."""
_BEGINNINGS = (b"number,state,value,", b'[\n  {\n    "number": ', b"[]\n")
"""Of tables as CSV and JSON; the last one has no trials."""


@dataclass(frozen=True)
class TrialRow:
    """One trial."""

    number: int
    state: str
    """Optuna's state, or PAUSED."""
    value: float | None
    """The value of a complete trial, or the last one reported; None without any, or if it is not finite. With several
    objectives, that of the first."""
    params: Values
    """The parameters by name, as passed to the job."""
    rungs: Mapping[str, float]
    """Values by the progress of the pruner's rungs."""
    seconds: float | None
    """How long workers have had it; None until it has ended."""
    worker: int | None
    """The worker that had it last."""
    reason: str
    """Why it failed or was pruned, or which constraint it violates."""
    infeasible: bool
    """Whether it violates a constraint."""
    values: Mapping[str, float]
    """With several objectives: all values of a complete trial, by metric."""


def rows(study: Study, sweep: Sweep, folder: RunFolder, top: int | None = None) -> list[TrialRow]:
    """Return the study's own trials that have begun, by number.

    Args:
        folder: the folder of the sweep.
        top: return so many of the complete trials that violate no constraint instead, best first.
    """
    own = [trial for trial in summary.own_trials(study) if trial.datetime_start is not None]
    own = own if top is None else summary.ranked(own, sweep)[:top]
    return [_row(trial, sweep, folder.of_trial(trial.number)) for trial in own]


def _row(trial: FrozenTrial, sweep: Sweep, folder: RunFolder) -> TrialRow:
    found = summary.described(trial, sweep)
    rungs = sweep.pruner.rungs
    values = own_values_at(rungs, trial)
    workers = list(claiming.claims(trial))
    return TrialRow(
        number=trial.number,
        state=found.state,
        value=found.value,
        params=found.params,
        rungs={str(rungs[place]): value for place, value in values.items() if math.isfinite(value)},
        seconds=found.seconds,
        worker=workers[0] if workers else _last_worker(folder),
        reason=found.reason,
        infeasible=found.infeasible,
        values=found.values or {},
    )


def _last_worker(folder: RunFolder) -> int | None:
    """Return the worker of the trial's last attempt, by the trial's own history."""
    started = [event.others["worker"] for event in records.events(folder) if event.event == "started"]
    return int(str(started[-1])) if started else None


def may_be_replaced(file: Path) -> bool:
    """Return whether a file does not exist, or holds a table of trials."""
    # a pipe would be waited for
    if not file.is_file():
        return True
    with file.open("rb") as opened:
        beginning = opened.read(max(map(len, _BEGINNINGS)))
    return not beginning or beginning.startswith(_BEGINNINGS)


def as_json(found: Sequence[TrialRow]) -> list[dict[str, object]]:
    return [asdict(row) for row in found]


def as_csv(found: Sequence[TrialRow]) -> str:
    """Return a table with a column for each parameter, `params.lr`, each rung, `rungs.9`, and each of several
    objectives, `values.loss`."""
    params = list(dict.fromkeys(name for row in found for name in row.params))
    metrics = list(dict.fromkeys(name for row in found for name in row.values))
    rungs = sorted({rung for row in found for rung in row.rungs}, key=int)
    plain = ["number", "state", "value", "seconds", "worker", "reason", "infeasible"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    named = [f"values.{name}" for name in metrics] + [f"params.{name}" for name in params]
    table.writerow([*plain, *named, *(f"rungs.{rung}" for rung in rungs)])
    for row in found:
        cells = [_cell(getattr(row, name)) for name in plain]
        cells += [row.values.get(name) for name in metrics]
        cells += [_cell(row.params.get(name)) for name in params]
        table.writerow([*cells, *(row.rungs.get(rung) for rung in rungs)])
    return text.getvalue()


def _cell(value: object) -> object:
    """Return a value of a parameter as a cell of CSV; lists and mappings as JSON."""
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else value


def lines(found: Sequence[TrialRow], sweep: Sweep, columns: int | None = None) -> list[str]:
    """Return the table for people.

    Args:
        columns: the width of a terminal, to which reasons are cut; parameters are all shown.
    """
    from tabulate import tabulate

    if not found:
        return ["no trial has begun yet"]
    params = list(dict.fromkeys(name for row in found for name in row.params))
    metric, *others = (each.metric for each in sweep.objectives)
    header = ["TRIAL", "STATE", metric, *others, "AT", *params, "TIME", "REASON"]
    table = [header, *(_cells(row, params, others) for row in found)]
    if not any(row[-1] for row in table[1:]):
        table = [row[:-1] for row in table]
    elif columns is not None:
        room = columns - sum(max(map(len, cells)) + 2 for cells in [*zip(*table, strict=True)][:-1])
        table = [[*cells, cut(reason, max(room, _LEAST_REASON))] for *cells, reason in table]
    return [line.rstrip() for line in tabulate(table, tablefmt="plain", disable_numparse=True).splitlines()]


def _cells(row: TrialRow, params: Sequence[str], others: Sequence[str]) -> list[str]:
    """
    Args:
        others: the objectives after the first.
    """
    values = [row.params.get(name) for name in params]
    return [
        str(row.number),
        row.state,
        "" if row.value is None else f"{row.value:.6g}",
        *(f"{row.values[name]:.6g}" if name in row.values else "" for name in others),
        max(row.rungs, key=int, default=""),
        *("" if value is None else short_value(value) for value in values),
        "" if row.seconds is None else duration(row.seconds),
        row.reason,
    ]
