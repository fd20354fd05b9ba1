"""Folders of checkpoints: whole or not there, whoever is killed when, and damage is found."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from mgpu_slurm.checkpoints import folder as folders
from mgpu_slurm.checkpoints.rank_record import Content, PassRecord, ProgressRecord, SharedRecord
from mgpu_slurm.checkpoints.writer import Part
from mgpu_slurm.run_folder.checkpoint_names import CheckpointKey, complete_checkpoints, newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def part(
    run: RunFolder, step: int, rank: int = 0, world_size: int = 1, attempt: int = 1, place: int | None = None
) -> Path:
    hidden = folders.hidden(run, step, attempt, 1)
    parts = {f"weight.{rank}": Part(torch.full((3,), float(step)), (0,))}
    progress = ProgressRecord(
        step=step,
        progress=0,
        metrics={},
        next_epoch=1,
        place=None if place is None else [place],
        loader=PassRecord("", active=False, batch=0, passes=0),
    )
    shared = SharedRecord(progress, best=None, objects={}, differing=[])
    folders.write_part(hidden, rank, world_size, Content({"step": step, "loss": 0.1 + 0.2}, shared), parts)
    return hidden


def kept(run: RunFolder, *steps: int) -> None:
    for step in steps:
        folders.publish(part(run, step))


def listed(run: RunFolder) -> list[str]:
    return sorted(os.listdir(run.checkpoints))


def test_checkpoint_is_complete_once_every_rank_has_written(run: RunFolder) -> None:
    for rank in (2, 0):
        hidden = part(run, 7, rank, world_size=3)
        assert not folders.is_whole(hidden)
    part(run, 7, 1, world_size=3)
    assert folders.is_whole(hidden)
    assert complete_checkpoints(run) == []
    final = folders.publish(hidden)
    assert complete_checkpoints(run) == [final]
    assert listed(run) == ["step-000000007"]
    assert folders.ranks(final) == [0, 1, 2]
    assert folders.record(final, 2).content.own == {"step": 7, "loss": 0.1 + 0.2}
    assert folders.problem(final, [0, 1, 2]) is None


def test_saving_a_step_again_replaces_its_checkpoint(run: RunFolder) -> None:
    kept(run, 7)
    hidden = part(run, 7, attempt=2)
    (hidden / "newer").touch()
    assert (folders.publish(hidden) / "newer").exists()
    assert listed(run) == ["step-000000007"]


def test_same_step_at_another_place_in_the_run_is_kept_separately(run: RunFolder) -> None:
    for attempt, place in enumerate([1, 2, 2, 1], start=1):
        folders.publish(part(run, 7, attempt=attempt, place=place))
    kept(run, 8)
    assert [path.name for path in complete_checkpoints(run)] == [
        "step-000000007",
        "step-000000007.2",
        "step-000000007.3",
        "step-000000008",
    ]
    # version 0.1 reads names of digits only
    assert [path.name for path in complete_checkpoints(run) if re.fullmatch(r"step-(\d{9,})", path.name)] == [
        "step-000000007",
        "step-000000008",
    ]
    folders.point_to_best(run, CheckpointKey(7, 2))
    folders.trim(run, keep=1, also=CheckpointKey(7, 2))
    assert listed(run) == ["best", "step-000000007.2", "step-000000008"]
    assert (run.checkpoints / "best").resolve().name == "step-000000007.2"


def test_interrupted_replacement_of_a_numbered_checkpoint_is_finished(run: RunFolder) -> None:
    for place in (1, 2):
        folders.publish(part(run, 7, place=place))
    # killed as it took the place of the second
    os.rename(run.checkpoint(7, 2), run.checkpoints / ".step-000000007.2.before")
    part(run, 7, attempt=2, place=2)
    folders.publish_leftover(run)
    assert listed(run) == ["step-000000007", "step-000000007.2"]
    assert newest_checkpoint(run) == run.checkpoint(7, 2)
    assert folders.set_aside(run.checkpoint(7, 2)).name == "damaged-step-000000007.2"
    assert newest_checkpoint(run) == run.checkpoint(7)


def test_leftover_checkpoints_are_published_if_complete_else_removed(run: RunFolder) -> None:
    """As after a kill between any two steps of a save."""
    kept(run, 5)
    part(run, 7)
    part(run, 9, rank=1, world_size=2)
    torn = folders.hidden(run, 11, 1, 1)
    torn.mkdir()
    (torn / "rank-00000.json").write_text('{"format": 1, "world_')
    # killed as the same step took the place of another one
    os.rename(run.checkpoint(5), run.checkpoints / ".step-000000005.before")
    part(run, 5, attempt=2)
    folders.publish_leftover(run)
    assert listed(run) == ["step-000000005", "step-000000007"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("rank-00001.safetensors", lambda content: content[:-1]),
        ("rank-00001.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("rank-00001.json", lambda content: content.replace(b'"step": 7', b'"step": 8')),
        ("rank-00001.json", lambda content: content[: len(content) // 2]),
        ("rank-00001.json", lambda content: b"\xff" + content),
        ("rank-00001.json", lambda content: b"[]"),
        ("rank-00001.safetensors", None),
        ("rank-00001.json", None),
    ],
    ids=["truncated", "flipped bit", "changed digit", "half", "not UTF-8", "not an object", "no tensors", "no record"],
)
def test_damaged_file_is_detected(run: RunFolder, file: str, change: object) -> None:
    part(run, 7, 0, world_size=2)
    final = folders.publish(part(run, 7, 1, world_size=2))
    content = (final / file).read_bytes()
    (final / file).unlink()
    if callable(change):
        (final / file).write_bytes(change(content))
    assert folders.problem(final, [0]) is None
    assert (folders.problem(final, [0, 1]) or "").startswith("rank-00001")


def test_checkpoint_set_aside_is_no_longer_read(run: RunFolder) -> None:
    kept(run, 5, 7)
    aside = folders.set_aside(run.checkpoint(7))
    assert newest_checkpoint(run) == run.checkpoint(5)
    assert json.loads((aside / "rank-00000.json").read_text())["own"]["step"] == 7


def test_trim_keeps_the_newest_and_one_extra(run: RunFolder) -> None:
    kept(run, 1, 2, 3, 10, 9)
    folders.trim(run, keep=2, also=CheckpointKey(2))
    assert listed(run) == ["step-000000002", "step-000000009", "step-000000010"]


def test_truncated_part_is_overwritten(run: RunFolder) -> None:
    hidden = folders.hidden(run, 7, 1, 1)
    hidden.mkdir(parents=True)
    (hidden / "rank-00000.safetensors").write_bytes(b"torn")
    part(run, 7)
    assert folders.problem(hidden, [0]) is None
