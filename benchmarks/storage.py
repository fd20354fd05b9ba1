"""Many workers on one study: the journal beside Optuna's own, and PostgreSQL with more workers than connections."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import Study
from optuna.trial import Trial, TrialState

from benchmarks.measure import Estimate, interleave, median, ratio
from benchmarks.report import Row, Section
from mgpu_slurm.sweeps.search import sweep_file as files
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.claims import Worker
from tests.on_slurm.packages import DATABASE_PASSWORD
from tests.postgresql import Server, server

ROUNDS = 6
JOURNAL_PROCESSES, JOURNAL_TRIALS = 64, 3
DATABASE_ROUNDS = 2
DATABASE_PROCESSES, DATABASE_TRIALS = 200, 1
REPORTS = 3
PAUSE_SECONDS = 10.0
LOADING_SECONDS = 200.0
JOURNAL_TARGET_S = 0.5
VARIABLE = "MGPU_BENCH_PASSWORD"

# children have imported all that workers need, as their parent has
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Place:
    """A study that all workers share."""

    sweep: Sweep
    load: Callable[[int], Study]
    """The study as the worker of that number has it."""
    lock: Path

    def take(self, study: Study, worker: int) -> Trial:
        """As a sweep's worker does: one that nobody else has, of no more than there may be."""
        trial = studies.take(study, self.sweep, Worker(worker, 1), self.lock)
        if trial is None:
            raise RuntimeError("others have taken more trials than are theirs")
        return trial


@dataclass(frozen=True)
class Outcome:
    """What the calls of all workers took, from the moment when all had loaded the study."""

    calls: list[float]
    seconds: float
    lost: int
    """Trials that did not end once, or that lack anything of what they were told."""

    @property
    def p99(self) -> float:
        return float(np.quantile(self.calls, 0.99))


def run() -> Section:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.environ[VARIABLE] = DATABASE_PASSWORD
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as base, server(Path(base) / "server") as database:
        journal = interleave(
            {"ours": partial(_on_our_journal, Path(base)), "theirs": partial(_on_optunas_journal, Path(base))}, ROUNDS
        )
        postgresql = interleave(
            {
                "busy": partial(_on_postgresql, Path(base), database, 0.0),
                "paced": partial(_on_postgresql, Path(base), database, PAUSE_SECONDS),
            },
            DATABASE_ROUNDS,
            warm_ups=0,
        )
    return Section("storage", _ABOUT, [*_journal_rows(journal), *_database_rows(postgresql)], _NOTES)


# -- places


def _sweep(processes: int, trials: int, url: str | None = None) -> Sweep:
    space = {"lr": {"float": [1e-4, 1.0], "log": True}}
    values = {"study": "s", "job": "train.py", "metric": "loss", "direction": "minimize", "space": space}
    return replace(files.parse(values | {"sampler": "random", "trials": processes * trials}, "bench"), storage=url)


def _on_our_journal(base: Path) -> Outcome:
    made, journal = _sweep(JOURNAL_PROCESSES, JOURNAL_TRIALS), _new_journal(base)
    studies.create(made, journal)
    place = Place(made, lambda worker: studies.load(made, journal, Worker(worker, 1)), _lock_beside(journal))
    return _worked(place, JOURNAL_PROCESSES, JOURNAL_TRIALS)


def _on_optunas_journal(base: Path) -> Outcome:
    made, journal = _sweep(JOURNAL_PROCESSES, JOURNAL_TRIALS), _new_journal(base)
    optuna.create_study(storage=_optunas(journal), study_name="s")
    place = Place(made, partial(_load_optunas, journal), _lock_beside(journal))
    return _worked(place, JOURNAL_PROCESSES, JOURNAL_TRIALS)


def _load_optunas(journal: Path, worker: int) -> Study:
    sampler = optuna.samplers.RandomSampler()
    return optuna.load_study(storage=_optunas(journal), study_name="s", sampler=sampler)


def _optunas(journal: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal))))


def _new_journal(base: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=base)) / "study.journal"


def _lock_beside(journal: Path) -> Path:
    return journal.with_name("trials.lock")


def _on_postgresql(base: Path, database: Server, pause: float) -> Outcome:
    url = database.url(database.new_database(), f"${{{VARIABLE}}}")
    made = _sweep(DATABASE_PROCESSES, DATABASE_TRIALS, url)
    # the lock alone lies in the sweep's folder
    folder = Path(tempfile.mkdtemp(dir=base))
    place = Place(made, lambda worker: studies.load(made, Path("/unused"), Worker(worker, 1)), folder / "trials.lock")
    # by a child, so that those who come after it inherit nothing of its connection
    _in_children(1, lambda worker: studies.create(made, Path("/unused")))
    return _worked(place, DATABASE_PROCESSES, DATABASE_TRIALS, pause)


# -- workers


