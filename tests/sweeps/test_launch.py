"""Adding to a sweep that exists: what is done once, whatever goes wrong on the way, and what is refused.

Starting workers is the business of `submitting.restart`, which is only listened to here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.retry import Note
from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.request.spec import RestartPolicy, read_spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.resume_overrides import NO_CHANGE, Change
from mgpu_slurm.sweeps import launch, worker_starts
from mgpu_slurm.sweeps.study import trial_queue as studies
from tests.sweeps.sweeps import VALUES, begin, finish, leave, make, states, study_of, sweep_of, worker

POINTS = [{"x": 0.25}, {"x": 0.5}]


class Restarts:
    """Workers that were to be started, with what change."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int | None], Change]] = []
        self.problem: Exception | None = None

    def restart(self, asked: RunFolder, folders: list[RunFolder], change: Change, note: Note) -> str:
        if self.problem is not None:
            raise self.problem
        self.asked.append(([folder.task for folder in folders], change))
        return "7"


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Restarts:
    heard = Restarts()
    monkeypatch.setattr(submitting, "restart", heard.restart)
    monkeypatch.setenv("MGPU_RUNS", str(tmp_path))
    return heard


def ended(base: Path, **values: Any) -> RunFolder:
    """A sweep of one worker that has done all there was to do."""
    folder = make(base, workers=1, **values)
    part = worker(folder, 0)
    for _ in range(values["trials"]):
        begin(part)
        finish(part, 0.5)
    leave(part)
    records.update_state(folder.of_task(0), state="COMPLETED")
    return folder


def extend(**values: Any) -> launch.Started:
    return launch.start(VALUES | {"workers": 1} | values, {}, "sweep.yaml")


def test_points_are_queued_once_if_a_failed_extension_is_repeated(tmp_path: Path, restarts: Restarts) -> None:
    folder = ended(tmp_path, trials=2)
    before = folder.sweep.read_text()
    restarts.problem = ClusterError("sbatch: error: Batch job submission failed")
    with pytest.raises(ClusterError, match="submission failed"):
        extend(trials=4, enqueue=POINTS)
    assert folder.sweep.read_text() == before
    restarts.problem = None
    for _ in range(2):
        extend(trials=4, enqueue=POINTS)
    assert studies.queued(study_of(folder)) == POINTS
    assert states(folder) == ["COMPLETE", "COMPLETE", "WAITING", "WAITING"]
    assert [tasks for tasks, _ in restarts.asked] == [[0], [0]]
    with pytest.raises(UserError, match=r"^enqueue: the study's points \[.*\] must stay first: add new"):
        extend(trials=5, enqueue=[{"x": 0.75}, *POINTS])


def test_rejected_extension_leaves_the_summary_unchanged(tmp_path: Path, restarts: Restarts) -> None:
    folder = ended(tmp_path, trials=2, budget={"patience": 1})
    before = files.read_json(folder.summary)
    over = studies.notes(study_of(folder))[studies.OVER]
    assert over["reason"].startswith("none of 1 trials")
    restarts.problem = UserError("--code new: it does not fit")
    with pytest.raises(UserError, match="does not fit"):
        extend(trials=4, budget={"patience": 9})
    found = files.read_json(folder.summary)
    assert found | {"updated": ""} == before | {"updated": ""}
    assert studies.notes(study_of(folder))[studies.OVER] == over


def test_resume_starts_workers_only_if_trials_are_left(tmp_path: Path, restarts: Restarts) -> None:
    folder = ended(tmp_path, trials=1)
    folder.summary.unlink()
    with pytest.raises(UserError, match="no trial is left: raise trials or budget in its file and run sweep again"):
        launch.resume(folder, NO_CHANGE)
    # what who was killed did not tell is told here
    assert files.read_json(folder.summary)["trials"]["COMPLETE"] == 1
    files.write_whole(folder.sweep, folder.sweep.read_text().replace("trials: 1", "trials: 3"))
    assert launch.resume(folder, NO_CHANGE) == "7"
    assert restarts.asked == [([0], NO_CHANGE)]


def test_spent_budget_is_not_resumed_but_a_failed_sweep_is(tmp_path: Path, restarts: Restarts) -> None:
    folder = ended(tmp_path, trials=1)
    files.write_whole(folder.sweep, folder.sweep.read_text().replace("trials: 1", "trials: 3"))
    study = study_of(folder)
    studies.note(study, studies.OVER, {"reason": "1.00 of 1 hours are over", "failed": False})
    with pytest.raises(UserError, match=r"no trial is left \(1.00 of 1 hours are over\): raise"):
        launch.resume(folder, NO_CHANGE)
    studies.note(study, studies.OVER, {"reason": "all failed with the same error", "failed": True})
    launch.resume(folder, NO_CHANGE)
    assert studies.notes(study_of(folder))[studies.OVER] is None
    assert [tasks for tasks, _ in restarts.asked] == [[0]]


def test_extension_starts_nobody_if_the_budget_is_spent_until_it_is_raised(tmp_path: Path, restarts: Restarts) -> None:
    folder = ended(tmp_path, trials=1, budget={"hours": 1})
    over = {"reason": "1 of 1 hours are over", "failed": False}
    studies.note(study_of(folder), studies.OVER, over)
    started = extend(trials=3, budget={"hours": 1})
    assert started.lines[-1] == "starts    no worker: 1 of 1 hours are over"
    assert (restarts.asked, studies.notes(study_of(folder))[studies.OVER]) == ([], over)
    extend(trials=3, budget={"hours": 2})
    assert [tasks for tasks, _ in restarts.asked] == [[0]]
    assert studies.notes(study_of(folder))[studies.OVER] is None


