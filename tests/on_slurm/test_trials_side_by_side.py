"""Workers that train several trials at the same time, on a real SLURM."""

from __future__ import annotations

import json

import pytest
import yaml

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.cluster import Cluster
from tests.on_slurm.test_sweeps import LOOK_EVERY, finish, states, workers
from tests.on_slurm.test_sweeps import project as project
from tests.support import Project, wait_until

JOB = """
    import json, os, time
    from dataclasses import dataclass
    from pathlib import Path

    import torch


    @dataclass
    class Config:
        x: int = 0
        seed: int = 0
        until: str = ""


    def train(run, config: Config):
        model = run.wrap(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = run.restore(model=model, optimizer=optimizer)
        cores, gpus = sorted(os.sched_getaffinity(0)), os.environ["CUDA_VISIBLE_DEVICES"]
        has = [cores, torch.get_num_threads(), gpus, os.environ["MGPU_GPU_SHARE"], state.progress]
        with open(run.folder / "has.jsonl", "a") as file:
            file.write(json.dumps(has) + "\\n")
        for epoch in state.epochs(100_000):
            run.report(epoch, score=config.x + config.seed)
            if Path(config.until).exists():
                break
            time.sleep(0.1)
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_requeued_worker_continues_all_of_its_trials(project: Project, cluster: Cluster) -> None:
    project.write("job.py", JOB)
    until = project.folder / "until"
    sweep = {"study": "study", "job": "job.py", "metric": "score", "space": {"x": {"int": [1, 4]}}, "sampler": "grid",
             "trials_per_worker": 4, "resources": {"gpus-per-node": 2, "cpus-per-task": 4},
             "fixed": {"until": str(until)}, "confirm": {"top": 2, "seeds": 2}}  # fmt: skip
    project.write("sweep.yaml", yaml.safe_dump(sweep))
    done = project.call("sweep", "sweep.yaml")
    assert done.returncode == 0, done.stderr
    folder = RunFolder(project.runs / "study")
    trials = [folder.of_trial(number) for number in range(4)]
    wait_until(lambda: all(trial.metrics.exists() for trial in trials), 90, LOOK_EVERY)
    # SLURM warns of the time limit by this signal
    job_id = workers(folder)[0].job_id
    assert job_id is not None
    cluster.run("scancel", "--signal=USR2", job_id)
    cluster.start_now(job_id)
    wait_until(lambda: all(records.attempts_started(trial) == 2 for trial in trials), 90, LOOK_EVERY)
    until.touch()
    assert finish(project) == 0
    assert states(folder) == ["COMPLETE"] * 4
    first, again = (
        [json.loads((trial.path / "has.jsonl").read_text().splitlines()[attempt]) for trial in trials]
        for attempt in (0, 1)
    )
    for found in (first, again):
        # the machine may have fewer cores than SLURM believes
        assert [len(cores) for cores, *_ in found] == [1] * 4
        assert sorted(gpus for _, _, gpus, *_ in found) == ["0", "0", "1", "1"]
        assert {(threads, share) for _, threads, _, share, _ in found} == {(1, "0.5")}
    confirmed = project.json("best", "study")["confirmation"]["trials"]
    assert [(each["number"], each["mean"]) for each in confirmed] == [(3, 5.5), (2, 4.5)]
    assert all(progress == 0 for *_, progress in first)
    assert all(progress > 0 for *_, progress in again)
