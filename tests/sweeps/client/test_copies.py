"""Copies in population based training: whose checkpoint they get, and that it is not lost whatever happens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.checkpoints.rank_record import Content, PassRecord, ProgressRecord, SharedRecord
from mgpu_slurm.core import files
from mgpu_slurm.metrics.report_socket import PAUSE, Verdict
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.analysis.best_trial import best
from mgpu_slurm.sweeps.client.paused_trials import REPLACED
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.study import recovery, summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.snapshots import UNTIL, copy_of
from tests.sweeps.client.test_pausing import saved
from tests.sweeps.sweeps import begin, kill, make, states, study_of, sweep_of, worker

PBT = {"name": "pbt", "population": 4, "interval": 2, "max_resource": 6, "perturb": ["x"]}


def save_whole(folder: RunFolder, number: int, *steps: int) -> None:
    """Write checkpoints of a trial that say at which progress they are."""
    for step in steps:
        path = folder.of_trial(number).checkpoint(step)
        at = PassRecord("", active=False, batch=0, passes=0)
        progress = ProgressRecord(step=step, progress=step, metrics={}, next_epoch=step + 1, loader=at)
        shared = SharedRecord(progress, best=None, objects={}, differing=[])
        checkpoints.write_part(path, 0, 1, Content({}, shared), {})


def make_population(base: Path) -> RunFolder:
    return make(base, sampler={"name": "random", "seed": 1}, pruner=PBT, trials=None)


def replace_last(folder: RunFolder, part: StudyClient) -> None:
    """Train four members to their first comparison, at which the last one, the worst, is replaced by the first."""
    for score in (0.9, 0.8, 0.7):
        number = begin(part).number
        save_whole(folder, number, 1, 2)
        assert part.report(2, {"score": score}) == PAUSE
        part.pause(2)
    number = begin(part).number
    save_whole(folder, number, 2)
    verdict = part.report(2, {"score": 0.1})
    assert verdict == Verdict(f"{REPLACED} 0")
    part.prune(str(verdict.prune_reason), 2)
    assert (states(folder), saved(folder, 3)) == (["WAITING"] * 3 + ["PRUNED"], [])


def test_copy_knows_the_metrics_of_its_source_up_to_the_checkpoint(tmp_path: Path) -> None:
    folder = make_population(tmp_path)
    part = worker(folder, 0)
    replace_last(folder, part)
    for progress, size in ((1, 7.0), (3, 9.0)):
        files.append_jsonl(folder.of_trial(0).metrics, {"progress": progress, "metrics": {"size": size}})
    begin(part)
    assert part._running().metrics == {"size": 7.0}


def test_copy_has_the_checkpoint_of_its_source_and_changed_values(tmp_path: Path) -> None:
    folder = make_population(tmp_path)
    part = worker(folder, 0)
    replace_last(folder, part)
    order = begin(part)
    source, copied = study_of(folder).trials[0], study_of(folder).trials[4]
    found = copy_of(copied)
    assert found is not None
    assert (order.number, found.source, found.trial) == (4, 0, 3)
    assert order.values["x"] == copied.params["x"] != source.params["x"]
    assert saved(folder, 4) == ["step-000000002"]
    assert files.read_json(folder.of_trial(4).copied) == {"checkpoint": "step-000000002", "source": 0}
    # what the source saves and deletes later is its own
    shutil.rmtree(folder.of_trial(0).checkpoints)
    assert checkpoints.problem(folder.of_trial(4).checkpoint(2), [0]) is None
    assert not list(folder.copies.iterdir())
    assert summary.summarize(study_of(folder), sweep_of(folder)).known == ()


@pytest.mark.parametrize("before_adoption", [True, False])
def test_copy_whose_worker_dies_at_its_beginning_still_has_the_checkpoint(
    tmp_path: Path, before_adoption: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_population(tmp_path)
    part = worker(folder, 0)
    replace_last(folder, part)
    if before_adoption:
        monkeypatch.setattr(StudyClient, "_begin", lambda self, trial: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            begin(part)
        monkeypatch.undo()
    else:
        begin(part)
    kill(folder, 0)
    recovery.recover(study_of(folder), folder, sweep_of(folder))
    other = worker(folder, 1)
    assert begin(other).number == 4
    assert saved(folder, 4) == ["step-000000002"]
    assert len(study_of(folder).trials) == 5


def test_checkpoint_of_a_copy_that_was_not_created_is_replaced_by_that_of_the_source_chosen_later(
    tmp_path: Path,
) -> None:
    folder = make_population(tmp_path)
    part = worker(folder, 0)
    replace_last(folder, part)
    trials = study_of(folder).trials
    assert part._set_aside(trials[3], trials[1]) == 2
    (folder.of_trial(1).checkpoint(2) / "mark").touch()
    assert begin(part).number == 4
    assert not (folder.of_trial(4).checkpoint(2) / "mark").exists()
    assert files.read_json(folder.of_trial(4).copied) == {"checkpoint": "step-000000002", "source": 0}


@pytest.mark.parametrize(
    ("steps", "began", "until", "reached"),
    [((2,), 2, 1, {1}), ((2, 4), 4, 2, set()), ((), 0, 0, {0}), ((6,), 0, 0, {0})],
)
def test_copy_runs_to_the_rung_after_its_checkpoint(
    tmp_path: Path, steps: tuple[int, ...], began: int, until: int, reached: set[int]
) -> None:
    """If the source has none before its end, the copy begins at the start."""
    folder = make_population(tmp_path)
    part = worker(folder, 0)
    replace_last(folder, part)
    shutil.rmtree(folder.of_trial(0).checkpoints)
    save_whole(folder, 0, *steps)
    assert begin(part).number == 4
    copied = study_of(folder).trials[4]
    found = copy_of(copied)
    assert found is not None
    assert (found.progress, copied.system_attrs[UNTIL]) == (began, until)
    assert len(saved(folder, 4)) == bool(began)
    # its first report counts above its checkpoint only
    part.report(5, {"score": 0.5})
    entry = part._shared.snapshot().entries[4]
    assert set(entry.values) == reached


def test_repeated_call_of_the_sweep_accepts_copies(tmp_path: Path) -> None:
    folder = make_population(tmp_path)
    part = worker(folder, 0)
    replace_last(folder, part)
    begin(part)
    assert studies.queued(study_of(folder)) == []


def test_best_shows_the_schedule_of_values(tmp_path: Path) -> None:
    folder = make_population(tmp_path)
    part = worker(folder, 0)
    replace_last(folder, part)
    assert begin(part).number == 4
    assert part.report(4, {"score": 0.95}) == PAUSE
    part.pause(4)
    for score in (0.91, 0.92, 0.93):
        assert begin(part).number != 4
        assert part.report(4, {"score": score}) == PAUSE
        part.pause(4)
    while (number := begin(part).number) != 4:
        part.report(6, {"score": 0.5})
        part.complete({"score": 0.5}, {}, step=6, progress=6)
    part.report(6, {"score": 0.99})
    part.complete({"score": 0.99}, {}, step=6, progress=6)
    part._shared.write_summary()
    found = best(folder)
    trials = study_of(folder).trials
    assert number == found.number
    assert [(each.trial, each.until, each.params) for each in found.schedule] == [
        (0, 2, trials[0].params), (4, 6, trials[4].params),
    ]  # fmt: skip
    assert any(line.startswith("schedule  to progress 2 (trial 0): x=") for line in found.lines())
