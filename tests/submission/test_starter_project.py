from __future__ import annotations

import re
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.submission import cluster_file, starter_project
from mgpu_slurm.submission.cluster_file import Cluster, ClusterFile

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_files_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_starter_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "project"
    assert starter_project.write(folder) == [folder / "train.py", folder / "sweep.yaml", folder / "mgpu.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == ["mgpu.yaml", "sweep.yaml", "train.py"]


def test_starter_cluster_file_defines_no_cluster(tmp_path: Path) -> None:
    starter_project.write(tmp_path)
    assert cluster_file.load(tmp_path) == ClusterFile(job="train")


def test_example_cluster_loads_when_uncommented(tmp_path: Path) -> None:
    starter_project.write(tmp_path)
    path = tmp_path / "mgpu.yaml"
    before, example = path.read_text().split("# clusters:\n")
    path.write_text(f"{before}clusters:\n{re.sub('^# ', '', example, flags=re.MULTILINE)}")
    hpc = cluster_file.load(tmp_path).named(None)
    assert hpc.flags["time"] == "4:00:00"
    assert hpc.signal == "USR2@120"
    # what the example says of them is what holds where nothing is said
    unsaid = Cluster()
    assert (hpc.max_requeues, hpc.readable_by, hpc.snapshot_limit) == (
        unsaid.max_requeues,
        unsaid.readable_by,
        unsaid.snapshot_limit,
    )


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mgpu.yaml").write_text("job: mine\n")
    with pytest.raises(UserError, match=r"^mgpu.yaml already exists in .*, or move it$"):
        starter_project.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mgpu.yaml"]
    assert (tmp_path / "mgpu.yaml").read_text() == "job: mine\n"


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/project.* cannot be written"):
        starter_project.write(tmp_path / "file" / "project")
