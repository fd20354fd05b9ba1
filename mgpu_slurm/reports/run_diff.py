"""What differs between two runs: config, request, code, environment and result."""

from __future__ import annotations

import difflib
import json
import os
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import cut_middle, short_value
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.flat_config import flattened
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import SweepSummary

Values = dict[str, tuple[Any, Any]]
"""The values that differ by name, each in both runs; None where a run has none."""

_OF_ONE_RUN = ("run", "config", "config_base", "submitted", "python", "project", "tasks", "after", "kind", "at_once")
"""Fields of a request that say nothing of what the run does, or are compared by themselves."""
_OPTIONS = {
    "lead": "--signal @SECONDS",
    "sinks": "--sink",
    "stuck_after": "--stuck-after MINUTES",
    "container.image": "--container",
    "container.mounts": "--mount",
} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("executor", "signal", "max_requeues", "retries", "profile", "stage", "notify", "cluster")
}
_TARGET = "target.function"
_LEAST_VALUE = 12
"""Characters of a value that are always shown."""
_ENVIRONMENT = ("python", "packages", "platform", "commit")


@dataclass(frozen=True)
class Changes:
    """The lines by which a file differs."""

    added: int
    removed: int


@dataclass(frozen=True)
class RunDiff:
    """What differs between two runs."""

    runs: tuple[str, str]
    config: Values
    request: Values
    code: dict[str, Changes]
    environment: Values
    result: Values

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(first: RunFolder, second: RunFolder) -> RunDiff:
    """Return what differs between two runs.

    Raises:
        UserError: the request, result or environment of a run cannot be read.
    """
    summaries = _summary(first), _summary(second)
    # the workers of a sweep are requeued as often as it takes
    left_out = (*_OF_ONE_RUN, *(["max_requeues"] if summaries.count(None) == 1 else []))
    request = _differing(_request(first, left_out), _request(second, left_out))
    if _TARGET in request and len({*map(_as_module, request[_TARGET])}) == 1:
        # written in two ways
        del request[_TARGET]
    return RunDiff(
        runs=(first.run, second.run),
        config=_differing(*map(_config, (first, second), summaries)),
        request=request,
        code={name: _changes(*texts) for name, texts in _changed_files(first, second).items()},
        environment=_differing(_environment(first), _environment(second)),
        result=_differing(*map(_result, (first, second), summaries)),
    )


