"""Files are written whole or not at all, and a torn last line hurts nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.run_folder import layout


def test_torn_last_line_is_skipped_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    files.append_jsonl(file, {"a": 1})
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"a": 2, "long": "' + b"x" * 10_000)
    assert list(files.read_jsonl(file)) == [{"a": 1}]
    files.append_jsonl(file, {"a": 3})
    assert list(files.read_jsonl(file)) == [{"a": 1}, {"a": 3}]
    file.write_bytes(b"torn from the start")
    files.append_jsonl(file, {"a": 4})
    assert list(files.read_jsonl(file)) == [{"a": 4}]


def test_missing_file_has_no_lines_and_no_value(tmp_path: Path) -> None:
    assert list(files.read_jsonl(tmp_path / "no.jsonl")) == []
    assert files.read_json(tmp_path / "no.json") is None


def test_failed_write_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    files.write_whole(file, "old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_whole(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(("readers", "mode"), [("owner", 0o700), ("group", 0o750)])
def test_permissions_of_a_run_folder_follow_its_readers(readers: str, mode: int, tmp_path: Path) -> None:
    folder = layout.RunFolder(tmp_path / "r")
    folder.create(readers)
    assert folder.path.stat().st_mode & 0o777 == mode
