"""A sweep in the HParams tab of TensorBoard: one experiment, and a session for each trial.

The plugin takes one record of an experiment, whichever it meets first, and of each session's start and end the first
that it reads. So the study has the one experiment, with the columns of all trials, in a file that is replaced as a
whole; and a trial has a file for its start, and one for its end once that is for good.
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

from mgpu_slurm.core.files import read_jsonl, write_whole
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.metrics import event_writer
from mgpu_slurm.sweeps.search.parameters import Choice, Float, Parameter, Values
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_file import Sweep
from mgpu_slurm.sweeps.study.file_locks import locked

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

End = Literal["done", "pruned", "failed"]

Experiment: TypeAlias = Any
"""The plugin's message of that name: columns for parameters and metrics. Its messages have no types."""
Column: TypeAlias = Any
"""The plugin's `HParamInfo`: one parameter."""

PRUNED = "trial/pruned"
"""A metric of trials that have ended: 1 where the study gave the trial up, else 0, or without a pruner nothing. The
plugin's own status of a session has no word for that."""

_EXPERIMENT = f"{event_writer.PREFIX}experiment"
_START, _END = "session-start", "session-end"
_TOO_MANY = 10
"""Values of a choice which the tab does not offer one by one any more: it takes a pattern then, also for numbers."""
_LARGEST_WHOLE = 2**53
"""Numbers of the plugin are doubles, which do not hold every whole one beyond it."""


@contextmanager
def may_fail() -> Iterator[None]:
    """No trial dies of what TensorBoard would have shown of it."""
    try:
        yield
    except Exception as error:
        # also what damaged files of before make of its readers
        print(f"mgpu_slurm: WARNING: TensorBoard's parameters cannot be written: {error}", flush=True)


def write_experiment(study: RunFolder, sweep: Sweep) -> None:
    """Writes the study's columns, before its first trial; those of a space that is a function only trials tell."""
    study.tensorboard.mkdir(exist_ok=True)
    _write_experiment(study, _first_experiment(sweep))


def write_start(trial: RunFolder, sweep: Sweep, values: Values, chosen: Mapping[str, BaseDistribution]) -> None:
    """Writes a trial's parameters: its session is on until an end is written.

    One that is begun again is the same session, and has no end any more.

    Args:
        values: as the job gets them; a parameter that is not active is missing.
        chosen: what the study has chosen from, by name.
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
    """Writes how a trial has ended for good; one that goes on later has not ended.

    Args:
        result: what has come of it, by metric. Where it is not what the trial has reported last, it becomes the last
            point of the curve: that is what the tab shows.
    """
    trial.tensorboard.mkdir(parents=True, exist_ok=True)
    result = result or {}
    reported, step = _last_report(trial)
    scalars = {name: value for name, value in result.items() if reported.get(name) != value}
    # without a pruner too the study gives up what is no number; a failed one is told by its status
    if end == "pruned" or (end == "done" and sweep.pruner.name != "none"):
        scalars[PRUNED] = float(end == "pruned")
    _widened(trial.group, sweep, _experiment([], [*reported, *scalars]))
    _remove(trial, _END)
    _write_session(trial, _END, [_end(end), *(_scalar(name, value) for name, value in scalars.items())], step)


def _last_report(trial: RunFolder) -> tuple[dict[str, float], int]:
    """The last value of each metric, and the last step."""
    values: dict[str, float] = {}
    step = 0
    for record in read_jsonl(trial.metrics):
        values |= record["metrics"]
        step = record["step"]
    return values, step


def parameters_of(trial: RunFolder) -> dict[str, Any]:
    """A trial's parameters as its session has them; none where it has not begun."""
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
    """The parameter of a space that is a function, as far as one trial tells."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution) and value in distribution.choices:
        return Choice(name, {}, tuple(distribution.choices))
    if not _is_number(value):
        return Choice(name, {}, (value,))
    low = high = value
    # the function may have made something else of what was chosen
    ranges = (FloatDistribution, IntDistribution)
    if isinstance(distribution, ranges) and distribution.low <= value <= distribution.high:
        low, high = distribution.low, distribution.high
    return Float(name, {}, low, high)


def _column(parameter: Parameter) -> Column:
    """Values of several kinds, and of those that the plugin does not know, are texts all of them."""
    from tensorboard.plugins.hparams import api_pb2 as api

    # shown at first are five of those that differ: parallel coordinates leave out a trial in which a shown one is
    # missing, so that such as are always there come first
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
    """A value as text; among values that are no texts, "null" is not null."""
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
    """One name for all time: TensorBoard would take the record of the older one of two files."""
    return study.tensorboard / _EXPERIMENT


def read_experiment(study: RunFolder) -> Experiment | None:
    """The study's columns; None where it has none yet."""
    from tensorboard.plugins.hparams import metadata

    try:
        (content,) = _contents(experiment_file(study))
    except FileNotFoundError:
        return None
    return metadata.parse_experiment_plugin_data(content)