def lines(found: RunDiff, columns: int | None = None) -> list[str]:
    """Return a table of the differences.

    Args:
        columns: the width of a terminal, to which values are cut.
    """
    from tabulate import tabulate

    rows = [["", "", *found.runs]]
    for title in ("config", "request", "code", "environment", "result"):
        part = getattr(found, title)
        for number, (field, values) in enumerate(part.items()):
            name = _as_option(field) if title == "request" else field
            shown = [_counts(values)] if isinstance(values, Changes) else [_shown(value) for value in values]
            rows.append(["" if number else title, name, *shown])
        if not part:
            rows.append([title, "(same)", "", ""])
    if columns is not None:
        names = sum(max(len(row[place]) for row in rows) + 2 for place in (0, 1))
        # two values, and two spaces between them
        room = max(_LEAST_VALUE, (columns - names - 2) // 2)
        rows = [[*row[:2], *_cut_apart(row[2:], room)] for row in rows]
    return [line.rstrip() for line in tabulate(rows, tablefmt="plain", disable_numparse=True).splitlines()]


def _cut_apart(values: Sequence[str], room: int) -> Sequence[str]:
    """Return values of at most so many characters, but whole if they would look the same."""
    # names of runs end with a time, and names of data sets with what tells them apart
    shorter = [cut_middle(value, room, end=room // 2) for value in values]
    return shorter if len({*shorter}) == len({*values}) else values


def patch(first: RunFolder, second: RunFolder) -> Iterator[str]:
    """Yield the lines of a unified diff of the code."""
    for name, texts in _changed_files(first, second).items():
        if None in [*map(_lines, texts)]:
            yield f"Binary files {first.run}/{name} and {second.run}/{name} differ"
            continue
        before, after = [_lines(text) or [] for text in texts]
        places = f"{first.run}/{name}", f"{second.run}/{name}"
        told = list(difflib.unified_diff(before, after, *places, lineterm=""))
        yield from told or [f"Files {places[0]} and {places[1]} differ in their line ends, or one of them is empty"]


def _summary(folder: RunFolder) -> SweepSummary | None:
    """Return the summary of a sweep; None for anything else."""
    return sweep_state.summary_of(folder) if sweep_state.is_sweep(folder) else None


def _config(folder: RunFolder, sweep: SweepSummary | None) -> dict[str, Any]:
    """Return the config of a run; of a sweep that of its best trial, as in `_result`."""
    if sweep is not None and sweep.best is not None:
        folder = folder.of_trial(sweep.best.number)
    # it is in the request only as far as it was known at the submission
    whole = folder.config if folder.config.exists() else None
    return _flat(configs.read_yaml(whole) if whole else read_spec(folder).config)


def _request(folder: RunFolder, left_out: Collection[str]) -> dict[str, Any]:
    plain: dict[str, Any] = configs.to_plain(read_spec(folder))
    return _flat({name: value for name, value in plain.items() if name not in left_out})


def _as_option(field: str) -> str:
    """Return the option that sets a field of a request; the field's name if none does."""
    group, _, name = field.partition(".")
    if name.startswith("sbatch."):
        return f"--sbatch {name.removeprefix('sbatch.')}"
    return f"--{name.replace('_', '-')}" if group in ("resources", "parallelism") else _OPTIONS.get(field, field)


def _as_module(target: str | None) -> str | None:
    """Return a target as `module:function`, of `file.py:function` too."""
    module, _, function = (target or "").partition(":")
    if module.endswith(".py") and not os.path.isabs(module):
        module = os.path.normpath(module).removesuffix(".py").replace("/", ".")
    return f"{module}:{function}" if target else None


def _environment(folder: RunFolder) -> dict[str, Any]:
    found = _json(folder.environment) or {}
    flat = _flat({name: found.get(name) for name in _ENVIRONMENT})
    return {name.removeprefix("packages."): value for name, value in flat.items()}


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError:
        raise UserError(f"{str(path)!r} is damaged: delete it to compare without it") from None


def _result(folder: RunFolder, sweep: SweepSummary | None = None) -> dict[str, Any]:
    """Return the result of a run; of a group its means, and of a sweep that of its best trial."""
    if sweep is not None:
        best = sweep.best
        return {} if best is None else {"best trial": best.number, **(best.values or {sweep.metric: best.value})}
    state = records.read_state(folder)
    if state.tasks is None:
        record = _json(folder.result)
        return dict(record["result"] if record else state.metrics)
    values: dict[str, list[float]] = {}
    for member in lookup.members(folder):
        for name, value in _result(member).items():
            values.setdefault(name, []).append(value)
    return {"runs": state.tasks} | {name: statistics.fmean(column) for name, column in values.items()}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested values by names such as `model.width`; an empty dictionary is no value."""
    return {name: value for name, value in flattened(values).items() if value != {}}


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> Values:
    pairs = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    # NaN is the same as NaN here
    return {name: pair for name, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1])}


def _changed_files(first: RunFolder, second: RunFolder) -> dict[str, tuple[bytes | None, bytes | None]]:
    """Return the contents of each file of the code that differs; None for one that does not exist."""
    before, after = _files(first.code), _files(second.code)
    found = {}
    for name in sorted({*before, *after}):
        contents = tuple(each[name].read_bytes() if name in each else None for each in (before, after))
        if contents[0] != contents[1]:
            found[name] = (contents[0], contents[1])
    return found


def _files(code: Path) -> dict[str, Path]:
    paths = code.rglob("*") if code.is_dir() else []
    return {str(path.relative_to(code)): path for path in paths if path.is_file() and "__pycache__" not in path.parts}


def _changes(before: bytes | None, after: bytes | None) -> Changes:
    old, new = _lines(before) or [], _lines(after) or []
    told = [line[:1] for line in difflib.unified_diff(old, new, n=0, lineterm="")][2:]
    return Changes(told.count("+"), told.count("-"))


def _lines(content: bytes | None) -> list[str] | None:
    """Return the lines of a file; none if it does not exist, None if it is not text."""
    try:
        return (content or b"").decode().splitlines()
    except UnicodeDecodeError:
        return None


def _counts(changes: Changes) -> str:
    # a file that is not text has no lines
    is_counted = changes.added or changes.removed
    return f"+{changes.added} -{changes.removed} lines" if is_counted else "differs"


def _shown(value: object) -> str:
    return "-" if value is None else short_value(value)
