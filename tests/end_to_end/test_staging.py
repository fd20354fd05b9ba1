"""`submit --stage`, as a user runs it: jobs and scripts read the copy on the disk of their node."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import Project, log

TRAIN = """
    import sys
    from mgpu_slurm import staged

    def train(run, data: str = "data"):
        path = staged(data)
        print("reads", path, (path / "a.txt").read_text())

    if __name__ == "__main__":
        train(None, sys.argv[1])
"""


@pytest.fixture
def disk(project: Project) -> Iterator[Path]:
    """The disk of the nodes."""
    if project.folder.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("/dev/shm is the same file system")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    project.write("train.py", TRAIN)
    project.write("data/a.txt", "cats")
    yield folder
    shutil.rmtree(folder)


def test_job_reads_a_copy_that_its_ranks_share(project: Project, disk: Path) -> None:
    project.write("mgpu.yaml", f"clusters: {{local: {{stage-to: {disk}/$USER_FOLDER}}}}\n")
    project.environ["USER_FOLDER"] = "me"
    folder, state = project.run("train.py", "--nodes", "2", "--stage", "data")
    logs = [log(folder, rank) for rank in range(2)]
    assert state["state"] == "COMPLETED", logs
    assert all(f"reads {disk}/me/mgpu-stage-" in text and text.rstrip().endswith("cats") for text in logs)
    assert sum(text.count("staged ") for text in logs) == 1
    assert [*disk.rglob("a.txt")] == []


def test_script_reads_a_copy(project: Project, disk: Path) -> None:
    project.environ["TMPDIR"] = str(disk)
    folder, state = project.run("--stage", "data", "--", "python", "train.py", "data")
    assert state["state"] == "COMPLETED", log(folder, 0)
    assert f"reads {disk}/mgpu-stage-" in log(folder, 0)


def test_data_that_does_not_exist_is_refused(project: Project, disk: Path) -> None:
    refused = project.call("submit", "train.py", "--stage", "data", "--stage", "dta")
    assert refused.returncode == 2
    assert refused.stderr == "mgpu-slurm: --stage dta: no such file or folder\n"
    assert not project.runs.exists()
