"""What is installed, read from folder names."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm import installed


def test_first_folder_of_the_search_path_wins(tmp_path: Path) -> None:
    for place, name in (("first", "My_Pkg-2.0+cpu.dist-info"), ("second", "my.pkg-1.0.dist-info")):
        (tmp_path / place / name).mkdir(parents=True)
    (tmp_path / "second" / "old-0.3-py3.11.egg-info").touch()
    (tmp_path / "second" / "torch").mkdir()
    paths = [str(tmp_path / "absent.zip"), str(tmp_path / "first"), str(tmp_path / "second")]
    assert installed.packages(paths) == {"my-pkg": "2.0+cpu", "old": "0.3"}


def test_the_programs_own_folder_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "mine-1.0.egg-info").mkdir(parents=True)
    (tmp_path / "site" / "theirs-2.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path / "project"), str(tmp_path / "site")])
    assert installed.facts()["packages"] == {"theirs": "2.0"}
