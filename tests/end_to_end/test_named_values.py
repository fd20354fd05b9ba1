"""A job function that takes config values by name, from submission to sweep."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support import Project, log, make_project

JOB = """
    import sys
    from pathlib import Path

    def train(run, lr=0.1, epochs: int = 3, *, data: Path = Path("data"), seed=0):
        print("values", lr, epochs, data, seed)
        print("path", *sys.path, sep=":")
        if not Path(data).exists():
            raise FileNotFoundError(data)
        run.report(epochs, score=lr)

    def anything(run, **values):
        pass

    def untyped(run, lr, epochs=3):
        pass
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("named"))
    project.write("job.py", JOB)
    project.write("big.yaml", "epochs: 30\nlr: 0.25\n")
    return project


def test_values_reach_the_function_by_name_and_again_after_resume(project: Project) -> None:
    folder, facts = project.run("job.py", "--config", "big.yaml", "lr=1")
    assert facts["state"] == "FAILED"
    (project.folder / "data").mkdir()
    assert project.call("resume", folder.name).returncode == 0
    for attempt in (1, 2):
        assert f"values 1.0 30 {project.folder / 'data'} 0\n" in log(folder, 0, attempt)


def test_group_runs_have_their_seeds_and_a_clean_sys_path(project: Project) -> None:
    (project.folder / "data").mkdir(exist_ok=True)
    folder = project.submit("job", "--seeds", "2")
    assert project.call("wait", folder.name, "--timeout", "90").returncode == 0
    logs = [log(folder / "tasks" / str(task), 0) for task in (0, 1)]
    assert [text.splitlines()[0].split()[-1] for text in logs] == ["0", "1"]
    (path,) = [line.split(":")[1:] for line in logs[0].splitlines() if line.startswith("path:")]
    home = Path(__file__).resolve().parents[2]
    assert path[0] == str(folder / "code")
    assert str(home) in path
    assert str(home.parent) not in path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["job", "lr=fast"], "config of job:train: lr='fast': expected a valid number"),
        (["job", "epoch=2"], "config of job:train: unknown key 'epoch' (did you mean 'epochs'?)"),
        (["job:anything", "lr=1"], "the config values that **values takes are unknown"),
        (["job:untyped", "lr=0.5"], "parameter 'lr' has no annotation, so it takes all values as one mapping"),
    ],
)
def test_wrong_values_are_refused_at_submission(project: Project, words: list[str], says: str) -> None:
    done = project.call("submit", "--executor", "local", "--no-follow", *words)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.long
def test_sweep_searches_named_values_and_best_command_retrains_them(project: Project) -> None:
    (project.folder / "data").mkdir(exist_ok=True)
    sweep = (
        "{study: named, job: job, metric: score, trials: 2, sampler: grid, fixed: {epochs: 2},"
        " space: {%s: {choice: [0.25, 0.5]}}}"
    )
    project.write("wrong.yaml", sweep % "rate")
    project.write("sweep.yaml", sweep % "lr")
    refused = project.call("sweep", "wrong.yaml", "--executor", "local")
    assert (refused.returncode, "unknown key 'rate'" in refused.stderr) == (2, True)
    assert project.call("sweep", "sweep.yaml", "--executor", "local").returncode == 0
    best = project.json("best", "named")
    assert best["config"] == {"lr": 0.5, "epochs": 2, "data": str(project.folder / "data"), "seed": 0}
    command = [*shlex.split(best["command"]), "--executor", "local"]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert f"values 0.5 2 {project.folder / 'data'} 0" in done.stdout
