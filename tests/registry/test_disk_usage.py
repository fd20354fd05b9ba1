from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.registry.cleanup import Usage, usage
from mgpu_slurm.run_folder.layout import RunFolder
from tests.registry.run_folders import make_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "digits-20260102-030405-abcd")


def test_usage_adds_up_each_part(folder: RunFolder) -> None:
    assert usage(folder) == Usage(checkpoints=11_000, logs=70, tensorboard=300, code=40, other=10)
    assert usage(folder).total == 11_420


def test_usage_of_a_group_includes_its_runs(folder: RunFolder) -> None:
    for task, size in ((0, 8), (1, 16)):
        checkpoint = folder.of_task(task).checkpoint(1)
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.pt").write_bytes(b"x" * size)
        folder.of_task(task).metrics.write_bytes(b"x")
    assert usage(folder) == Usage(checkpoints=11_024, logs=70, tensorboard=300, code=40, other=12)


def test_usage_of_a_missing_folder_is_zero(tmp_path: Path) -> None:
    assert usage(RunFolder(tmp_path / "gone")).total == 0


def test_usage_does_not_follow_links(folder: RunFolder, tmp_path: Path) -> None:
    big = tmp_path / "data.bin"
    big.write_bytes(b"x" * 1_000_000)
    (folder.code / "data.bin").symlink_to(big)
    (folder.code / "project").symlink_to(tmp_path)
    assert usage(folder).code < 1000
