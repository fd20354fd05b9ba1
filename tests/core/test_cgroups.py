"""Quotas of CPU time count as fewer cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu_slurm.core import cgroups
from mgpu_slurm.core.processes import cores, cores_of_machine

V2 = "0::/job/step\n"
V1 = "3:cpuset:/job\n2:cpu,cpuacct:/job/step\n"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2, {}, None),
        (V2, {"job/step/cpu.max": "max 100000\n"}, None),
        (V2, {"job/step/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "50000 100000\n"}, 0.5),
        (V2, {"job/step/cpu.max": "300000 100000\n", "job/cpu.max": "200000 100000\n"}, 2.0),
        (V2, {"unified/job/step/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"job/step/cpu.max": "nonsense"}, None),
        ("0::/../../other\n", {"cpu.max": "150000 100000\n"}, 1.5),
        (V1, {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}, None),
        (V1, {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}, 2.5),
        (V1, {"cpu/job/cpu.cfs_quota_us": "250000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 2.5),
        (V1, {"cpuset/job/cpu.cfs_quota_us": "250000\n", "cpuset/job/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_smallest_quota_on_the_way_to_the_root_counts(
    membership: str, files: dict[str, str], expected: float | None, root: Path
) -> None:
    (root / "membership").write_text(membership)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert cgroups.cpu_quota() == expected


def test_process_without_control_groups_has_no_quota() -> None:
    assert cgroups.cpu_quota() is None


def test_part_of_a_core_counts_as_one(root: Path) -> None:
    (root / "membership").write_text(V2)
    (root / "cpu.max").write_text("50000 100000\n")
    assert (cores(), cores_of_machine()) == (1, 1)
    (root / "cpu.max").write_text("100000000 100000\n")
    assert (cores(), cores_of_machine()) == (len(os.sched_getaffinity(0)), os.cpu_count())


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real control group with a quota of one core."""
    for controller, files in (("cpu", {"cpu.cfs_quota_us": "100000"}), ("", {"cpu.max": "100000 100000"})):
        folder = Path("/sys/fs/cgroup") / controller / f"mgpu-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, text in files.items():
                (folder / name).write_text(text)
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_real_quota_is_found(limited: Path) -> None:
    code = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()));"
        "from mgpu_slurm.core.processes import cores; print(cores())"
    )
    found = subprocess.run([sys.executable, "-c", code, str(limited)], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"
