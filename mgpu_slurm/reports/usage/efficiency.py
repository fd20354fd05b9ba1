"""What runs used of what they were allocated: `mgpu-slurm efficiency`, and a part of each report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.formatting import time_of
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors.selection import is_queued
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.registry.current_state import current
from mgpu_slurm.reports.usage import ledger, resource_use, run_times
from mgpu_slurm.reports.usage.advice import Advice, RunFacts, advice_for
from mgpu_slurm.reports.usage.ledger import Ledger
from mgpu_slurm.reports.usage.resource_use import Accounted, Asked
from mgpu_slurm.reports.usage.run_times import AttemptTimes, ReportsOf
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.sweep_records import confirmation_of
from mgpu_slurm.run_folder.usage_records import NodeUsage, read_usage
from mgpu_slurm.slurm import site, step_accounting
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.parameters import wider

NEWEST = 20
"""Number of runs, groups and sweeps that are shown if none is named."""

ACCOUNTED_WITHIN = timedelta(minutes=2)
"""Time after the end of a job in which accounting may not have its steps yet."""


UNREADABLE = (MgpuError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Errors by which records of a run are damaged, or of another version: the other runs are shown."""


@dataclass(frozen=True)
class AttemptUse:
    """An attempt of a run."""

    attempt: int
    job_id: str | None
    nodes: Sequence[str]
    seconds: float
    ledger: Ledger

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": list(self.nodes), "ledger": self.ledger.to_json()}


@dataclass(frozen=True)
class RunUse:
    """A run, or a worker of a sweep."""

    facts: RunFacts
    kind: str
    group: str | None
    attempts: Sequence[AttemptUse]
    spec: Spec
    """Its own; of a worker, that of its sweep."""
    times: Sequence[AttemptTimes]
    nodes: Sequence[NodeUsage]
    """What was sampled."""

    def to_json(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "run": facts.run,
            "kind": self.kind,
            "group": self.group,
            "state": facts.state,
            "attempts": [each.to_json() for each in self.attempts],
            "asked": asdict(facts.asked),
            "used": {name: _rounded(value) for name, value in asdict(facts.used).items()},
            "unit": facts.asked.unit,
            "ledger": facts.ledger.to_json(),
        }


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if isinstance(value, float) else value


