"""The first two lines that a new user types."""

from __future__ import annotations

import json
import re

from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, log


def test_starter_project_runs_unmodified(project: Project) -> None:
    # a machine without sbatch, and without any other tool
    project.environ["PATH"] = "/no-such-folder"
    written = project.call("init")
    assert (written.returncode, written.stderr) == (0, "")
    assert {path.name for path in project.folder.iterdir()} == {"train.py", "sweep.yaml", "mgpu.yaml"}
    # what it tells to try next is what is done next
    assert re.search(r"submit --nodes 2$", written.stdout, flags=re.MULTILINE)
    done = project.call("submit", "--nodes", "2")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    (folder,) = project.runs.iterdir()
    assert f"COMPLETED  {folder.name}" in done.stdout
    assert json.loads((folder / "result.json").read_text())["result"]["accuracy"] > 0.95
    assert read_spec(RunFolder(folder)).target.function == "train:train"
    assert log(folder, 0).count("accuracy") == read_spec(RunFolder(folder)).config["epochs"]


def test_init_in_a_new_folder_prints_cd_and_refuses_to_overwrite(project: Project) -> None:
    written = project.call("init", "first/project")
    assert written.returncode == 0
    assert "cd first/project && " in written.stdout
    again = project.call("init", "first/project")
    assert (again.returncode, again.stdout) == (2, "")
    assert "train.py, sweep.yaml, mgpu.yaml already exist in 'first/project': " in again.stderr
