"""Trackers of runs on a real SLURM, whose next attempt is another job."""

from __future__ import annotations

import pytest

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.trackers.outcome import read_sent
from tests.end_to_end.test_trackers import own, reported
from tests.support import Project, wait_until
from tests.trackers.reading import points

JOB = '''
    """The first attempt waits in its fourth epoch until it is stopped."""
    import time

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset


    def train(run, epochs: int = 6):
        run.seed(1)
        model = run.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        data = run.loader(TensorDataset(torch.ones(8, 4)), batch_size=4)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(epochs):
            for (x,) in data:
                loss = (model(x) ** 2).mean()
                run.backward(loss)
                run.update(optimizer)
                while run.attempt == 1 and epoch == 4 and not run._loop_control.stop.asked:
                    time.sleep(0.02)
            run.report(epoch, loss=loss)
'''


# on this machine: tests/end_to_end/test_trackers.py
@pytest.mark.long
def test_reports_of_a_run_that_moves_to_another_job_are_sent_once(slurm_project: Project) -> None:
    slurm_project.write("train.py", JOB)
    slurm_project.environ |= {"WANDB_MODE": "offline"}
    folder = slurm_project.submit("train.py", "--nodes", "2", "--sink", "wandb=digits")
    wait_until(lambda: [sent.reports for sent in read_sent(RunFolder(folder))] == [3])
    assert slurm_project.call("cancel", folder.name).returncode == 0
    assert slurm_project.finish(folder)["state"] == "CANCELLED"
    assert slurm_project.call("resume", folder.name, "--no-follow").returncode == 0
    assert slurm_project.finish(folder)["state"] == "COMPLETED"
    assert len(reported(folder)["loss"]) == 6
    # its job waits for the tracker, but the run has ended before
    wait_until(lambda: all(sent.ended and sent.reports == 6 for sent in read_sent(RunFolder(folder))))
    assert own(points(slurm_project, folder, "wandb")) == reported(folder)


def test_sqlite_is_refused_where_several_nodes_would_share_it(slurm_project: Project) -> None:
    slurm_project.write("train.py", JOB)
    done = slurm_project.call("submit", "train.py", "--executor", "slurm", "--sink", "mlflow=sqlite:///mlflow.db")
    assert done.returncode == 2
    assert "SQLite is not safe on a file system that several nodes share" in done.stderr
    assert not slurm_project.runs.exists()
