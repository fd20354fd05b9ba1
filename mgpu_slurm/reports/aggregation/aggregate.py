"""Aggregate the curves of runs that differ only in their seed into one curve with its spread."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup
from mgpu_slurm.reports.aggregation import history, run_sources
from mgpu_slurm.reports.aggregation.history import History, On
from mgpu_slurm.reports.aggregation.statistics import Interval, Summary, is_minimized, summarize
from mgpu_slurm.run_folder import states

_LONGEST_LABEL = 80
_NAMED = 5
"""Maximum number of runs that a note names."""


@dataclass
class Group:
    """Runs that are aggregated into one curve."""

    name: str
    """Its name in files and as a run of TensorBoard."""
    runs: list[History]
    config: dict[str, Any]
    """The values that its runs have in common, without seeds."""
    metrics: dict[str, Summary] = field(default_factory=dict)


@dataclass
class Aggregate:
    """Statistics of all metrics of some groups."""

    on: On
    groups: list[Group]
    notes: list[str]
    """Notes on missing or shorter curves, and on what could not be read."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the machine-readable facts, without the curves."""
        groups = [
            {
                "name": group.name,
                "config": group.config,
                "runs": [{"run": run.name, "state": run.state or None} for run in group.runs],
                "metrics": {name: _facts_of(summary) for name, summary in group.metrics.items()},
            }
            for group in self.groups
        ]
        return {"on": self.on, "groups": groups, "notes": self.notes}


def _facts_of(summary: Summary) -> dict[str, Any]:
    """Return the statistics at the last step that all runs have, and those of their ends and best values."""
    at = summary.common
    values = {name: float(column[at]) for name, column in summary.values.items()}
    head = {"steps": len(summary.steps), "step": int(summary.steps[at]), "count": int(summary.count[at])}
    direction = "minimize" if summary.minimized else "maximize"
    return {**head, **values, "final": summary.final, "best": {"direction": direction, **summary.best}}


def aggregate(
    words: Sequence[str],
    on: On = "step",
    by: Sequence[str] = (),
    note: Note = quiet,
    together: bool = False,
    interval: Interval | None = None,
) -> Aggregate:
    """Return statistics of runs, grouped by their config without seeds.

    Args:
        words: runs, groups, sweeps, or folders with event files below; none for the newest group or sweep.
        on: whether runs are aligned by step or by progress.
        by: names of config values to group by instead.
        note: called if a cluster does not answer.
        together: whether foreign runs without a config that were found in one place are repetitions.
        interval: how the intervals of means are computed; None chooses by the number of runs.

    Raises:
        UserError: a word names nothing, or there is nothing to aggregate.
    """
    found = history.read(run_sources.sources(words or [newest_group()]), on, note)
    if not any(history.curves for history in found):
        raise UserError(f"{_none_to_reckon(found, on)}: see `{program()} status`, or name other runs")
    groups = grouped(found, by, together)
    notes = _notes_of_runs(found) + _note_of_lonely_runs(groups, by)
    notes += [] if together or by else _note_of_unknown_runs(found)
    for group in groups:
        curves = [run.curves for run in group.runs]
        for metric in dict.fromkeys(name for each in curves for name in each):
            having = [each[metric] for each in curves if metric in each]
            group.metrics[metric] = summarize(having, is_minimized(metric), interval)
        notes += _notes(group, on, several=len(groups) > 1)
    return Aggregate(on, [group for group in groups if group.metrics], notes)


def newest_group() -> str:
    """Return the name of the group that was submitted last.

    Raises:
        UserError: there is none.
    """
    for folder, _ in lookup.all_states():
        if folder.task is not None:
            return str(folder.group.path)
    raise UserError(
        "no group found: name runs (`aggregate RUN RUN`) or a folder with event files, or submit with --seeds"
    )


