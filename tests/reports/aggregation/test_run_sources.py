from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.reports.aggregation.run_sources import sources
from mgpu_slurm.run_folder.layout import RunFolder
from tests.metrics.event_files import ended_run, opened, scalar, write


def test_links_are_followed_without_cycles_and_hidden_folders_skipped(tmp_path: Path) -> None:
    for name in ("elsewhere/run", "logs/a", "logs/.half/b"):
        write(tmp_path / name / "events.out.tfevents.1.h", [scalar("loss", 1, 0.5)])
    (tmp_path / "logs" / "link").symlink_to(tmp_path / "elsewhere" / "run")
    (tmp_path / "logs" / "a" / "circle").symlink_to(tmp_path / "logs")
    assert [source.name for source in sources([str(tmp_path / "logs")])] == ["a", "link"]


def test_own_and_foreign_runs_are_found_by_their_folder_or_its_parent(tmp_path: Path) -> None:
    ours = ended_run(tmp_path / "runs" / "ours")
    write(ours / "tensorboard" / "events.out.tfevents.10.a", [opened(1.0), scalar("loss", 0, 1.0)])
    for name in (str(ours), str(tmp_path / "runs")):
        (found,) = sources([name])
        assert (found.name, found.path, found.own) == ("ours", ours, RunFolder(ours))
    # others have a spec.yaml too
    other = tmp_path / "others" / "mine"
    write(other / "events.out.tfevents.10.a", [opened(1.0), scalar("loss", 0, 1.0)])
    (other / "spec.yaml").write_text("model: mine\n")
    for folder in (tmp_path / "others", other):
        (found,) = sources([str(folder)])
        assert (found.name, found.path, found.own) == ("mine", other, None)


def test_run_of_a_group_is_named_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    group = RunFolder(ended_run(tmp_path / "runs" / "group", tasks=2))
    (found,) = sources(["group/1"])
    assert (found.name, found.place, found.own) == ("group/1", "group", group.of_task(1))
    # as a path too
    assert [found.name for found in sources([str(group.path)])] == ["group/0", "group/1"]


def test_trials_of_other_programs_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "ray" / "trials" / "3"
    write(folder / "events.out.tfevents.10.a", [opened(1.0), scalar("loss", 0, 1.0)])
    for name in (str(folder), f"{folder}/"):
        (found,) = sources([name])
        assert (found.path, found.own) == (folder, None)


def test_empty_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has neither a run nor event files: name another"):
        sources([str(tmp_path)])
