"""What a rank finds wrong around it at its start reaches whoever looks at the run, whichever rank they follow."""

from __future__ import annotations

import json
import os

from tests.support import Project, log


def test_too_few_cores_warning_is_in_the_log_the_output_and_the_summary(project: Project) -> None:
    words = ("submit", "--executor", "local", "--nodes", "2", "--cpus-per-task", "999", "--follow", "--", "true")
    done = project.call(*words)
    assert done.returncode == 0, done.stderr
    few = f"requested 999 cores per rank, but this rank may use {len(os.sched_getaffinity(0))}"
    lines = done.stdout.splitlines()
    # rank 0's own, as it stands in its log; the other's beside it, once; and both at the end
    assert lines.count(f"mgpu_slurm: warning: {few}") == 1
    assert lines.count(f"-- warning: rank 1 on local2: {few}") == 1
    assert lines.count(f"warning   ranks 0-1 on local[1-2]: {few}") == 1
    (folder,) = project.runs.iterdir()
    assert log(folder, 1) == f"mgpu_slurm: warning: {few}\n"

    shown = project.call("logs", folder.name)
    assert shown.stdout == log(folder, 0)
    assert shown.stderr == f"-- warning: rank 1 on local2: {few}\n"


def test_run_with_enough_cores_has_no_warning(project: Project) -> None:
    done = project.call("submit", "--executor", "local", "--cpus-per-task", "1", "--follow", "--", "true")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout
    (folder,) = project.runs.iterdir()
    assert list((folder / "logs").glob("*.warnings.jsonl")) == []


def test_non_numeric_result_neither_fails_the_run_nor_loses_the_last_save(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        def train(run, config):
            model = run.wrap(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.restore(model=model, optimizer=optimizer)
            for _ in range(8):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            run.report(1, loss=0.5)
            run.save()
            return {"model": "trained"}
        """,
    )
    done = project.call("submit", "--executor", "local", "--nodes", "2", "--follow", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = project.runs.iterdir()
    assert project.json("status", folder.name)[0]["state"] == "COMPLETED"
    assert "the job function returned model = 'trained' (str), which is not a number" in done.stdout
    assert json.loads((folder / "result.json").read_text())["result"] == {"loss": 0.5}
    assert (folder / "checkpoints" / "step-000000008").is_dir()
