"""What flight recorders left is read, and nothing in it runs code; tests/end_to_end/test_stuck.py has real ones."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.reports import flight_records
from mgpu_slurm.run_folder.layout import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def collective(number: int, group: str = "0", is_p2p: bool = False) -> dict[str, Any]:
    return {"collective_seq_id": number, "process_group": (group, ""), "is_p2p": is_p2p, "profiling_name": "nccl:sum"}


def leave(folder: RunFolder, rank: str, *entries: dict[str, Any]) -> None:
    Path(f"{folder.flight_prefix(1)}{rank}").write_bytes(pickle.dumps({"version": "2.10", "entries": list(entries)}))


def test_ranks_that_did_not_reach_the_collective_are_named(folder: RunFolder) -> None:
    leave(folder, "0", collective(1), collective(2), collective(7, "inner"))
    leave(folder, "1", collective(1), collective(9, is_p2p=True))
    leave(folder, "2", collective(1))
    # gloo counts its own
    leave(folder, "0-cpu", collective(50))
    leave(folder, "3", collective(1), collective(2))
    assert flight_records.lagging(folder, 1) == (
        "ranks 1, 2 never reached nccl:sum (#2 of its group), in which rank 0 was"
    )
    assert flight_records.lagging(folder, 2) is None


def test_no_rank_is_named_if_all_reached_the_same_collective(folder: RunFolder) -> None:
    for rank in ("0", "1"):
        leave(folder, rank, collective(1), collective(2))
    assert flight_records.lagging(folder, 1) is None


def test_rank_that_waits_in_another_group_is_not_named(folder: RunFolder) -> None:
    """Ranks 0 to 2 and 3 to 5 gather at the first of them, and these two at rank 0. Rank 4 does not come."""
    waits = {"retired": False}
    for rank in (1, 2):
        leave(folder, str(rank), collective(3, "at 0"), collective(4, "at 0") | waits)
    leave(folder, "0", collective(3, "at 0"), collective(5, "top") | waits)
    leave(folder, "3", collective(3, "at 3") | waits, collective(2, "top"))
    leave(folder, "4", collective(2, "at 3"))
    leave(folder, "5", collective(3, "at 3"), collective(4, "at 3") | waits)
    assert flight_records.lagging(folder, 1) == "rank 4 never reached nccl:sum (#4 of its group), in which rank 5 was"
    # all wait, each for another one
    leave(folder, "4", collective(2, "at 3") | waits)
    assert flight_records.lagging(folder, 1) == "rank 0 never reached nccl:sum (#4 of its group), in which rank 1 was"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({"entries": [Evil()]})])
def test_invalid_record_is_ignored_and_not_executed(
    content: bytes, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave(folder, "0", collective(2))
    Path(f"{folder.flight_prefix(1)}1").write_bytes(content)
    assert flight_records.lagging(folder, 1) is None
    assert not Path("hacked").exists()