def _none_to_reckon(found: list[History], on: On) -> str:
    notes = [note for run in found for note in run.notes]
    why = f" ({notes[0]})" if notes else ""
    names = ", ".join(run.name for run in found[:_NAMED])
    return f"no {'metrics' if on == 'step' else f'metrics by {on}'} yet of {names or 'any run'}{why}"


# -- which runs belong together


def is_seed(key: str) -> bool:
    """Return whether a config key is that of a seed: `seed`, `data.seed`, `data_seed`, `--random-seed`."""
    return re.fullmatch(r"(.*[._-])?seed", key) is not None


def grouped(found: Sequence[History], by: Sequence[str] = (), together: bool = False) -> list[Group]:
    """Group runs by their target and config without seeds, or only by some values of their config.

    Args:
        together: see `aggregate`.

    Raises:
        UserError: no run has such a value.
    """
    known = list(dict.fromkeys(key for history in found for key in history.config))
    for key in by:
        if key not in known:
            raise UserError(f"--by {key}: no run has it in its config{nearest(key, known)}")
    identity = _values_of(by) if by else _whole_identity(together)
    alike: dict[str, list[History]] = {}
    for one in found:
        alike.setdefault(identity(one), []).append(one)
    groups = [Group("", runs, _in_common(runs)) for runs in alike.values()]
    told = by or _differing([group.runs[0] for group in groups])
    if by:
        groups.sort(key=lambda group: [_rank(group.runs[0].config.get(key)) for key in by])
    _name(groups, told)
    return groups


def _values_of(keys: Sequence[str]) -> Callable[[History], str]:
    return lambda history: json.dumps([_comparable(history.config.get(key)) for key in keys], default=str)


def _comparable(value: Any) -> Any:
    """Return a value such that 8 and 8.0 are equal: TensorBoard keeps all numbers as the latter."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key: numbers by size, then texts, then None."""
    if isinstance(value, (int, float)):
        return (0, value, "")
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def _whole_identity(together: bool) -> Callable[[History], str]:
    def identity(history: History) -> str:
        config = {key: _comparable(value) for key, value in history.config.items() if not is_seed(key)}
        place = [history.place] if together else [history.place, history.name]
        origin = place if _is_unknown(history) else [history.target]
        return json.dumps([origin, config], sort_keys=True, default=str)

    return identity


def _is_unknown(history: History) -> bool:
    """Return whether nothing says what a run has in common with others, or not."""
    return not history.target and not history.config


def _in_common(runs: list[History]) -> dict[str, Any]:
    first = runs[0].config
    return {
        key: value
        for key, value in first.items()
        if not is_seed(key) and all(key in run.config and run.config[key] == value for run in runs)
    }


def _differing(firsts: list[History]) -> list[str]:
    """Return the keys of the config values in which groups differ."""
    keys = dict.fromkeys(key for history in firsts for key in history.config if not is_seed(key))
    return [key for key in keys if len({json.dumps(h.config.get(key), default=str) for h in firsts}) > 1]


def _name(groups: list[Group], told: Sequence[str]) -> None:
    """Name groups by the values that distinguish them; a single group by the place of its runs."""
    several_targets = len({group.runs[0].target for group in groups}) > 1
    of_place = Counter(group.runs[0].place for group in groups)
    used: set[str] = set()
    for group in groups:
        first = group.runs[0]
        words = [f"{key}={_shown(first.config.get(key))}" for key in told]
        if _is_unknown(first) and of_place[first.place] > 1:
            words = [first.name]
        elif not words or several_targets:
            places = {_stem(run.place) for run in group.runs}
            words.insert(0, places.pop() if len(places) == 1 else first.target or "all")
        label = re.sub(r"[^\w.=,+-]+", "-", ",".join(words)).strip("-.")[:_LONGEST_LABEL] or "all"
        group.name = next(name for name in _numbered(label) if name not in used)
        used.add(group.name)


def _stem(place: str) -> str:
    return Path(place).absolute().name


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else str(value)