@dataclass(frozen=True)
class Efficiency:
    """Runs, with what they have together."""

    runs: Sequence[RunUse]
    advice: Sequence[Advice]
    warnings: Sequence[str]

    @property
    def ledgers(self) -> dict[str, Ledger]:
        """Return the ledger of all runs for each unit, `gpu` before `core`."""
        found: dict[str, Ledger] = {}
        for unit in ("gpu", "core"):
            own = [run.facts.ledger for run in self.runs if run.facts.asked.unit == unit]
            found |= {unit: sum(own, Ledger())} if own else {}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the facts for programs. If only some runs have GPUs, `ledger` is that of those."""
        unit, total = next(iter(self.ledgers.items()), ("gpu", Ledger()))
        return {
            "runs": [run.to_json() for run in self.runs],
            "unit": unit,
            "ledger": total.to_json(),
            "ledgers": {each: one.to_json() for each, one in self.ledgers.items()},
            "advice": [{**asdict(each), "runs": list(each.runs)} for each in self.advice],
            "warnings": list(self.warnings),
        }


def chosen(words: Sequence[str], note: Note = quiet) -> list[tuple[RunFolder, RunState]]:
    """Return the runs with these names and their states, or those of the newest runs, groups and sweeps.

    Raises:
        UserError: there is no such run.
    """
    if words:
        return list(dict(_once(current([lookup.find(word) for word in words], note))).items())
    found = _once(lookup.all_states(note))
    newest = [*dict.fromkeys(folder.group for folder, _ in found)][:NEWEST]
    return [(folder, state) for folder, state in found if folder.group in newest]


def _once(found: Sequence[tuple[RunFolder, RunState]]) -> list[tuple[RunFolder, RunState]]:
    """Return runs without the workers of a confirmation, which are those of its sweep, if that is among them."""
    groups = {*lookup.without_confirmations(dict.fromkeys(folder.group for folder, _ in found))}
    return [(folder, state) for folder, state in found if folder.group in groups]


def gather(
    found: Sequence[tuple[RunFolder, RunState]], asks: bool = False, reports_of: ReportsOf = run_times.reported
) -> Efficiency:
    """Return what runs used; those that have never started are left out.

    Args:
        asks: ask SLURM's accounting about runs that have ended, once for each run, and keep the answer with it.
        reports_of: see `ReportsOf`.
    """
    warnings: list[str] = []
    sources: list[_Source] = []
    specs: dict[RunFolder, Spec] = {}
    for folder, state in found:
        try:
            attempts = run_times.attempts_of(folder, state)
            if attempts:
                whole = specs.get(folder.group) or specs.setdefault(folder.group, read_spec(folder.group))
                spec = whole if folder.task is None else whole.of_task(folder.task)
                sources.append(_Source(folder, state, spec, attempts))
        except UNREADABLE as error:
            warnings.append(_cannot_be_read(folder, error))
    if asks:
        _ask_accounting(sources)
    by_worker: dict[RunFolder, list[Ledger]] = {}
    of_ranges: list[Advice] = []
    workers = [each for each in sources if each.is_worker]
    for sweep in dict.fromkeys(each.folder.group for each in workers):
        try:
            by_worker |= _ledgers_of_workers(
                sweep, [each for each in workers if each.folder.group == sweep], reports_of
            )
            of_ranges += _advice_on_ranges(sweep)
        except UNREADABLE as error:
            warnings.append(_cannot_be_read(sweep, error))
    runs = []
    for source in sources:
        try:
            runs.append(_use(source, by_worker.get(source.folder), reports_of))
        except UNREADABLE as error:
            warnings.append(_cannot_be_read(source.folder, error))
    return Efficiency(runs, [*advice_for(run.facts for run in runs), *of_ranges], warnings)


def _cannot_be_read(folder: RunFolder, error: BaseException) -> str:
    words = str(error) if isinstance(error, (MgpuError, OSError)) else f"{type(error).__name__}: {error}"
    return f"{folder.run}: it is left out, as records in {folder.path} cannot be read: {words}"


@dataclass(frozen=True)
class _Source:
    folder: RunFolder
    state: RunState
    spec: Spec
    attempts: Sequence[AttemptTimes]

    @property
    def is_worker(self) -> bool:
        return self.spec.kind == "sweep"


def _use(source: _Source, of_worker: Sequence[Ledger] | None, reports_of: ReportsOf) -> RunUse:
    folder, state, attempts = source.folder, source.state, source.attempts
    asked = Asked.of(source.spec.resources)
    if of_worker is None:
        stretches = run_times.stretches_of(folder, attempts, reports_of)
        of_worker = ledger.of_run(stretches, failed=run_times.has_failed(state))
    # a run may have been resumed with other resources
    had = [asked if each.resources is None else Asked.of(each.resources) for each in attempts]
    ledgers = [
        one.times(len(each.nodes or range(then.nodes)) * then.units_per_node)
        for one, each, then in zip(of_worker, attempts, had, strict=True)
    ]
    nodes = read_usage(folder)
    used = resource_use.used(attempts, asked, nodes, resource_use.read_accounted(folder).steps)
    return RunUse(
        RunFacts(
            folder.run,
            state.state,
            asked,
            used,
            sum(ledgers, Ledger()),
            (state.curves or {}).get("speed/data_wait"),
            source.is_worker,
        ),
        state.kind,
        None if folder.task is None else folder.group.run,
        [
            AttemptUse(each.attempt, each.job_id, each.nodes, each.seconds, one)
            for each, one in zip(attempts, ledgers, strict=True)
        ],
        source.spec,
        attempts,
        nodes,
    )


def _ledgers_of_workers(
    sweep: RunFolder, workers: Sequence[_Source], reports_of: ReportsOf
) -> dict[RunFolder, list[Ledger]]:
    """Return the ledgers of the attempts of a sweep's workers, of one GPU or core."""
    own = {each.folder.task or 0: each for each in workers}
    attempts = {task: run_times.stretches_of(each.folder, each.attempts, reports_of) for task, each in own.items()}
    # the same workers confirm the best trials of their sweep
    first = sweep_state.confirmed_by(sweep)
    confirmation = RunFolder(first.path.with_name(confirmation_of(first.path.name)))
    trials = [*run_times.trial_runs(first, reports_of), *run_times.trial_runs(confirmation, reports_of)]
    found = ledger.of_workers(attempts, trials, sweep_file.load(sweep.sweep).trials_per_worker)
    return {own[task].folder: ledgers for task, ledgers in found.items()}


def _advice_on_ranges(sweep: RunFolder) -> list[Advice]:
    narrow = sweep_state.summary_of(sweep).narrow or {}
    return [Advice("range", (sweep.run,), "", wider(name, end)) for name, end in narrow.items()]


def _ask_accounting(sources: Iterable[_Source]) -> None:
    """Ask accounting once about all of these runs that have ended and were not asked about."""
    here = site.cluster_name()
    asked = [
        source
        for source in sources
        if is_queued(source.state)
        and not states.is_alive(source.state.state)
        and source.state.slurm_cluster in (None, here)
        and resource_use.read_accounted(source.folder).attempts < len(source.attempts)
    ]
    ids = dict.fromkeys(each.job_id for source in asked for each in source.attempts if each.job_id)
    steps = step_accounting.accounted_steps(list(ids)) if ids else None
    if steps is None:
        return
    for source in asked:
        own = resource_use.own_steps(steps, source.attempts)
        if own or _is_settled(source.state):
            resource_use.keep_accounted(source.folder, Accounted(len(source.attempts), own))


def _is_settled(state: RunState) -> bool:
    ended = time_of(state.ended)
    return ended is None or datetime.now(timezone.utc) - ended > ACCOUNTED_WITHIN
