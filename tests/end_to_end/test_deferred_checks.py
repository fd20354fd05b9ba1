"""A job whose source does not tell all of its config: what is checked at submission, and what when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.request import config as configs
from tests.support import Project, log, make_project

JOB = """
    import os
    from dataclasses import dataclass
    from pathlib import Path

    import torch.distributed as dist

    with open({imports!r}, "a") as file:
        file.write("imported\\n")

    @dataclass
    class Config:
        lr: float = 0.5
        data: Path = Path("data")
        seed: int = 1
        home: str = os.environ["HOME"]

        def __post_init__(self):
            if self.lr < 0:
                raise ValueError(f"lr={{self.lr}} is negative: give one above 0")
            self.lr = 2 * self.lr

    def train(run, config: Config):
        print("values", config.lr, config.data, config.seed)
        if run.attempt == 1:
            raise RuntimeError("once")
        run.report(1, loss=config.lr)

    if "SLURM_PROCID" in os.environ:
        print("imported before the ranks join:", not dist.is_initialized())
"""

DRY_RUN = ("submit", "--executor", "slurm", "--gpus-per-node", "0", "--dry-run")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("deferred"))
    project.write("job.py", JOB.format(imports=str(imports(project))))
    project.write("missing.py", "import no_module_of_this_name\ndef train(run, lr: float = 0.1): pass\n")
    return project


def imports(project: Project) -> Path:
    return project.folder.parent / "imports.log"


def imported_by(project: Project, *words: str, code: int = 0) -> int:
    imports(project).write_text("")
    done = project.call(*DRY_RUN, *words)
    assert done.returncode == code, done.stderr
    return len(imports(project).read_text().splitlines())


def test_submission_imports_the_job_only_if_requested_or_needed(project: Project) -> None:
    assert imported_by(project, "job", "lr=1") == 0
    # what the source tells is refused at once
    assert imported_by(project, "job", "lr=fast", code=2) == 0
    assert imported_by(project, "job", "home=3", "lrr=1", code=2) == 0
    assert imported_by(project, "job", "--check", "lr=-1", code=2) == 1
    # the seeds of a group are counted from its own
    assert imported_by(project, "job", "--seeds", "2") == 1
    assert "check     when the job starts" in project.call(*DRY_RUN, "job").stdout


def test_value_refused_by_the_job_ends_the_run_before_ranks_join(project: Project) -> None:
    folder, facts = project.run("job", "--ntasks-per-node", "2", "lr=-1")
    assert facts["state"] == "FAILED"
    for rank in (0, 1):
        assert "imported before the ranks join: True" in log(folder, rank)
        assert "config of job:train: lr=-1.0 is negative: give one above 0" in log(folder, rank)
    told = project.call("why", folder.name).stdout
    assert "why       the job could not be called as it was submitted" in told
    assert "lr=-1.0 is negative: give one above 0" in told
    assert "submit --dry-run --check` checks it beforehand" in told


def test_failed_import_in_the_job_is_reported_by_why(project: Project) -> None:
    folder, facts = project.run("missing.py", "lr=1")
    assert facts["state"] == "FAILED"
    told = project.call("why", folder.name).stdout
    assert "why       a module could not be imported" in told
    assert "missing.py:1: ModuleNotFoundError: No module named 'no_module_of_this_name'" in told


def test_job_completes_its_config_exactly_once_per_attempt(project: Project) -> None:
    folder, facts = project.run("job", "lr=0.25", "data=sub")
    assert facts["state"] == "FAILED"
    assert project.call("resume", folder.name, "--follow").returncode == 0
    for attempt in (1, 2):
        assert f"values 0.5 {project.folder / 'sub'} 1\n" in log(folder, 0, attempt)
    whole = configs.read_yaml(folder / "config.yaml")
    assert (whole["lr"], whole["data"], whole["seed"]) == (0.5, str(project.folder / "sub"), 1)
    curves = project.json("aggregate", folder.name, "--out", str(project.folder.parent / "curves"))
    assert curves["groups"][0]["config"]["lr"] == 0.5


def test_group_runs_complete_the_config_with_their_own_seeds(project: Project) -> None:
    group = project.submit("job", "--seeds", "2", "--retries", "1", "lr=0.25")
    assert project.call("wait", group.name, "--timeout", "90").returncode == 0
    for task in (0, 1):
        assert f"values 0.5 {project.folder / 'data'} {1 + task}\n" in log(group / "tasks" / str(task), 0, 2)
