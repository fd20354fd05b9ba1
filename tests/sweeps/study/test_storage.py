"""What a study's storage promises, whichever it is: the same tests on the journal and on real servers."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import Trial, TrialState

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.sweeps.scheduling import construction
from mgpu_slurm.sweeps.scheduling.scheduler import Decision
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.claims import Worker
from mgpu_slurm.sweeps.study.snapshots import Snapshots
from tests.forks import FORKS
from tests.mariadb import Server as MariaDB
from tests.on_slurm.packages import DATABASE_PASSWORD
from tests.postgresql import Server as PostgreSQL
from tests.support import wait_until, with_long

VARIABLE = "MGPU_TEST_PASSWORD"
SPACE = {"lr": {"float": [1e-4, 1.0], "log": True}, "layers": {"choice": [[8], [8, 8]]}}


@dataclass(frozen=True)
class Place:
    """Where studies lie."""

    url: str | None
    folder: Path
    """Of the sweep; where the url says where, for the workers' lock alone."""

    @property
    def journal(self) -> Path:
        return self.folder / "study.journal"

    @property
    def is_mariadb(self) -> bool:
        """Whether zeros lose their sign, and texts of over 65,535 bytes are refused."""
        return self.url is not None and self.url.startswith("mariadb")

    def sweep(self, **changes: Any) -> Sweep:
        values = {"study": "s", "job": "train.py", "metric": "loss", "direction": "minimize", "trials": 3}
        return replace(sweep_file.parse(values | {"space": SPACE} | changes, "sweep.yaml"), storage=self.url)

    def create(self, **changes: Any) -> Sweep:
        made = self.sweep(**changes)
        studies.create(made, self.journal)
        return made

    def load(self, made: Sweep, worker: int = 0) -> optuna.Study:
        # other processes do not have the variables of this one
        os.environ[VARIABLE] = DATABASE_PASSWORD
        return studies.load(made, self.journal, Worker(worker, 1))

    def take(self, study: optuna.Study, made: Sweep, worker: int = 0) -> Trial | None:
        return studies.take(study, made, Worker(worker, 1), self.folder / "trials.lock")

    def begin(self, study: optuna.Study, made: Sweep, worker: int = 0) -> Trial:
        """A trial that has to be there."""
        trial = self.take(study, made, worker)
        assert trial is not None
        return trial


PLACES = ["journal", "postgresql", "mariadb"]
with_two_places = pytest.mark.parametrize("place", with_long(PLACES, PLACES[:2]), indirect=True)
"""What takes long is not repeated on the second kind of server."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv(VARIABLE, DATABASE_PASSWORD)
    url = None
    if request.param != "journal":
        server: PostgreSQL | MariaDB = request.getfixturevalue(request.param)
        url = server.url(server.new_database(), f"${{{VARIABLE}}}")
    return Place(url, tmp_path)


def suggest(made: Sweep, trial: Trial) -> dict[str, Any]:
    assert isinstance(made.space, Space)
    return made.space.suggest(trial)


# -- many processes


def in_processes(work: Callable[..., None], calls: list[tuple[Any, ...]]) -> None:
    """One for each call; all of them succeed."""
    workers = [FORKS.Process(target=work, args=call) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * len(workers)


def take_all(place: Place, made: Sweep, worker: int, together: Barrier, taken: Any) -> None:
    """One worker's trials, each of them ended at once."""
    study = place.load(made, worker)
    together.wait()
    while (trial := place.take(study, made, worker)) is not None:
        trial.report(worker, 1)
        study.tell(trial, suggest(made, trial)["lr"])
        with taken.get_lock():
            taken[trial.number] += 1


@with_two_places
def test_concurrent_workers_take_each_trial_once(place: Place) -> None:
    made = place.create(trials=24, sampler="random")
    together, taken = FORKS.Barrier(8), FORKS.Array("i", 32)
    in_processes(take_all, [(place, made, worker, together, taken) for worker in range(8)])
    assert list(taken) == [1] * 24 + [0] * 8
    study = place.load(made)
    assert [trial.number for trial in study.trials] == list(range(24))
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert len({trial.params["lr"] for trial in study.trials}) == 24
    assert all(trial.value == trial.params["lr"] for trial in study.trials)


ROUNDS = 6


def take_one_in_each_round(place: Place, made: Sweep, worker: int, together: Barrier, taken_in: Any) -> None:
    study = place.load(made, worker)
    for number in range(1, ROUNDS + 1):
        together.wait()
        trial = place.take(study, replace(made, trials=3 * number), worker)
        if trial is not None:
            with taken_in.get_lock():
                # of a trial that two have got, the sum says so
                taken_in[trial.number] += number
        together.wait()


