"""Sweeps that pause their trials, as job arrays of a real SLURM whose workers are disturbed at random."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mgpu_slurm.run_folder import states as run_states
from mgpu_slurm.run_folder.checkpoint_names import complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study.snapshots import until_of
from tests.on_slurm.cluster import Cluster
from tests.on_slurm.test_sweeps import LOOK_EVERY, Chaos, finish, processes, start, states, trials_of, workers
from tests.on_slurm.test_sweeps import project as project
from tests.support import Project, wait_until

ASHA = {"name": "asha", "min_resource": 1, "max_resource": 9, "reduction_factor": 3}


class Disturbance(Chaos):
    """Disturbs workers that have a trial, in each way once."""

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        ways = [self.cancel, self.preempt, self.kill_batch_step, self.kill_rank]
        for disturb in draw.sample(ways, len(ways)):
            worker = draw.choice(self._at_work())
            print(f"{disturb.__name__}: worker {worker}")
            disturb(worker)

    def _kill(self, part: str, worker: int) -> None:
        # the worker may be about to start
        wait_until(lambda: len(processes(part, self._folder.of_task(worker))) == 1, pause=LOOK_EVERY)
        super()._kill(part, worker)

    def until_no_worker_is_left(self) -> None:
        wait_until(lambda: not self._is_one_left(), seconds=120, pause=LOOK_EVERY)

    def _is_one_left(self) -> bool:
        self._start_what_waits()
        return any(run_states.is_alive(state.state) for state in workers(self._folder))

    def _at_work(self) -> list[int]:
        found: list[int] = []

        def is_one() -> bool:
            self._start_what_waits()
            found[:] = [
                number
                for number, state in enumerate(workers(self._folder))
                # with a trial, or its ranks would not be restarted in place
                if state.state == "RUNNING" and self._folder.of_task(number).unfinished(state.attempts).exists()
            ]
            return bool(found)

        wait_until(is_one, pause=LOOK_EVERY)
        return found


def check(folder: RunFolder, count: int) -> None:
    """All trials are where they belong: none was promoted beyond a third, lost or trained twice at once."""
    trials = trials_of(folder)
    assert len(trials) == count
    assert set(states(folder)) <= {"COMPLETE", "PRUNED", "WAITING"}
    assert "COMPLETE" in states(folder)
    reached = [len(trial.intermediate_values) for trial in trials]
    for trial in trials:
        assert sorted(trial.intermediate_values) == list(range(1, reached[trial.number] + 1))
        assert reached[trial.number] == (1, 3, 9)[until_of(trial)]
        own = folder.of_trial(trial.number)
        kept = len(complete_checkpoints(own))
        assert kept == {"WAITING": 1, "PRUNED": 0}.get(trial.state.name, kept)
    assert sum(each >= 3 for each in reached) <= max(1, count // 3)
    assert sum(each >= 9 for each in reached) <= max(1, count // 9)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [2])
@pytest.mark.long
def test_no_trial_is_promoted_twice_lost_or_stuck(project: Project, cluster: Cluster, seed: int) -> None:
    fixed: dict[str, Any] = {"does": "reports x", "epochs": 9, "pause": 0.6}
    resources = {"cpus-per-task": 4}
    folder = start(
        project, trials=27, workers=2, fixed=fixed, resources=resources, pruner=ASHA,
        sampler={"name": "tpe", "seed": seed}, max_retries=9,
    )  # fmt: skip
    # another job on the same study
    file = project.folder / "sweep.yaml"
    file.write_text(file.read_text().replace("workers: 2", "workers: 3"))
    assert "starts    1 worker\n" in project.call("sweep", "sweep.yaml").stdout
    assert len({state.job_id.partition("_")[0] for state in workers(folder) if state.job_id}) == 2
    chaos = Disturbance(project, cluster, folder)
    chaos.run(seed)
    chaos.until_no_worker_is_left()
    if finish(project) != 0:
        project.call("resume", "study")
        chaos.until_no_worker_is_left()
        assert finish(project) == 0
    check(folder, 27)
