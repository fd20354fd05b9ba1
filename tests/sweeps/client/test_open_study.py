"""Workers whose sweep is confirmed: when they turn to the confirmation, and what they do there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import write_whole
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.registry.sweep_state import confirmation_folder
from mgpu_slurm.request import config as configs
from mgpu_slurm.run_folder import layout, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.sweep_records import SweepOver
from mgpu_slurm.sweeps import confirmation
from mgpu_slurm.sweeps.analysis.confirmed import confirmed
from mgpu_slurm.sweeps.client import study_client, sweep_end
from mgpu_slurm.sweeps.client.messages import Assignment
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.study import summary, trial_queue
from tests.on_slurm.packages import DATABASE_PASSWORD
from tests.postgresql import Server
from tests.sweeps.sweeps import begin, finish, kill, leave, make, states, study_of, sweep_of, worker


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_client, "PAUSE", 0.0)


def make_confirmed(base: Path, **values: Any) -> RunFolder:
    enqueue = [{"x": 0.1}, {"x": 0.9}, {"x": 0.5}, {"x": 0.7}]
    return make(base, **{"confirm": {"top": 2, "seeds": 3}, "enqueue": enqueue} | values)


def score_of(order: Assignment) -> float:
    """Other seeds have other values, and the point that was found as the second best is better with them."""
    x, seed = order.values["x"], order.values.get("seed", 0)
    assert isinstance(x, float)
    assert isinstance(seed, int)
    return x + (0.5 + 0.001 * seed if x == 0.7 and order.study == "s-confirm" else 0.0)


def train(part: StudyClient) -> Assignment:
    order = begin(part)
    finish(part, score_of(order))
    return order


def train_sweep(part: StudyClient, trials: int = 4) -> None:
    for _ in range(trials):
        assert train(part).study == "s"


def train_with_confirmation(folder: RunFolder) -> None:
    """Train the sweep and its confirmation with one worker."""
    part = worker(folder, 0)
    train_sweep(part)
    for _ in range(6):
        train(part)
    leave(part)


def test_best_trials_are_trained_with_other_seeds_by_the_same_worker(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path, fixed={"seed": 5})
    part = worker(folder, 0)
    train_sweep(part)
    orders = [train(part) for _ in range(6)]
    assert [(order.study, order.values["x"], order.values["seed"]) for order in orders] == [
        ("s-confirm", x, seed) for x in (0.9, 0.7) for seed in (6, 7, 8)
    ]
    leave(part)
    # they count neither for the sweep nor for its worker
    assert len(study_of(folder).trials) == part.ended == 4
    found = confirmed(folder)
    assert found is not None
    assert [(each.number, each.mean) for each in found.trials] == [(3, pytest.approx(1.207)), (1, pytest.approx(0.9))]
    assert found.trials[1].is_worse


def test_confirmation_waits_for_the_last_trial(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    part, other = worker(folder, 0), worker(folder, 1)
    train_sweep(part, 3)
    last = begin(other)
    assert part.next(Stop.NO) is None
    assert records.read_state(folder.of_task(0)).reason == "waiting for the last trials, to confirm the best"
    finish(other, score_of(last))
    assert begin(part).study == begin(other).study == "s-confirm"


def test_trial_of_a_dead_worker_is_not_waited_for(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    part, other = worker(folder, 0), worker(folder, 1)
    train_sweep(part, 3)
    begin(other)
    kill(folder, 1)
    assert train(part).study == "s"
    assert train(part).study == "s-confirm"


def test_confirmation_of_a_dead_worker_is_continued(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    part, other = worker(folder, 0), worker(folder, 1)
    train_sweep(part)
    lost = begin(other)
    assert lost.study == "s-confirm"
    kill(folder, 1)
    numbers = [train(part).number for _ in range(6)]
    assert sorted(numbers) == sorted([lost.number] * 3 + [1 - lost.number] * 3)
    leave(part)


def test_worker_that_starts_again_continues_its_own_confirmation(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    part = worker(folder, 0)
    train_sweep(part)
    first = train(part)
    begin(part)
    again = worker(folder, 0, attempt=2)
    again.settle()
    order = begin(again)
    assert (order.study, order.number) == ("s-confirm", first.number)
    # the first of its seeds is done
    assert order.values["seed"] == 2


def test_trials_that_become_the_best_later_are_added(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    train_with_confirmation(folder)
    values = configs.read_yaml(folder.sweep)
    write_whole(folder.sweep, configs.dump_yaml(values | {"trials": 5}))
    part = worker(folder, 0, attempt=2)
    order = begin(part)
    assert order.study == "s"
    finish(part, 2.0)
    # its worker may die before it adds the trial
    summary.write(folder, study_of(folder), sweep_of(folder))
    assert sweep_state.summary_of(folder).unconfirmed == 1
    assert [train(part).values["x"] for _ in range(3)] == [order.values["x"]] * 3
    leave(part)
    assert sweep_state.summary_of(folder).unconfirmed == 0
    found = confirmed(folder)
    assert found is not None
    assert sorted(each.number for each in found.trials) == [1, 3, 4]


def test_fewer_points_than_are_to_be_confirmed_are_enough(tmp_path: Path) -> None:
    constraints = {"gib": "<= 7"}
    enqueue = [{"x": 0.5}, {"x": 0.5}, {"x": 0.7}]
    folder = make_confirmed(tmp_path, confirm={"top": 3}, trials=3, enqueue=enqueue, constraints=constraints)
    part = worker(folder, 0)
    for gib in (5, 6, 8):
        begin(part)
        part.complete({"score": 0.5}, {"gib": gib}, step=1, progress=1)
    for _ in range(5):
        order = begin(part)
        assert (order.study, order.values["x"]) == ("s-confirm", 0.5)
        part.complete({"score": 0.5}, {"gib": 5}, step=1, progress=1)
    leave(part)
    records.update_state(folder.of_task(0), state="COMPLETED")
    assert sweep_state.state_of(folder, [records.read_state(folder.of_task(0))]).state == "COMPLETED"


def test_sweep_whose_confirmation_was_deleted_is_not_confirmed(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    train_with_confirmation(folder)
    assert sweep_state.summary_of(folder).unconfirmed == 0
    shutil.rmtree(confirmation_folder(folder).path)
    assert sweep_state.summary_of(folder).unconfirmed == 2


def test_sweep_that_fails_or_has_no_result_is_not_confirmed(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    part = worker(folder, 0)
    for _ in range(4):
        begin(part)
        part.prune("score is nan", 1)
    leave(part)
    assert states(folder) == ["PRUNED"] * 4
    assert not confirmation_folder(folder).path.exists()


def test_confirmation_stops_when_the_budget_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_end, "HOURS_EVERY", 0.0)
    folder = make_confirmed(tmp_path, budget={"hours": 100})
    part = worker(folder, 0)
    train_sweep(part)
    train(part)
    own = confirmation_folder(folder)
    assert configs.read_yaml(own.sweep)["budget"] == {"hours": 100.0}
    for each in (folder, own):
        write_whole(each.sweep, configs.dump_yaml(configs.read_yaml(each.sweep) | {"budget": {"hours": 1e-6}}))
    # the trial that was begun is finished
    assert [train(part).number for _ in range(2)] == [0, 0]
    leave(part)
    assert [trial.state.name for trial in study_of(own).trials] == ["COMPLETE", "WAITING"]


def test_half_made_confirmation_of_a_killed_worker_is_made_again(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path)
    part = worker(folder, 0)
    train_sweep(part)
    own = confirmation_folder(folder)
    half = own.path.with_name(f"{layout.STAGING_PREFIX}{own.run}")
    half.mkdir()
    (half / "sweep.yaml").write_text("study: s-con")
    assert train(part).study == "s-confirm"
    assert not half.exists()


def test_confirmation_in_a_database(tmp_path: Path, postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_TEST_PASSWORD", DATABASE_PASSWORD)
    url = postgresql.url(postgresql.new_database(), "${MGPU_TEST_PASSWORD}")
    folder = make_confirmed(tmp_path, storage=url)
    part = worker(folder, 0)
    train_sweep(part)
    assert train(part).study == "s-confirm"
    # as if the worker had been killed after it had created the study
    shutil.rmtree(confirmation_folder(folder).path)
    again = worker(folder, 0, attempt=2)
    again.settle()
    assert [train(again).study for _ in range(6)] == ["s-confirm"] * 6
    leave(again)


def test_only_as_many_workers_wait_as_are_enough(tmp_path: Path) -> None:
    folder = make_confirmed(tmp_path, confirm={"top": 1, "seeds": 2}, workers=3)
    first, other, third = (worker(folder, number) for number in range(3))
    orders = [begin(first), begin(other), begin(third)]
    finish(other, score_of(orders[1]))
    last = begin(other)
    finish(third, score_of(orders[2]))
    # the first one is enough, once it has no trial any more
    leave(third)
    finish(first, score_of(orders[0]))
    assert first.next(Stop.NO) is None
    finish(other, score_of(last))
    assert begin(first).study == "s-confirm"


class TestContinuing:
    """What is left of a confirmation after its workers have ended."""

    def left(self, folder: RunFolder, **changes: Any) -> int:
        values = configs.read_yaml(folder.sweep) | changes
        write_whole(folder.sweep, configs.dump_yaml(values))
        return confirmation.left(folder, sweep_of(folder), study_of(folder).trials)

    def test_trials_are_left_until_each_has_ended(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path)
        part = worker(folder, 0)
        train_sweep(part)
        assert self.left(folder) == 2
        for _ in range(3):
            train(part)
        part.next(Stop.NO)
        assert self.left(folder) == 1
        finish(part, 0.5)
        for _ in range(2):
            train(part)
        leave(part)
        assert self.left(folder) == 0
        assert self.left(folder, confirm={"top": 4, "seeds": 3}) == 2

    def test_spent_budget_leaves_nothing_until_it_is_raised(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path, budget={"hours": 5})
        part = worker(folder, 0)
        train_sweep(part)
        train(part)
        own = study_of(confirmation_folder(folder))
        trial_queue.set_over(own, SweepOver(reason="5.00 of 5 hours are over"))
        assert self.left(folder) == 0
        assert self.left(folder, budget={"hours": 7}) == 2

    def test_failed_confirmation_may_be_tried_again(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path)
        part = worker(folder, 0)
        train_sweep(part)
        train(part)
        own = study_of(confirmation_folder(folder))
        trial_queue.set_over(own, SweepOver(reason="all trials fail", failed=True))
        summary.write(confirmation_folder(folder), own, sweep_of(confirmation_folder(folder)))
        summary.write(folder, study_of(folder), sweep_of(folder))
        told = sweep_state.summary_of(folder)
        assert sweep_state.overall([RunState(state="FAILED")], told) == "FAILED"
        assert self.left(folder) == 2
        confirmation.allow_again(folder)
        assert trial_queue.why_over(study_of(confirmation_folder(folder))) is None


class TestRefusals:
    def test_confirmation_is_not_started_by_itself(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path)
        part = worker(folder, 0)
        train_sweep(part)
        begin(part)
        with pytest.raises(UserError, match="study s-confirm confirms study s, whose workers train it: name s instead"):
            confirmation.refuse_as_sweep(confirmation_folder(folder))
        confirmation.refuse_as_sweep(folder)

    def test_job_without_a_seed_is_refused(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path)
        part = worker(folder, 0)
        config = folder.of_trial(train(part).number).config
        config.write_text("x: 0.1\nseed: 0\n")
        confirmation.check(folder, sweep_of(folder))
        config.write_text("x: 0.1\n")
        with pytest.raises(UserError, match="the job's config has no `seed`"):
            confirmation.check(folder, sweep_of(folder))

    def test_confirmation_of_an_earlier_study_is_not_continued(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path)
        part = worker(folder, 0)
        train_sweep(part)
        begin(part)
        sweep = sweep_of(folder)
        shutil.rmtree(folder.path)
        with pytest.raises(UserError, match=r"study s-confirm is left of an earlier study: .* clean s-confirm"):
            confirmation.check(folder, sweep)

    def test_other_number_of_seeds_is_refused(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path)
        part = worker(folder, 0)
        confirmation.check(folder, sweep_of(folder))
        train_sweep(part)
        begin(part)
        confirmation.check(folder, sweep_of(folder))
        values = configs.read_yaml(folder.sweep) | {"confirm": {"seeds": 4}}
        write_whole(folder.sweep, configs.dump_yaml(values))
        with pytest.raises(UserError, match="study s-confirm has begun with seeds 1 to 3: keep their number"):
            confirmation.check(folder, sweep_of(folder))

    def test_other_run_of_its_name_is_not_touched(self, tmp_path: Path) -> None:
        folder = make_confirmed(tmp_path)
        part = worker(folder, 0)
        train_sweep(part)
        other = RunFolder(tmp_path / "s-confirm")
        other.create()
        write_whole(other.sweep, "study: s-confirm")
        leave(part)
        assert other.sweep.read_text() == "study: s-confirm"
        with pytest.raises(UserError, match="the confirmation would be study s-confirm, which exists"):
            confirmation.check(folder, sweep_of(folder))