@with_two_places
def test_concurrent_workers_never_exceed_a_trial_limit_that_is_raised(place: Place) -> None:
    made = place.create(trials=3, sampler="random")
    together, taken_in = FORKS.Barrier(8), FORKS.Array("i", 8 * ROUNDS)
    in_processes(take_one_in_each_round, [(place, made, worker, together, taken_in) for worker in range(8)])
    expected = [number for number in range(1, ROUNDS + 1) for _ in range(3)]
    assert list(taken_in) == expected + [0] * 5 * ROUNDS
    assert [trial.state for trial in place.load(made).trials] == [TrialState.RUNNING] * 3 * ROUNDS


def report_for_ever(place: Place, made: Sweep, told: Any) -> None:
    study = place.load(made)
    trial = place.begin(study, made)
    suggest(made, trial)
    while True:
        trial.report(told.value + 1, told.value + 1)
        told.value += 1
        study._storage.set_trial_user_attr(trial._trial_id, "text", "x" * 5000 + str(told.value))


def test_worker_killed_during_a_call_loses_no_data_and_blocks_nobody(place: Place) -> None:
    made = place.create(trials=6)
    # without a lock, which would stay with who is killed over it
    told = [FORKS.Value("i", 0, lock=False) for _ in range(4)]
    for number, counter in enumerate(told):
        worker = FORKS.Process(target=report_for_ever, args=(place, made, counter))
        worker.start()
        wait_until(lambda number=number: told[number].value > 3 + number)
        worker.kill()
        worker.join()
    study = place.load(made, worker=1)
    left = study.get_trials(states=(TrialState.RUNNING,))
    assert [trial.number for trial in left] == [0, 1, 2, 3]
    for trial, counter in zip(left, told, strict=True):
        reported = list(range(1, len(trial.intermediate_values) + 1))
        assert list(trial.intermediate_values.items()) == [(step, float(step)) for step in reported]
        assert len(reported) >= counter.value > 3
        assert sorted(trial.params) == ["layers", "lr"]
        claiming.give_back(study, trial)
    numbers = []
    while (again := place.take(study, made, worker=1)) is not None:
        suggest(made, again)
        again.report(0.5, 1000)
        study.tell(again, 0.5)
        numbers.append(again.number)
    # each starts with another one of those that wait
    assert sorted(numbers[:4]) == list(range(4))
    assert numbers[4:] == [4, 5]
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}


def begin_for_ever(place: Place, made: Sweep, worker: int, told: Any) -> None:
    study = place.load(made, worker)
    while True:
        place.begin(study, made, worker)
        told.value += 1


@with_two_places
def test_worker_killed_while_beginning_a_trial_has_claimed_it(place: Place) -> None:
    made = place.create(trials=None, budget={"hours": 1})
    # without a lock, which would stay with who is killed over it
    told = [FORKS.Value("i", 0, lock=False) for _ in range(4)]
    workers = [FORKS.Process(target=begin_for_ever, args=(place, made, *each)) for each in enumerate(told)]
    for worker in workers:
        worker.start()
    for number, worker in enumerate(workers):
        wait_until(lambda number=number: told[number].value > 3 + number)
        worker.kill()
        worker.join()
    study = place.load(made, worker=4)
    assert place.begin(study, made, worker=4).number == len(study.trials) - 1
    assert {trial.state for trial in study.trials} == {TrialState.RUNNING}
    owners = [claiming.claims(trial) for trial in study.trials]
    for number, counter in enumerate(told):
        # the last one may have begun without a word
        assert owners.count({number: 1}) - counter.value in (0, 1)
    assert owners.count({4: 1}) == 1
    assert len(owners) == sum(owners.count({number: 1}) for number in range(5))


# -- what is stored


NUMBERS = [0.1 + 0.2, 1 / 3, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, -0.0, 1e16 + 2, math.pi]
ATTRIBUTES = {
    "big": 2**80,
    "negative": -(2**63) - 1,
    "text": "Grüße, 学习率 😀 \u2028 \x00 '\"\\ %s {} ${HOME}",
    "nested": {"a": [1, {"b": [None, True, 1e-300]}], "": {}},
    "empty": [],
    "float": 0.1 + 0.2,
    "long": "x" * 100_000,
    "Schlüssel 键": 1,
}


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


def test_floats_round_trip_bit_for_bit(place: Place) -> None:
    made = place.create(trials=len(NUMBERS), space={"lr": {"float": [1e-7, 1.0], "log": True}})
    study = place.load(made)
    given = []
    for value in NUMBERS:
        trial = place.begin(study, made)
        given.append(suggest(made, trial)["lr"])
        for step, reported in enumerate(NUMBERS, 1):
            trial.report(reported, step)
        study.tell(trial, value)
    trials = place.load(made, worker=1).trials
    assert bits([trial.params["lr"] for trial in trials]) == bits(given)
    expected = [value or 0.0 for value in NUMBERS] if place.is_mariadb else NUMBERS
    assert bits([trial.value for trial in trials if trial.value is not None]) == bits(expected)
    for trial in trials:
        assert bits(list(trial.intermediate_values.values())) == bits(expected)


