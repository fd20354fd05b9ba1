"""A sweep in the HParams tab of TensorBoard: one experiment, and a session for each trial.

The plugin uses only one record of an experiment, the first that it finds, and the first start and end of each session.
So the study has a single experiment with the columns of all trials, in a file that is replaced as a whole. A trial has
a file for its start, and another for its end once that is final.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.files import locked, read_jsonl, write_whole
from mgpu_slurm.metrics import event_writer
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.search.parameters import Choice, Float, Parameter, Values
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

End = Literal["done", "pruned", "failed"]

Experiment: TypeAlias = Any
"""The plugin's message of that name: columns for parameters and metrics. The plugin's messages are untyped."""
Column: TypeAlias = Any
"""The plugin's `HParamInfo`: one parameter."""

PRUNED = "trial/pruned"
"""Metric of ended trials: 1 if the trial was pruned, else 0, or missing without a pruner. The plugin's session status
has no value for pruned."""

FRONT = "trial/front"
"""Metric of complete trials with several objectives: 1 on the Pareto front, 0 if a better trial has taken its place."""

_EXPERIMENT = f"{event_writer.PREFIX}experiment"
_START, _END = "session-start", "session-end"
_TOO_MANY = 10
"""Number of values from which the tab does not list a choice's values: it asks for a pattern, even for numbers."""
_LARGEST_WHOLE = 2**53
"""Largest integer up to which the plugin's numbers, which are doubles, are exact."""


@contextmanager
def may_fail() -> Iterator[None]:
    """Turn errors into a warning: a trial must not fail because of TensorBoard."""
    try:
        yield
    except Exception as error:
        # including errors in reading damaged older files
        log_lines.warn(f"TensorBoard's parameters cannot be written: {error}")


def write_experiment(study: RunFolder, sweep: Sweep) -> None:
    """Write the study's columns before its first trial; those of a space function are known only from trials."""
    study.tensorboard.mkdir(exist_ok=True)
    _write_experiment(study, _first_experiment(sweep))


def write_start(trial: RunFolder, sweep: Sweep, values: Values, chosen: Mapping[str, BaseDistribution]) -> None:
    """Write a trial's parameters; its session is running until an end is written.

    A trial that is begun again continues the same session, and its end is removed.

    Args:
        values: the values passed to the job, without inactive parameters.
        chosen: the distributions that the values were chosen from, by name.
    """
    trial.tensorboard.mkdir(parents=True, exist_ok=True)
    _remove(trial, _END)
    if _files(trial, _START):
        return
    if isinstance(sweep.space, Space):
        parameters: Sequence[Parameter] = [each for each in sweep.space.parameters if not _is_constant(each)]
        columns = {each.name: _column(each) for each in parameters}
    else:
        parameters = [_seen(name, value, chosen.get(name)) for name, value in values.items()]
        known = _widened(trial.group, sweep, _experiment([_column(each) for each in parameters], []))
        columns = {column.name: column for column in known.hparam_infos}
    _write_session(trial, _START, [_start(parameters, columns, values)])


def write_end(trial: RunFolder, sweep: Sweep, end: End, result: Mapping[str, float] | None = None) -> None:
    """Write how a trial ended for good; a trial that is resumed later has not ended.

    Args:
        result: the result by metric. If it differs from the last report, it becomes the last point of the curve, which
            is what the tab shows.
    """
    trial.tensorboard.mkdir(parents=True, exist_ok=True)
    result = result or {}
    reported, step = reported_by(trial)
    scalars = {name: value for name, value in result.items() if reported.get(name) != value}
    # a trial with a NaN or infinite value is pruned even without a pruner; a failed trial is marked by its status
    if end == "pruned" or (end == "done" and sweep.pruner.name != "none"):
        scalars[PRUNED] = float(end == "pruned")
    _widened(trial.group, sweep, _experiment([], [*reported, *scalars]))
    _remove(trial, _END)
    _write_session(trial, _END, [_end(end), *(_scalar(name, value) for name, value in scalars.items())], step)


def write_metric(trial: RunFolder, name: str, value: float) -> None:
    """Write a metric of a trial that has ended, which replaces an earlier value."""
    trial.tensorboard.mkdir(parents=True, exist_ok=True)
    _, step = reported_by(trial)
    _write_session(trial, name.replace("/", "-"), [_scalar(name, value)], step)


def reported_by(trial: RunFolder, until: float = math.inf) -> tuple[dict[str, float], int]:
    """Return the last value of each metric that a trial has reported up to a progress, and the step at which the last
    report is shown."""
    values: dict[str, float] = {}
    step = 0
    for record in read_jsonl(trial.metrics):
        if record["progress"] <= until:
            values |= record["metrics"]
            step = record.get("step", step) or record["progress"]
    return values, step


