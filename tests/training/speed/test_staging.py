"""Copies of data sets on the disk of a node: made once, complete, and deleted with the last process that holds them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.training.speed import staging
from mgpu_slurm.training.speed.staging import copies_of, staged

OTHER_DISK = Path("/dev/shm")
FORKS = multiprocessing.get_context("fork")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The disk of a node, which is another one than that of the data."""
    folder = Path(tempfile.mkdtemp(dir=OTHER_DISK))
    monkeypatch.setenv("NODE_DISK", str(folder))
    monkeypatch.delenv(staging.VARIABLE, raising=False)
    monkeypatch.setenv(staging.START_VARIABLE, str(tmp_path / "project"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    if tmp_path.stat().st_dev == OTHER_DISK.stat().st_dev:
        pytest.skip(f"{OTHER_DISK} is the same file system")
    folder = tmp_path / "project" / "data"
    (folder / "train" / "cats").mkdir(parents=True)
    for number in range(20):
        (folder / "train" / "cats" / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    (folder / "labels.csv").write_text("cats\n")
    return folder


@contextmanager
def held(data: Path) -> Iterator[Path]:
    """Return the path of the copy."""
    with copies_of([str(data)], "$NODE_DISK"):
        yield staged(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left(disk: Path) -> list[str]:
    """Return the copies on the disk; locks remain."""
    return [path.name for path in disk.glob("mgpu-stage-*/*") if path.suffix != ".lock"]


def test_copy_is_used_in_the_block_and_deleted_after_it(data: Path, disk: Path) -> None:
    with held(data) as copy:
        assert copy.is_relative_to(disk)
        assert contents(copy) == contents(data)
        # as the job names them, from where it was submitted
        assert staged("data/train") == copy / "train"
        assert staged("data/../data/labels.csv").read_text() == "cats\n"
        assert staged("other") == data.parent / "other"
        assert staged(data.parent / "data2") == data.parent / "data2"
    assert left(disk) == []
    assert (disk / f"mgpu-stage-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_single_file_and_links_are_copied(data: Path, disk: Path) -> None:
    (data / "all").symlink_to(data / "train")
    (data / "train" / "circle").symlink_to(data)
    with held(data) as copy:
        assert len(contents(copy / "all")) == 20
        assert not any(path.is_symlink() for path in copy.rglob("*"))
    with held(data / "labels.csv") as copy:
        assert (copy.name, copy.read_text()) == ("labels.csv", "cats\n")


def test_data_on_the_disk_of_the_node_is_not_copied(data: Path, disk: Path) -> None:
    own = disk / "data"
    own.mkdir()
    with copies_of([str(own)], str(disk)):
        assert staged(own) == own
    assert left(disk) == []


def hold(data: Path, pipe: Connection) -> None:
    with held(data) as copy:
        pipe.send((str(copy), contents(copy)))
        pipe.recv()


@contextmanager
def holders(data: Path, number: int) -> Iterator[list[tuple[Connection, int]]]:
    """Start processes that hold the copy, and wait until they have it; yield pipes that end them, and their ids."""
    started = []
    for _ in range(number):
        here, there = FORKS.Pipe()
        process = FORKS.Process(target=hold, args=(data, there))
        process.start()
        started.append((here, process))
    expected = contents(data)
    assert [pipe.recv()[1] for pipe, _ in started] == [expected] * number
    yield [(pipe, process.pid or 0) for pipe, process in started]
    for pipe, process in started:
        if process.is_alive():
            pipe.send("end")
        process.join()


def leave(data: Path) -> None:
    """Leave a copy, as a job does that is killed."""
    with holders(data, 1) as ((_, pid),):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_ranks_of_a_node_share_one_copy_and_the_last_one_deletes_it(
    data: Path, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with holders(data, 4) as started:
        assert len(left(disk)) == 1
        started[0][0].send("end")
        with held(data) as copy:
            assert contents(copy) == contents(data)
        assert len(left(disk)) == 1
    assert left(disk) == []
    assert capfd.readouterr().out.count("staged ") == 1


def test_copy_of_a_killed_job_is_brought_up_to_date_or_deleted(data: Path, disk: Path) -> None:
    leave(data)
    assert len(left(disk)) == 1
    (data / "labels.csv").write_text("dogs\n")
    (data / "train" / "cats" / "3.bin").unlink()
    with held(data) as copy:
        assert contents(copy) == contents(data)

    leave(data)
    (remains,) = left(disk)
    with held(data / "labels.csv"):
        assert remains not in left(disk)
    assert left(disk) == []


def test_copy_that_failed_is_made_by_the_next_rank(data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:

        def fail(source: Path, target: Path) -> None:
            target.write_bytes(b"half")
            raise OSError(5, "Input/output error", str(source))

        patched.setattr(staging.shutil, "copy2", fail)
        with pytest.raises(UserError, match=r"--stage .*data: .*Input/output error"), held(data):
            pass
    with held(data) as copy:
        assert contents(copy) == contents(data)


def test_changed_files_replace_older_versions(data: Path, disk: Path) -> None:
    """Read-only ones, and what was a folder, too."""
    (data / "empty").mkdir()
    (data / "labels.csv").chmod(0o444)
    leave(data)
    (data / "labels.csv").unlink()
    (data / "labels.csv").write_text("dogs\n")
    shutil.rmtree(data / "train" / "cats")
    (data / "train" / "cats").write_text("none")
    with held(data) as copy:
        assert contents(copy) == contents(data)
    with held(data / "empty") as copy:
        assert copy.is_dir()


@pytest.mark.parametrize("base", ["$NOT_SET/data", "relative"])
def test_folder_that_is_no_absolute_path_on_the_node_is_refused(data: Path, disk: Path, base: str) -> None:
    with pytest.raises(UserError, match=r"stage-to .*: name a folder of the nodes"), copies_of([str(data)], base):
        pass


def test_folder_on_a_disk_that_the_node_has_not_is_refused(data: Path, disk: Path) -> None:
    missing = Path("/mgpu-no-such-disk")
    words = rf"{missing} does not exist on .*: set stage-to in mgpu\.yaml"
    with pytest.raises(UserError, match=words), copies_of([str(data)], str(missing / "stage")):
        pass
    assert not missing.exists()


def test_copy_that_was_being_deleted_is_not_complete(data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        # as if it had been killed
        patched.setattr(staging.shutil, "rmtree", lambda *_, **__: None)
        with held(data) as copy:
            pass
    next(copy.rglob("*.bin")).unlink()
    with held(data) as copy:
        assert contents(copy) == contents(data)


def test_data_larger_than_the_disk_is_refused(data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(free=5000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: full)
    words = r"data: 20.0 KB do not fit on .* of .*, which has 5.0 KB left: set stage-to in mgpu.yaml"
    with pytest.raises(UserError, match=words), held(data):
        pass


def test_folder_of_another_user_is_refused(data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = disk / f"mgpu-stage-{os.getuid()}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345) if os.getuid() == 0 else pytest.skip("only root can give a folder away")
    with pytest.raises(UserError, match=r"belongs to .*: set stage-to in mgpu\.yaml"), held(data):
        pass


def test_missing_data_is_refused(data: Path, disk: Path) -> None:
    with pytest.raises(UserError, match=r"--stage .*/none: No such file or directory on "), held(data / "none"):
        pass