def merged(experiments: Iterable[Experiment]) -> Experiment:
    """One experiment with the columns of all of them."""
    columns: dict[str, Column] = {}
    metrics: dict[str, None] = {}
    for experiment in experiments:
        metrics |= dict.fromkeys(metric.name.tag for metric in experiment.metric_infos)
        for column in experiment.hparam_infos:
            known = columns.get(column.name, column)
            columns[column.name] = _wider(known, column)
    return _experiment(columns.values(), metrics)


def write_merged(studies: Iterable[RunFolder], run: Path) -> None:
    """Writes one experiment for all of these studies, as a run of its own."""
    found = [experiment for experiment in map(read_experiment, studies) if experiment is not None]
    run.mkdir()
    _write(run / _EXPERIMENT, _event([_recorded(merged(found))]))


def _first_experiment(sweep: Sweep) -> Experiment:
    space = sweep.space.parameters if isinstance(sweep.space, Space) else ()
    metrics = [sweep.metric] if sweep.pruner.name == "none" else [sweep.metric, PRUNED]
    return _experiment([_column(each) for each in space if not _is_constant(each)], metrics)


def _experiment(columns: Iterable[Column], metrics: Iterable[str]) -> Experiment:
    from tensorboard.plugins.hparams import api_pb2 as api

    shown = {PRUNED: PRUNED.partition("/")[2]}
    infos = [api.MetricInfo(name=api.MetricName(tag=tag), display_name=shown.get(tag, "")) for tag in metrics]
    return api.Experiment(hparam_infos=columns, metric_infos=infos)


def _wider(one: Column, other: Column) -> Column:
    """A column for the values of both."""
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
    """The study's experiment with these columns too; written again where it did not have them."""
    known = read_experiment(study)
    if known is not None and merged([known, more]) == known:
        return known
    study.tensorboard.mkdir(exist_ok=True)
    # another worker may bring others at the same moment
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
    """A value of the plugin's, which TensorBoard keeps by its tag."""
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
    """By which a start is read before all curves, and an end after them: of a later file with an earlier step
    TensorBoard thinks that the run went back."""
    return int(time.time()) - 1 if what == _START else event_writer.next_stamp(trial.tensorboard)


def _files(trial: RunFolder, what: str) -> list[Path]:
    return [trial.tensorboard / name for name in event_writer.names(trial.tensorboard) if name.endswith(f".{what}")]


def _remove(trial: RunFolder, what: str) -> None:
    for path in _files(trial, what):
        path.unlink(missing_ok=True)


def _write(path: Path, event: Any) -> None:
    """Writes an event file whole, in the place of one that is there."""
    write_whole(path, event_writer.encoded([event_writer.first_event(event.wall_time), event]), sync=False)


def _contents(path: Path) -> Iterator[bytes]:
    """What the plugin's values of a file written here hold."""
    from tensorboard.compat.proto.event_pb2 import Event

    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        yield from (value.metadata.plugin_data.content for value in event.summary.value if value.HasField("metadata"))
        place += 12 + length + 4