def _numbered(label: str) -> Iterator[str]:
    yield label
    number = 2
    while True:
        yield f"{label}-{number}"
        number += 1


# -- notes on missing data


def _notes_of_runs(found: Sequence[History]) -> list[str]:
    """Return notes on what was not read of runs; one line for all runs with the same note."""
    by_text: dict[str, list[History]] = {}
    for run in found:
        for text in run.notes:
            by_text.setdefault(text, []).append(run)
    return [f"{_names(runs)}: {text}" for text, runs in by_text.items()]


def _note_of_lonely_runs(groups: Sequence[Group], by: Sequence[str]) -> list[str]:
    """Return a note if no group has several runs, for example in a sweep whose trials all differ."""
    runs = [group.runs[0] for group in groups]
    keys = _differing(runs)
    if by or not keys or any(len(group.runs) > 1 for group in groups) or len({run.target for run in runs}) > 1:
        return []
    shared = [key for key in keys if len({json.dumps(run.config.get(key), default=str) for run in runs}) < len(runs)]
    advice = f"; `--by {shared[0]}` averages runs that share a value" if shared else ""
    return [f"no two of {len(groups)} runs have the same config: a curve for each{advice}"]


def _note_of_unknown_runs(found: Sequence[History]) -> list[str]:
    """Return a note on foreign runs of one place without a config, which are shown one by one."""
    places: dict[str, list[History]] = {}
    for run in filter(_is_unknown, found):
        places.setdefault(run.place, []).append(run)
    return [
        f"{_names(runs)}: nothing says that these are repetitions: `--together` averages them"
        for runs in places.values()
        if len(runs) > 1
    ]


def _notes(group: Group, on: On, several: bool) -> list[str]:
    """Return notes on what the curves do not show by themselves."""
    prefix = f"{group.name}: " if several else ""
    of_all = f"of {counted(len(group.runs), 'run')}"
    found = []
    ended = ("", history.PRUNED)
    alive = [run for run in group.runs if run.state not in ended and states.is_alive(run.state) and run.curves]
    if alive:
        found.append(f"{len(alive)} {of_all} not ended yet: {_names(alive)}")
    silent = [run for run in group.runs if not run.curves]
    if silent:
        found.append(f"{len(silent)} {of_all} without metrics: {_names(silent)}")
    by_text: dict[str, list[str]] = {}
    for metric, summary in group.metrics.items():
        for text in _notes_of_metric(metric, summary, group, on):
            by_text.setdefault(text, []).append(metric)
    return [prefix + text for text in found] + [
        f"{prefix}{', '.join(metrics)}: {text}" for text, metrics in by_text.items()
    ]


def _notes_of_metric(metric: str, summary: Summary, group: Group, on: On) -> Iterator[str]:
    runs = [run for run in group.runs if run.curves]
    having = [run for run in runs if metric in run.curves]
    without = [run for run in runs if metric not in run.curves]
    of_all = f"of {counted(len(runs), 'run')}"
    if without:
        yield f"{len(without)} {of_all} without it: {_names(without)}"
    last = int(summary.steps[-1])
    ends = {run.name: int(run.curves[metric].steps[-1]) for run in having}
    shorter = [run for run in having if ends[run.name] < last]
    if shorter:
        yield f"{len(shorter)} {of_all} end before {on} {last}: {_names(shorter, lambda run: f' at {ends[run.name]}')}"
    common = summary.steps <= min(ends.values())
    holes = int((summary.count[common] < len(having)).sum())
    if holes:
        yield f"{holes} of {counted(len(summary.steps), on)} missing in some longer runs: see `count`"


def _names(runs: Iterable[History], more: Callable[[History], str] = lambda run: "") -> str:
    # whether a trial without an outcome runs, waits or is paused is not known here
    known = ("", states.UNKNOWN)
    told = [run.name + (f" ({run.state})" if run.state not in known else "") + more(run) for run in runs]
    rest = len(told) - _NAMED
    return ", ".join(told[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