def parameters_of(trial: RunFolder) -> Values:
    """Return the parameters recorded in a trial's session; empty if it has not begun."""
    from google.protobuf.json_format import MessageToDict
    from tensorboard.plugins.hparams import metadata

    starts = [content for path in _files(trial, _START) for content in _contents(path)]
    found = [metadata.parse_session_start_info_plugin_data(content).hparams for content in starts]
    return {name: MessageToDict(value) for hparams in found for name, value in hparams.items()}


# -- a parameter as a column


def _is_constant(parameter: Parameter) -> bool:
    first, *others = parameter.ends()
    return all(end == first for end in others)


def _seen(name: str, value: Any, distribution: BaseDistribution | None) -> Parameter:
    """Return a parameter of a space function, as far as it is known from one trial."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution) and value in distribution.choices:
        return Choice(name, {}, tuple(distribution.choices))
    if not _is_number(value):
        return Choice(name, {}, (value,))
    low = high = value
    # the function may have returned another value than the chosen one
    ranges = (FloatDistribution, IntDistribution)
    if isinstance(distribution, ranges) and distribution.low <= value <= distribution.high:
        low, high = distribution.low, distribution.high
    return Float(name, {}, low, high)


def _column(parameter: Parameter) -> Column:
    """Return the column of a parameter; mixed types, and types unknown to the plugin, become strings."""
    from tensorboard.plugins.hparams import api_pb2 as api

    # the tab first shows five columns marked as differing; parallel coordinates omit a trial that lacks one of them,
    # so only parameters that are always present are marked
    column = api.HParamInfo(name=parameter.name, differs=not parameter.when)
    values = parameter.ends()
    if all(isinstance(value, bool) for value in values):
        column.type = api.DATA_TYPE_BOOL
        column.domain_discrete.extend(values)
    elif not all(_is_number(value) for value in values):
        column.type = api.DATA_TYPE_STRING
        column.domain_discrete.extend([_text(value, values) for value in values])
    elif isinstance(parameter, Choice) and len(values) < _TOO_MANY:
        column.type = api.DATA_TYPE_FLOAT64
        column.domain_discrete.extend(values)
    else:
        column.type = api.DATA_TYPE_FLOAT64
        column.domain_interval.min_value, column.domain_interval.max_value = min(values), max(values)
    return column


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= _LARGEST_WHOLE if isinstance(value, int) else math.isfinite(value)


def _text(value: Any, values: Sequence[Any]) -> str:
    """Return a value as text; if not all values are texts, the text "null" differs from null."""
    is_plain = isinstance(value, str) and (all(isinstance(other, str) for other in values) or not _is_json(value))
    return str(value) if is_plain else json.dumps(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _start(parameters: Sequence[Parameter], columns: Mapping[str, Column], values: Values) -> Any:
    from tensorboard.plugins.hparams import api_pb2 as api
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    info = SessionStartInfo(start_time_secs=time.time())
    for parameter in parameters:
        if parameter.name not in values:
            continue
        name, value = parameter.name, values[parameter.name]
        if columns[name].type == api.DATA_TYPE_BOOL:
            info.hparams[name].bool_value = value
        elif columns[name].type == api.DATA_TYPE_FLOAT64:
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = _text(value, parameter.ends())
    return _of_plugin(HParamsPluginData(session_start_info=info))


def _end(end: End) -> Any:
    from tensorboard.plugins.hparams import api_pb2 as api
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = api.STATUS_FAILURE if end == "failed" else api.STATUS_SUCCESS
    return _of_plugin(HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=time.time())))


# -- the experiment


def experiment_file(study: RunFolder) -> Path:
    """Return the path, which is always the same: of two files, TensorBoard would use the older one."""
    return study.tensorboard / _EXPERIMENT


def read_experiment(study: RunFolder) -> Experiment | None:
    """Return the study's columns; None if it has none yet."""
    from tensorboard.plugins.hparams import metadata

    try:
        (content,) = _contents(experiment_file(study))
    except FileNotFoundError:
        return None
    return metadata.parse_experiment_plugin_data(content)


def merged(experiments: Iterable[Experiment]) -> Experiment:
    """Return one experiment with the columns of all."""
    columns: dict[str, Column] = {}
    metrics: dict[str, None] = {}
    for experiment in experiments:
        metrics |= dict.fromkeys(metric.name.tag for metric in experiment.metric_infos)
        for column in experiment.hparam_infos:
            known = columns.get(column.name, column)
            columns[column.name] = _wider(known, column)
    return _experiment(columns.values(), metrics)


def write_merged(studies: Iterable[RunFolder], run: Path) -> None:
    """Write one experiment for all of these studies, as a separate run."""
    found = [experiment for experiment in map(read_experiment, studies) if experiment is not None]
    run.mkdir()
    _write(run / _EXPERIMENT, _event([_recorded(merged(found))]))


