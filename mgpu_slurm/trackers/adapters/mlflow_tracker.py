"""A run in MLflow, by its client's public interface."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mgpu_slurm.core import files, log_lines
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.trackers.destinations import MLFLOW, Destination
from mgpu_slurm.trackers.tracker import PROGRESS, Status, TrackedRun, Tracker

ID_TAG = "mgpu.id"

METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
"""The most that MLflow takes in one call."""

_LONGEST_KEY, _LONGEST_VALUE = 250, 6000

_STATUS = {
    "running": "RUNNING",
    "waiting": "SCHEDULED",
    "completed": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}

_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow's own defaults are two minutes, seven times
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Variables of MLflow, for users who have not set them."""

T = TypeVar("T")


class MlflowTracker(Tracker):
    """A run in MLflow, found by a tag.

    A call of `log_batch` is one transaction of MLflow's database, and the progress is stored in the last call of a
    report. So the last progress in MLflow says which reports it has, wherever a sender was killed.
    """

    def __init__(self, place: str, run: TrackedRun) -> None:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._uri, _, experiment = place.partition("#")
        self._run = run
        with _alone(Destination(MLFLOW, self._uri)):
            self._client = MlflowClient(tracking_uri=self._uri)
            self._experiment = self._experiment_id(experiment)
        found = self._client.search_runs([self._experiment], f"tags.`{ID_TAG}` = '{run.key}'", max_results=1)
        self._found = found[0] if found else self._create()
        self._add_params()
        if self._found.info.status != _STATUS["running"]:
            self._client.update_run(self.id, status=_STATUS["running"])

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _create(self) -> Any:
        run = self._run
        tags = {ID_TAG: run.key, "mgpu.run": run.name, "mgpu.folder": str(run.folder), **run.tags}
        if run.group is not None:
            tags["mgpu.group"] = run.group
        if run.commit is not None:
            tags["mlflow.source.git.commit"] = run.commit
        return self._client.create_run(self._experiment, _milliseconds(run.started), tags, run.name)

    def _add_params(self) -> None:
        """Add the values that MLflow lacks: it refuses to change one."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        keys = _keys(self._run.config)
        config = {keys[name]: str(value)[:_LONGEST_VALUE] for name, value in self._run.config.items()}
        new = [Param(name, value) for name, value in config.items() if name not in self._found.data.params]
        try:
            for some in _batches(new, PARAMS_PER_CALL):
                self._client.log_batch(self.id, params=some)
        except MlflowException as error:
            # an older server takes shorter values; the curves matter more
            log_lines.warn(f"mlflow: a config value of {self._run.name} is missing: {error}")

    @property
    def id(self) -> str:
        return str(self._found.info.run_id)

    @property
    def address(self) -> str:
        if urlsplit(self._uri).scheme in ("http", "https"):
            return f"{self._uri.rstrip('/')}/#/experiments/{self._experiment}/runs/{self.id}"
        return f"{self._uri} (run {self.id})"

    def missing(self, reports: Sequence[Report]) -> list[Report]:
        # the value of the last step; progress increases with steps
        has = self._client.get_run(self.id).data.metrics.get(PROGRESS, 0)
        return [report for report in reports if report.progress > has]

    def send(self, reports: Sequence[Report]) -> None:
        due: list[Any] = []
        for report in reports:
            own = _metrics(report)
            if len(due) + len(own) > METRICS_PER_CALL:
                self._log(due)
                due = []
            due += own
        self._log(due)

    def _log(self, metrics: Sequence[Any]) -> None:
        for some in _batches(metrics, METRICS_PER_CALL):
            self._client.log_batch(self.id, metrics=some)

    def finish(self, status: Status, tags: Mapping[str, str], ended: str | None) -> None:
        for name, value in tags.items():
            self._client.set_tag(self.id, name, value)
        if status in ("running", "waiting"):
            self._client.update_run(self.id, status=_STATUS[status])
        else:
            self._client.set_terminated(self.id, _STATUS[status], None if ended is None else _milliseconds(ended))


def _metrics(report: Report) -> list[Any]:
    """Return the values of a report as MLflow's, the progress last."""
    from mlflow.entities import Metric

    time, keys = _milliseconds(report.time), _keys(report.values)
    values = [(keys[name], value) for name, value in report.values.items()]
    return [Metric(key, value, time, report.shown_step) for key, value in (*values, (PROGRESS, float(report.progress)))]


def _keys(names: Iterable[str]) -> dict[str, str]:
    """Return for each name one that MLflow takes: a relative path of few characters, in which no two are the same."""
    found: dict[str, str] = {}
    taken = {PROGRESS}
    for name in names:
        plain = re.sub(r"[^\w\-. :/]", "_", name)[:_LONGEST_KEY]
        path = "/".join(part for part in plain.split("/") if part.strip(".")) or "_"
        key = next(each for each in chain([path], (f"{path}_{n}" for n in count(2))) if each not in taken)
        taken.add(key)
        found[name] = key
    return found


def _milliseconds(time: str) -> int:
    return round(1000 * datetime.fromisoformat(time).timestamp())


def _batches(values: Iterable[T], most: int) -> Iterator[list[T]]:
    rest = iter(values)
    while some := list(islice(rest, most)):
        yield some


@contextmanager
def _alone(destination: Destination) -> Iterator[None]:
    """Open a database while no other run does: the first one creates its tables, which fails if two do it."""
    if not destination.is_file:
        yield
        return
    database = Path(destination.place.partition("///")[2])
    lock = database.with_name(f".{database.name}.mgpu-lock")
    with files.locked(lock):
        yield