def test_nan_and_infinity_round_trip(place: Place) -> None:
    made = place.create(trials=2)
    study = place.load(made)
    high, low = place.begin(study, made), place.begin(study, made)
    for step, value in enumerate([math.nan, math.inf, -math.inf, 1.0], 1):
        high.report(value, step)
    study.tell(high, math.inf)
    study.tell(low, -math.inf)
    first, second = place.load(made, worker=1).trials
    nan, *others = first.intermediate_values.values()
    assert math.isnan(nan)
    assert others == [math.inf, -math.inf, 1.0]
    assert (first.value, second.value) == (math.inf, -math.inf)


def test_attributes_round_trip(place: Place) -> None:
    made = place.create()
    study = place.load(made)
    trial, storage = place.begin(study, made), study._storage
    attributes = dict(ATTRIBUTES)
    if place.is_mariadb:
        with pytest.raises(ClusterError, match=r"the database refused: .*Data too long"):
            trial.set_user_attr("long", attributes.pop("long"))
    for key, value in attributes.items():
        trial.set_user_attr(key, value)
        study.set_user_attr(key, value)
        storage.set_trial_system_attr(trial._trial_id, key, value)
        storage.set_study_system_attr(study._study_id, key, value)
    # what is set again is another
    trial.set_user_attr("big", 1)
    other = place.load(made, worker=1)
    (seen,) = other.get_trials(states=(TrialState.RUNNING,))
    assert seen.user_attrs == attributes | {"big": 1}
    assert seen.system_attrs.items() >= attributes.items()
    assert other.user_attrs == attributes
    assert other._storage.get_study_system_attrs(other._study_id).items() >= attributes.items()


def test_stored_values_are_visible_to_the_next_call_of_another_worker(place: Place) -> None:
    made = place.create()
    one, other = place.load(made, worker=0), place.load(made, worker=1)
    storage, trial = other._storage, place.begin(one, made)
    for count in range(5):
        one._storage.set_study_system_attr(one._study_id, "count", count)
        assert storage.get_study_system_attrs(other._study_id)["count"] == count
        trial.report(count, count + 1)
        trial.set_user_attr("count", count)
        seen = other.get_trials(deepcopy=False)[trial.number]
        assert (seen.state, seen.intermediate_values[count + 1]) == (TrialState.RUNNING, count)
        assert storage.get_trial(trial._trial_id).user_attrs == {"count": count}
    one.tell(trial, 4.0)
    assert [seen.state for seen in other.trials] == [TrialState.COMPLETE]
    place.begin(other, made, worker=1)
    assert [seen.state for seen in one.trials] == [TrialState.COMPLETE, TrialState.RUNNING]


# -- trials


def test_given_back_trial_continues_with_its_number_and_reports(place: Place) -> None:
    made = place.create()
    first, second = place.load(made, worker=0), place.load(made, worker=1)
    untouched, begun = place.begin(first, made), place.begin(first, made)
    values = suggest(made, begun)
    begun.report(0.7, 1)
    begun.set_user_attr("folder", "trials/1")
    for trial in (untouched, begun):
        claiming.give_back(first, first.trials[trial.number])
    # what has begun comes first
    again = place.begin(second, made, worker=1)
    assert again.number == begun.number == 1
    assert suggest(made, again) == values
    assert again.user_attrs == {"folder": "trials/1"}
    again.report(0.6, 2)
    second.tell(again, 0.6)
    (ended,) = second.get_trials(states=(TrialState.COMPLETE,))
    assert ended.intermediate_values == {1: 0.7, 2: 0.6}
    assert [place.begin(second, made, worker=1).number, place.begin(first, made).number] == [0, 2]
    assert place.take(first, made) is None


def test_queued_trial_comes_before_new_ones_and_counts(place: Place) -> None:
    made = place.create(trials=3)
    study = place.load(made)
    studies.queue(study, [{"lr": 0.5, "layers": [8, 8]}, {"lr": 0.25}])
    first, second, third = (place.begin(study, made) for _ in range(3))
    assert [trial.number for trial in (first, second, third)] == [0, 1, 2]
    assert suggest(made, first) == {"lr": 0.5, "layers": [8, 8]}
    assert suggest(made, second)["lr"] == 0.25
    assert suggest(made, third)["lr"] not in (0.5, 0.25)
    assert place.take(study, made) is None
    # what is there is done, however many there may be
    studies.queue(study, [{"lr": 0.125}])
    assert suggest(made, place.begin(study, made))["lr"] == 0.125
    assert place.take(study, made) is None


