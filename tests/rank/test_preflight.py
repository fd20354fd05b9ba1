"""What a rank finds around it, compared with what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.rank import preflight
from mgpu_slurm.rank.preflight import Versions
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.run_folder.layout import RunFolder


def node(python: str = "3.11.2", **packages: str) -> Versions:
    return Versions(python, packages)


@pytest.mark.parametrize(
    ("here", "warning"),
    [
        (node(torch="2.13.0", numpy="2.1"), None),
        (node(torch="2.13.0", numpy="2.1", extra="1.0"), None),
        (node(torch="2.12.0+cpu", numpy="2.1"), "this node has torch 2.12.0+cpu instead of 2.13.0"),
        (node(torch="2.13.0"), "this node has no numpy (2.1 at the submission)"),
        (
            node("3.10.1", torch="2.12.0", numpy="2.0"),
            "this node has Python 3.10.1 instead of 3.11.2, torch 2.12.0 instead of 2.13.0, numpy 2.0 instead of 2.1",
        ),
    ],
    ids=["same", "more than needed", "different torch", "missing", "several differences"],
)
def test_versions_that_differ_from_the_submission_are_named(here: Versions, warning: str | None) -> None:
    assert preflight.version_warning(node(torch="2.13.0", numpy="2.1"), here) == warning


def test_many_version_differences_are_abbreviated() -> None:
    names = [f"package{number}" for number in range(9)]
    submitted, here = node(**dict.fromkeys(names, "1.0")), node(**dict.fromkeys(names, "2.0"))
    warning = preflight.version_warning(submitted, here)
    assert warning is not None
    assert warning.count("instead of") == preflight.SHOWN_DIFFERENCES
    assert warning.endswith("package4 2.0 instead of 1.0 and 4 more")


def test_missing_submission_record_gives_no_version_warning() -> None:
    assert preflight.version_warning(None, node()) is None


@pytest.mark.parametrize(
    ("asked", "ranks", "usable", "on_machine", "warning"),
    [
        (4, 2, 4, 16, None),
        (4, 2, 16, 16, None),
        (4, 1, 2, 16, "requested 4 cores per rank, but this rank may use 2"),
        (4, 2, 4, 4, "requested 4 cores per rank, but 2 ranks share the 4 of this node"),
    ],
    ids=["own cores", "enough for all", "too few", "shared"],
)
def test_fewer_cores_than_requested_is_a_warning(
    asked: int, ranks: int, usable: int, on_machine: int, warning: str | None
) -> None:
    assert preflight.cores_warning(asked, ranks, usable, on_machine) == warning


@pytest.mark.parametrize(
    ("asked", "visible", "warning"),
    [
        (None, 0, None),
        (0, 0, None),
        (4, 4, None),
        (4, 1, None),
        (1, 0, "requested 1 GPU per node, but torch sees none: running on the CPU"),
        (4, 0, "requested 4 GPUs per node, but torch sees none: running on the CPU"),
    ],
)
def test_missing_requested_gpus_are_a_warning(asked: int | None, visible: int, warning: str | None) -> None:
    assert preflight.missing_gpus_warning(asked, visible) == warning


def test_ranks_sharing_a_gpu_are_each_warned() -> None:
    gpus: list[preflight.RankGpu] = [("n1", "GPU-a"), ("n1", "GPU-b"), ("n1", "GPU-a"), ("n2", "GPU-c")]
    shared = "ranks 0,2 compute on the same GPU, GPU-a of n1, and communicate without NCCL"
    assert preflight.shared_gpu_warnings(gpus) == {0: shared, 2: shared}


def test_ranks_without_gpus_are_not_warned_about_sharing() -> None:
    assert preflight.shared_gpu_warnings([("n1", None), ("n1", None)]) == {}


def test_warning_is_printed_and_saved_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    preflight.warn(["few cores", "old torch"], folder, 2, RankInfo(3, 4, 1, 2, 1, "n2"))
    assert capsys.readouterr().out == "mgpu_slurm: warning: few cores\nmgpu_slurm: warning: old torch\n"
    assert [line["text"] for line in read_jsonl(folder.rank_warnings(2, 3))] == ["few cores", "old torch"]


def test_no_warnings_write_no_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    preflight.warn([], folder, 1, RankInfo())
    assert list(folder.logs.iterdir()) == []


def test_warning_that_cannot_be_saved_is_still_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight.warn(["few cores"], RunFolder(tmp_path / "gone"), 1, RankInfo())
    assert "few cores" in capsys.readouterr().out