def _worked(study: Place, processes: int, trials: int, pause: float = 0.0) -> Outcome:
    together = FORK.Barrier(processes)
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as folder:

        def work(worker: int) -> None:
            Path(folder, str(worker)).write_text(json.dumps(_calls(study, worker, trials, together, pause)))

        _in_children(processes, work)
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    counted = FORK.Value("i", -1)

    def count(worker: int) -> None:
        counted.value = _lost(study.load(worker), processes * trials)

    # a child again: this process goes on to fork
    _in_children(1, count)
    calls = [seconds for _, _, ours in found for seconds in ours]
    begun, ended = min(start for start, _, _ in found), max(end for _, end, _ in found)
    return Outcome(calls, ended - begun, counted.value)


def _in_children(count: int, work: Callable[[int], object]) -> None:
    children = [FORK.Process(target=work, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a worker failed")


def _calls(place: Place, worker: int, trials: int, together: Barrier, pause: float) -> tuple[float, float, list[float]]:
    """When the first call of a worker began and its last one ended, and what each took."""
    study = place.load(worker)
    taken: list[float] = []
    chance = random.Random(worker)

    def call(make: Callable[[], object]) -> object:
        time.sleep(pause * chance.uniform(0, 2))
        begun = time.perf_counter()
        made = make()
        taken.append(time.perf_counter() - begun)
        return made

    together.wait(LOADING_SECONDS)
    start = time.monotonic()
    for _ in range(trials):
        trial = call(partial(place.take, study, worker))
        assert isinstance(trial, Trial)
        for progress in range(1, REPORTS + 1):
            call(partial(trial.report, float(trial.number), progress))
        call(partial(trial.set_user_attr, "worker", worker))
        call(partial(study.tell, trial, float(trial.number)))
    return start, time.monotonic(), taken


def _lost(study: Study, expected: int) -> int:
    whole = [
        trial.state == TrialState.COMPLETE
        and trial.value == trial.number
        and trial.intermediate_values == dict.fromkeys(range(1, REPORTS + 1), trial.number)
        and "worker" in trial.user_attrs
        for trial in study.trials
    ]
    return abs(expected - len(whole)) + whole.count(False)


# -- rows


def _journal_rows(outcomes: dict[str, list[Outcome]]) -> list[Row]:
    p99 = {case: [outcome.p99 for outcome in found] for case, found in outcomes.items()}
    longest = {case: [max(outcome.calls) for outcome in found] for case, found in outcomes.items()}
    who = f"{JOURNAL_PROCESSES} processes on one journal"
    return [
        Row(f"{who}: p99 of a call", median(p99["ours"]), "s", 3, JOURNAL_TARGET_S),
        Row(f"{who}: p99 of a call, Optuna's own", median(p99["theirs"]), "s", 3),
        Row(f"{who}: p99, ours / Optuna's", ratio(p99["ours"], p99["theirs"]), "", 3),
        Row(f"{who}: the longest call", median(longest["ours"]), "s", 3),
        Row(f"{who}: the longest call, Optuna's own", median(longest["theirs"]), "s", 3),
        Row(f"{who}: the longest, ours / Optuna's", ratio(longest["ours"], longest["theirs"]), "", 3),
        Row(f"{who}: calls a second", median(_rates(outcomes["ours"])), "", 0),
        Row(f"{who}: calls a second, Optuna's own", median(_rates(outcomes["theirs"])), "", 0),
        Row(f"{who}: trials that lost anything, all rounds", _lost_in_all(outcomes["ours"]), "", 0, 0),
    ]


def _database_rows(outcomes: dict[str, list[Outcome]]) -> list[Row]:
    rows = []
    for case, how in (("paced", f"a call every {PAUSE_SECONDS:g} s each"), ("busy", "as fast as they can")):
        found, who = outcomes[case], f"{DATABASE_PROCESSES} processes on PostgreSQL, {how}"
        rows += [
            Row(f"{who}: median of a call", median([statistics.median(o.calls) for o in found]), "s", 3),
            Row(f"{who}: p99 of a call", median([outcome.p99 for outcome in found]), "s", 3),
            Row(f"{who}: the longest call", median([max(outcome.calls) for outcome in found]), "s", 3),
            Row(f"{who}: calls a second", median(_rates(found)), "", 0),
            Row(f"{who}: trials that lost anything, all rounds", _lost_in_all(found), "", 0, 0),
        ]
    return rows


def _rates(outcomes: list[Outcome]) -> list[float]:
    return [len(outcome.calls) / outcome.seconds for outcome in outcomes]


def _lost_in_all(outcomes: list[Outcome]) -> Estimate:
    lost = sum(outcome.lost for outcome in outcomes)
    return Estimate(lost, lost, lost, len(outcomes))


_ABOUT = (
    f"All workers of one study at once, processes forked from one that has imported Optuna. A trial is {REPORTS + 3}"
    f" calls: it is taken as a sweep's worker takes it, reports {REPORTS} times, gets an attribute, and is told;"
    " nothing is trained. Optuna's own journal is JournalFileBackend with JournalFileOpenLock. PostgreSQL is a server"
    " of its own on the same cores, as Debian ships it, which takes 100 connections; its disk is written to, as the"
    " journal's is."
)
_NOTES = [
    f"Trials of each worker: {JOURNAL_TRIALS} on a journal, {DATABASE_TRIALS} on PostgreSQL.",
    "Workers share the cores of this machine: what they wait for, working as fast as they can, is mostly each other.",
]