def test_enqueued_points_are_the_first_trials_of_any_worker(place: Place) -> None:
    points = [{"lr": 0.5, "layers": [8, 8]}, {"lr": 0.25}]
    made = place.create(trials=3, enqueue=points)
    one, other = place.load(made), place.load(made, worker=1)
    first, second = place.begin(one, made), place.begin(other, made, worker=1)
    # one whose worker was gone before it had asked for anything is the same point again
    claiming.give_back(one, one.trials[first.number])
    again, last = place.begin(other, made, worker=1), place.begin(one, made)
    assert [trial.number for trial in (again, second, last)] == [0, 1, 2]
    assert suggest(made, again) == points[0]
    assert suggest(made, second)["lr"] == 0.25
    assert suggest(made, last)["lr"] not in (0.5, 0.25)


def test_grid_points_are_taken_in_order_by_any_worker(place: Place) -> None:
    space = {"lr": {"float": [0.1, 0.3], "step": 0.1}, "layers": {"choice": [[8], [8, 8]]}}
    made = place.create(sampler="grid", space=space, trials=4)
    assert isinstance(made.space, Space)
    workers = [(place.load(made, worker), worker) for worker in (3, 5)]
    taken = [place.begin(study, made, worker) for study, worker in workers * 2]
    assert [suggest(made, trial) for trial in taken] == made.space.grid()[:4]
    study, worker = workers[0]
    assert place.take(study, made, worker) is None
    # extended, it takes the points that are missing
    whole = place.sweep(sampler="grid", space=space, trials=None)
    assert [suggest(whole, place.begin(study, whole, worker)) for _ in range(2)] == made.space.grid()[4:]
    assert place.take(study, whole, worker) is None


def test_two_studies_in_one_storage_are_independent(place: Place) -> None:
    one, other = place.create(study="one", trials=2), place.create(study="other", trials=3)
    first, second = place.load(one), place.load(other)
    for study, made in ((first, one), (second, other)):
        study._storage.set_study_system_attr(study._study_id, "name", made.study)
        for _ in range(2):
            trial = place.begin(study, made)
            trial.report(1.0, 1)
            suggest(made, trial)
    assert place.take(first, one) is None
    assert place.begin(second, other).number == 2
    assert [trial.number for trial in first.trials] == [0, 1]
    assert [trial.number for trial in second.trials] == [0, 1, 2]
    for study, name in ((first, "one"), (second, "other")):
        assert study._storage.get_study_system_attrs(study._study_id)["name"] == name
        study.tell(study.trials[0].number, 2.0)
        assert [trial.state for trial in study.trials][:2] == [TrialState.COMPLETE, TrialState.RUNNING]
    with pytest.raises(UserError, match="already has one of that name: choose another"):
        place.create(study="one")


def test_loading_a_missing_study_is_an_error(place: Place) -> None:
    place.create(study="one")
    with pytest.raises(UserError, match=r"^storage '.*': it has no study 'two': `mgpu-slurm sweep` creates it "):
        place.load(place.sweep(study="two"))


# -- choosing and pruning


def decisions(study: optuna.Study, made: Sweep, take: Callable[[], Trial]) -> list[Any]:
    """What is chosen and which are pruned, of trials whose curves are fixed."""
    found: list[Any] = []
    scheduler = construction.scheduler_of(made.pruner, made.direction)
    snapshots = Snapshots(study, scheduler)
    for number in range(made.trials or 0):
        trial = take()
        found.append(suggest(made, trial))
        for progress in range(1, 10):
            trial.report((number * 7 % 5) / progress, progress)
            is_due = scheduler.is_due(progress - 1, progress)
            found.append(is_due and scheduler.decide(snapshots.take(made.trials), number) is Decision.PRUNE)
            if found[-1]:
                break
        if found[-1]:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, (number * 7 % 5) / 9)
    return found


@pytest.mark.parametrize(
    "pruner",
    [{"name": "median", "startup_trials": 2}, {"name": "hyperband", "max_resource": 9}],
    ids=["median", "hyperband"],
)
@with_two_places
def test_sampler_and_pruner_decide_as_in_memory(place: Place, pruner: dict[str, Any]) -> None:
    made = place.create(trials=14, sampler={"name": "tpe", "seed": 3}, pruner=pruner)
    study = optuna.create_study(
        study_name=made.study,
        direction=made.direction,
        sampler=construction.sampler_of(made.sampler, 0, levels=made.pruner.levels, space=made.space),
    )
    expected = decisions(study, made, study.ask)
    assert {True, False} <= {decided for decided in expected if isinstance(decided, bool)}
    stored = place.load(made)
    assert decisions(stored, made, lambda: place.begin(stored, made)) == expected
