"""The program of one who stands in a folder of strangers, such as /tmp, imports nothing from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import Project, log, make_hostile, make_project, require

PROGRAM = str(Path(sys.executable).with_name("mgpu-slurm"))

JOB = """
    import multiprocessing
    import os
    import sys

    import beside
    import library
    import torch

    def train(run, lr=0.1):
        print("imported from", os.path.dirname(os.path.dirname(torch.__file__)) in sys.path)
        # a process that is started afresh finds the job's code, too
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            run.report(1, score=lr + pool.apply(beside.one))

    def space(trial):
        return {"lr": trial.suggest_float("lr", 0, 1)}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("safe"))
    project.write("job.py", JOB)
    project.write("beside.py", "def one(): return 1\n")
    project.write("src/library.py", "")
    project.write("computed.py", "import os\nimport torch\ndef train(run, lr=float(os.getpid())): pass\n")
    return project


@pytest.fixture(scope="module")
def strangers(project: Project) -> Path:
    folder = project.folder.parent / "strangers"
    folder.mkdir()
    return folder


@pytest.fixture
def mark(strangers: Path) -> Path:
    return make_hostile(strangers)


def called(project: Project, strangers: Path, *words: str) -> str:
    environ = os.environ | project.environ | {"MGPU_RUNS": str(project.runs)}
    done = subprocess.run(
        [PROGRAM, *words], cwd=strangers, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_job_submitted_from_untrusted_folder_imports_nothing_from_it(
    project: Project, strangers: Path, mark: Path
) -> None:
    """Neither does its supervisor, a rank, or a process that the job spawns."""
    called(project, strangers, "submit", "--executor", "local", "--ntasks-per-node", "2", f"{project.folder}/job.py")
    assert not mark.exists()
    (folder,) = project.runs.glob("job-*")
    assert "imported from True" in log(folder, 1)


def test_command_check_and_doctor_import_nothing_from_untrusted_folder(
    project: Project, strangers: Path, mark: Path
) -> None:
    # the snapshot of that folder is where the command stands
    called(project, strangers, "submit", "--executor", "local", "--ntasks-per-node", "2", "--", "true")
    checked = ("submit", "--executor", "local", "--seeds", "1", "--dry-run", f"{project.folder}/computed.py", "seed=1")
    environ = os.environ | project.environ
    done = subprocess.run([PROGRAM, *checked], cwd=strangers, env=environ, capture_output=True, text=True, check=False)
    assert "unknown key 'seed'" in done.stderr
    called(project, strangers, "doctor")
    assert not mark.exists()


def test_sweep_submitted_from_untrusted_folder_imports_nothing_from_it(
    project: Project, strangers: Path, mark: Path
) -> None:
    sweep = project.write(
        "sweep.yaml",
        f"{{study: safe, job: '{project.folder}/job.py', metric: score, trials: 1, space: 'job:space'}}",
    )
    called(project, strangers, "sweep", str(sweep), "--executor", "local")
    assert not mark.exists()


@pytest.mark.parametrize(("name", "advice"), [("mgpu.yaml", "use your own copy"), ("runs", "set MGPU_RUNS")])
def test_cluster_file_or_runs_folder_of_another_user_is_refused(
    project: Project, tmp_path: Path, name: str, advice: str
) -> None:
    require(None if os.geteuid() == 0 else "it is not root, who can give files to others")
    if name == "runs":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(f"clusters: {{local: {{setup: ['touch {tmp_path}/was-run']}}}}")
    os.chown(tmp_path / name, 65534, 65534)
    words = ("submit", "--executor", "local", "--", "true")
    environ = os.environ | project.environ
    done = subprocess.run([PROGRAM, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"'{tmp_path / name}' belongs to nobody, who could" in line
    assert advice in line
    assert not (tmp_path / "was-run").exists()
    # a folder that is named is trusted
    if name == "runs":
        named = environ | {"MGPU_RUNS": str(tmp_path / name)}
        subprocess.run([PROGRAM, *words], cwd=tmp_path, env=named, check=True, capture_output=True)
