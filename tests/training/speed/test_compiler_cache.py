"""The folder for compiled code is of this user alone, or the attempt has one of its own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from mgpu_slurm.training.speed import compiler_cache


@pytest.fixture(autouse=True)
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    (tmp_path / "local").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(compiler_cache, "PLACE", tmp_path / "local")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "3"}) as environ:
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
            environ.pop(variable, None)
        yield environ


def own(tmp_path: Path) -> Path:
    return tmp_path / "local" / f"mgpu_slurm-{os.geteuid()}"


def test_folder_is_created_for_this_user_and_used_again(tmp_path: Path, environ: dict[str, str]) -> None:
    for _ in range(2):
        environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        with compiler_cache.in_use() as warning:
            assert warning is None
        assert environ["TORCHINDUCTOR_CACHE_DIR"] == str(own(tmp_path))
    assert stat.S_IMODE(own(tmp_path).stat().st_mode) == 0o700
    assert environ["TRITON_CACHE_DIR"] == str(own(tmp_path) / "triton")
    assert environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"
    assert not list(own(tmp_path).iterdir())


def test_folder_that_the_user_has_set_is_used(tmp_path: Path, environ: dict[str, str]) -> None:
    environ["TORCHINDUCTOR_CACHE_DIR"] = "/elsewhere"
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with compiler_cache.in_use() as warning:
        assert warning is None
    assert (environ["TORCHINDUCTOR_CACHE_DIR"], environ["TORCHINDUCTOR_COMPILE_THREADS"]) == ("/elsewhere", "1")
    assert not own(tmp_path).exists()


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("open", "is open to other users (remove it)"),
        ("link", "belongs to another user"),
        ("file", "cannot be used (File exists)"),
        ("of another", "belongs to another user"),
        ("full", "cannot be used ("),
        ("none", "cannot be used (No such file or directory)"),
    ],
)
def test_folder_that_is_not_safe_is_not_used(
    made: str, why: str, tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own(tmp_path)
    if made == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif made == "link":
        folder.symlink_to(tmp_path / "temporary")
    elif made == "file":
        folder.touch()
    elif made == "of another":
        folder.mkdir(mode=0o700)
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
        folder.rename(own(tmp_path))
    elif made == "full":
        monkeypatch.setattr(compiler_cache, "ROOM", 1 << 62)
    else:
        folder.parent.rmdir()
    with compiler_cache.in_use() as warning:
        assert warning is not None
        assert warning.startswith(f"{own(tmp_path)} {why}")
        assert warning.endswith(": compiled code is kept for this attempt only")
        used = Path(environ["TORCHINDUCTOR_CACHE_DIR"])
        assert used.parent == tmp_path / "temporary"
        assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert not used.exists()
    assert "TORCHINDUCTOR_CACHE_DIR" not in environ