def _first_experiment(sweep: Sweep) -> Experiment:
    space = sweep.space.parameters if isinstance(sweep.space, Space) else ()
    metrics = [each.metric for each in sweep.objectives]
    metrics += [FRONT] if len(metrics) > 1 else []
    metrics += [] if sweep.pruner.name == "none" else [PRUNED]
    return _experiment([_column(each) for each in space if not _is_constant(each)], metrics)


def _experiment(columns: Iterable[Column], metrics: Iterable[str]) -> Experiment:
    from tensorboard.plugins.hparams import api_pb2 as api

    shown = {name: name.partition("/")[2] for name in (PRUNED, FRONT)}
    infos = [api.MetricInfo(name=api.MetricName(tag=tag), display_name=shown.get(tag, "")) for tag in metrics]
    return api.Experiment(hparam_infos=columns, metric_infos=infos)


def _wider(one: Column, other: Column) -> Column:
    """Return a column for the values of both."""
    from tensorboard.plugins.hparams import api_pb2 as api

    if one == other:
        return one
    made = api.HParamInfo(name=one.name, differs=one.differs, type=api.DATA_TYPE_STRING)
    if one.type != other.type:
        return made
    made.type = one.type
    domains = {one.WhichOneof("domain"), other.WhichOneof("domain")}
    if domains == {"domain_discrete"}:
        values = [*one.domain_discrete, *other.domain_discrete]
        made.domain_discrete.extend(dict.fromkeys(values))
    elif domains == {"domain_interval"}:
        made.domain_interval.min_value = min(one.domain_interval.min_value, other.domain_interval.min_value)
        made.domain_interval.max_value = max(one.domain_interval.max_value, other.domain_interval.max_value)
    return made


def _widened(study: RunFolder, sweep: Sweep, more: Experiment) -> Experiment:
    """Add columns to the study's experiment and return it; it is rewritten only if columns were missing."""
    known = read_experiment(study)
    if known is not None and merged([known, more]) == known:
        return known
    study.tensorboard.mkdir(exist_ok=True)
    # another worker may add other columns at the same moment
    with locked(study.tensorboard / "experiment.lock"):
        known = read_experiment(study) or _first_experiment(sweep)
        experiment = merged([known, more])
        _write_experiment(study, experiment)
    return experiment


def _write_experiment(study: RunFolder, experiment: Experiment) -> None:
    _write(experiment_file(study), _event([_recorded(experiment)]))


def _recorded(experiment: Experiment) -> Any:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    return _of_plugin(HParamsPluginData(experiment=experiment))


# -- event files


def _of_plugin(data: Any) -> Any:
    """Return a summary value of the plugin, which TensorBoard stores by its tag."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    tags = {
        "experiment": metadata.EXPERIMENT_TAG,
        "session_start_info": metadata.SESSION_START_INFO_TAG,
        "session_end_info": metadata.SESSION_END_INFO_TAG,
    }
    told = metadata.create_summary_metadata(data)
    return Summary.Value(tag=tags[data.WhichOneof("data")], metadata=told, tensor=metadata.NULL_TENSOR)


def _scalar(name: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=name, simple_value=value)


def _event(values: Sequence[Any], step: int = 0) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))


def _write_session(trial: RunFolder, what: str, values: Sequence[Any], step: int = 0) -> None:
    path = trial.tensorboard / f"{event_writer.PREFIX}{_stamp(trial, what)}.{what}"
    _write(path, _event(values, step))


def _stamp(trial: RunFolder, what: str) -> int:
    """Return a time stamp by which a start is read before all curves and an end after them; TensorBoard takes a later
    file with an earlier step for a restarted run."""
    return int(time.time()) - 1 if what == _START else event_writer.next_stamp(trial.tensorboard)


def _files(trial: RunFolder, what: str) -> list[Path]:
    return [trial.tensorboard / name for name in event_writer.names(trial.tensorboard) if name.endswith(f".{what}")]


def _remove(trial: RunFolder, what: str) -> None:
    for path in _files(trial, what):
        path.unlink(missing_ok=True)


def _write(path: Path, event: Any) -> None:
    """Write an event file as a whole, replacing an existing one."""
    write_whole(path, event_writer.encoded([event_writer.first_event(event.wall_time), event]), sync=False)


def _contents(path: Path) -> Iterator[bytes]:
    """Yield the content of each of the plugin's values in a file written by this module."""
    from tensorboard.compat.proto.event_pb2 import Event

    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        yield from (value.metadata.plugin_data.content for value in event.summary.value if value.HasField("metadata"))
        place += 12 + length + 4
