from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry.cleanup import delete_checkpoints, delete_run, usage
from mgpu_slurm.run_folder.layout import RunFolder
from tests.registry.run_folders import make_run

NAME = "digits-20260102-030405-abcd"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / NAME)


def test_delete_run_removes_everything_of_that_run_only(folder: RunFolder, tmp_path: Path) -> None:
    other = make_run(tmp_path / "runs" / "other")
    before = usage(other)
    delete_run(folder)
    assert os.listdir(tmp_path / "runs") == ["other"]
    assert usage(other) == before


def test_deleting_twice_succeeds(folder: RunFolder) -> None:
    delete_checkpoints(folder)
    delete_checkpoints(folder)
    delete_run(folder)
    delete_run(folder)
    assert not folder.path.exists()


def test_delete_checkpoints_keeps_the_rest(folder: RunFolder) -> None:
    before = usage(folder)
    names = set(os.listdir(folder.path))
    delete_checkpoints(folder)
    assert set(os.listdir(folder.path)) == names - {"checkpoints"}
    assert usage(folder).total == before.total - before.checkpoints


def test_delete_does_not_follow_links(folder: RunFolder, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "kept").touch()
    (folder.code / "scratch").symlink_to(scratch)
    delete_checkpoints(folder)
    folder.checkpoints.symlink_to(scratch)
    delete_checkpoints(folder)
    assert not folder.checkpoints.is_symlink()
    delete_run(folder)
    assert (scratch / "kept").exists()


def test_interrupted_deletion_is_finished_by_the_next(folder: RunFolder, tmp_path: Path) -> None:
    for name in (NAME, "another"):
        half = tmp_path / "runs" / f".deleted-{name}" / "checkpoints"
        half.mkdir(parents=True)
        (half / "model.pt").touch()
    delete_run(folder)
    assert os.listdir(tmp_path / "runs") == []


def test_concurrent_deletions_of_one_run_all_succeed(folder: RunFolder) -> None:
    for number in range(300):
        (folder.checkpoints / f"part-{number}").touch()
    problems: list[BaseException] = []

    def delete() -> None:
        try:
            delete_run(folder)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=delete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert os.listdir(folder.path.parent) == []


def test_file_that_cannot_be_deleted_is_named(folder: RunFolder, ordinary_user: None) -> None:
    folder.checkpoint(1).chmod(0o500)
    with pytest.raises(UserError, match="Permission denied") as caught:
        delete_checkpoints(folder)
    # Python 3.13.0 names the folder of the file
    assert ("/step-000000001" if sys.version_info[:3] == (3, 13, 0) else "model.pt") in str(caught.value)


def test_runs_folder_that_is_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="Not a directory") as caught:
        delete_run(RunFolder(tmp_path / "runs" / NAME))
    assert "\n" not in str(caught.value)