def test_extension_waits_for_a_leaving_worker_to_end(
    tmp_path: Path, restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(tmp_path, trials=1)
    records.update_state(folder.of_task(0), state="RUNNING")
    looks = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        records.update_state(folder.of_task(0), state="COMPLETED")

    monkeypatch.setattr(worker_starts.time, "sleep", pause)
    started = extend(trials=2)
    assert (len(looks), started.is_alive) == (1, True)
    assert restarts.asked == [([0], NO_CHANGE)]


def test_extension_changes_resources_but_rejects_missing_ones(tmp_path: Path, restarts: Restarts) -> None:
    ended(tmp_path, trials=1, resources={"mem": "4G", "sbatch": {"comment": "old"}})
    for left, name in (({"mem": "4G"}, "comment was old"), ({"sbatch": {"comment": "old"}}, "mem was 4G")):
        with pytest.raises(UserError, match=f"^resources: {name} and is missing now: set resources"):
            extend(trials=2, resources=left)
    extend(trials=2, resources={"mem": "8G", "sbatch": {"comment": "new"}})
    ((_, change),) = restarts.asked
    assert change == Change(flags={"mem": "8G", "sbatch": {"comment": "new"}})


def test_extension_changes_what_its_file_changes(tmp_path: Path, restarts: Restarts) -> None:
    """A resume may have changed resources since, which the file does not know."""
    folder = ended(tmp_path, trials=1, resources={"mem": "4G"})
    spec = read_spec(folder)
    replace(spec, resources=replace(spec.resources, mem="16G")).write(folder)
    extend(trials=2, resources={"mem": "4G"})
    extend(trials=3, resources={"mem": "4G"}, stuck_after=120)
    extend(trials=4, resources={"mem": "8G"}, stuck_after=120)
    assert [change for _, change in restarts.asked] == [
        NO_CHANGE,
        Change(restart=RestartPolicy(stuck_after=120.0)),
        Change(flags={"mem": "8G"}),
    ]
    records.update_state(folder.of_task(0), state="RUNNING", leaving=None)
    with pytest.raises(UserError, match=r"^trials_per_worker: no change is possible"):
        extend(trials=5, resources={"mem": "8G"}, stuck_after=120, trials_per_worker=2)
    with pytest.raises(UserError, match=r"^stuck_after: no change is possible while workers are running"):
        extend(trials=5, resources={"mem": "8G"}, stuck_after=60)


def test_change_is_kept_for_later_workers_if_none_starts(tmp_path: Path, restarts: Restarts) -> None:
    folder = ended(tmp_path, trials=1, resources={"mem": "4G"})
    extend(trials=1, resources={"mem": "8G"}, stuck_after=5)
    assert restarts.asked == []
    spec = read_spec(folder)
    assert (spec.resources.mem, spec.stuck_after) == ("8G", 5.0)


def test_worker_that_trains_one_trial_again_has_a_rank_for_each_gpu(tmp_path: Path, restarts: Restarts) -> None:
    resources = {"gpus-per-node": 2}
    ended(tmp_path, trials=1, resources=resources, trials_per_worker=2)
    extend(trials=2, resources=resources)
    ((_, change),) = restarts.asked
    assert change.flags == {"ntasks-per-node": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change(restart=RestartPolicy(stuck_after=60)), "--stuck-after: set `stuck_after` in the sweep's file"),
        (Change(restart=RestartPolicy(retries=3)), "--retries: set `max_retries` in the sweep's file"),
        (Change(restart=RestartPolicy(max_requeues=3)), "--max-requeues: workers are requeued until"),
        (Change(parallelism=Parallelism(strategy="fsdp")), "--strategy: it is the same for all trials of a study"),
    ],
)
def test_options_that_do_not_apply_to_workers_are_refused(
    change: Change, message: str, tmp_path: Path, restarts: Restarts
) -> None:
    folder = ended(tmp_path, trials=1)
    with pytest.raises(UserError, match=message):
        launch.resume(folder, change)


def test_lower_trial_count_starts_no_worker_and_new_code_is_opt_in(tmp_path: Path, restarts: Restarts) -> None:
    ended(tmp_path, trials=2)
    started = extend(trials=1, sampler="tpe")
    assert started.lines[1:] == [
        "trials    1 (was 2)",
        "sampler   tpe (was random)",
        "starts    no worker: all trials are done",
    ]
    extend(trials=3)
    launch.start(VALUES | {"workers": 1, "trials": 4}, {}, "sweep.yaml", launch.Options(new_code=True))
    first, second = (change for _, change in restarts.asked)
    assert (first, second.new_code) == (NO_CHANGE, True)
    # the new code has to take what trials will ask of it
    assert {"x": 0.0} in second.probes


def test_extension_does_not_import_a_custom_sampler(tmp_path: Path, restarts: Restarts) -> None:
    folder = make(tmp_path, workers=1, sampler="only_there.Mine")
    records.cancel_unstarted(folder.of_task(0), "cancelled")
    extend(sampler="only_there.Mine", trials=9)
    launch.forget(folder)
    assert restarts.asked == [([0], NO_CHANGE)]


def test_workers_stage_the_data_that_the_file_names(tmp_path: Path) -> None:
    sweep = sweep_of(make(tmp_path, stage=["data", "more"]))
    assert launch._request(sweep, launch.Options()).stage == ("data", "more")
