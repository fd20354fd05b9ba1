"""What is made of this machine's packages, torch and folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.doctor import machine_checks
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.doctor.machine_checks import Mount, TorchFacts

REQUIREMENTS = ["click>=8.1", "PyYAML>=6.0", "torch>=2.13", "numpy", 'pytest>=9.0; extra == "dev"']


def seen(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in found]


def test_sufficient_package_versions_are_ok() -> None:
    packages = {"click": "8.1", "pyyaml": "6.0.3", "torch": "2.13.0+cpu"}
    found = list(machine_checks.package_findings(REQUIREMENTS, packages))
    assert seen(found) == [("ok", "packages: all 3 required ones present")]


def test_missing_and_outdated_packages_are_named() -> None:
    found = list(machine_checks.package_findings(REQUIREMENTS, {"click": "7.9.1", "torch": "2.9.1"}))
    words = (
        "packages: click 7.9.1 (needs 8.1 or newer), no PyYAML (needs 6.0 or newer), torch 2.9.1 (needs 2.13 or newer)"
    )
    assert seen(found) == [("failed", words)]


def test_this_environment_meets_the_requirements() -> None:
    assert [finding.level for finding in machine_checks.python_findings()] == ["ok", "ok"]


MOUNTINFO = r"""
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 24 0:27 / /tmp rw,nosuid - tmpfs tmpfs rw
40 24 0:41 / /home rw,relatime shared:9 master:2 - nfs4 server:/export/home rw,vers=4.2
41 40 0:42 / /home/a\040b rw - lustre 10.0.0.1@o2ib:/scratch rw
42 31 0:43 / /tmp rw - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("path", "type_"),
    [
        ("/opt/python", "ext4"),
        ("/home/you/runs", "nfs4"),
        ("/home/a b/runs", "lustre"),
        ("/homes", "ext4"),
        ("/tmp/x", "xfs"),
    ],
)
def test_file_system_type_is_that_of_the_mount_point(path: str, type_: str) -> None:
    assert machine_checks.file_system(Path(path), machine_checks.parse_mounts(MOUNTINFO)) == type_


def test_folders_on_local_disks_are_named_with_their_file_system(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    mounts = [Mount("/", "ext4"), Mount(str(tmp_path / "scratch"), "lustre")]
    places = {"the environment": tmp_path, "this folder": tmp_path, "the runs folder": tmp_path / "scratch"}
    local, shared = machine_checks.shared_findings(places, mounts, will_be_proven=False)
    assert (local.level, shared.level) == ("warning", "ok")
    words = f"the environment ({tmp_path}), this folder ({tmp_path}): on ext4 of this machine, which nodes may not see"
    assert local.text == words
    assert shared.text == f"the runs folder ({tmp_path}/scratch): on lustre"


def test_local_folder_is_ok_if_a_job_will_check_it(tmp_path: Path) -> None:
    (found,) = machine_checks.shared_findings({"this folder": tmp_path}, [Mount("/", "ext4")], will_be_proven=True)
    assert found.level == "ok"


def test_unwritable_folder_is_named() -> None:
    (found,) = machine_checks.writable_findings("runs folder", Path("/proc/runs"), "set MGPU_RUNS")
    assert found.level == "failed"
    assert found.text.startswith("runs folder /proc/runs: not writable (")
    (found,) = machine_checks.writable_findings("index of runs", Path("/proc/state"), "set XDG_STATE_HOME", small=True)
    assert found.level == "warning"


def test_checking_a_folder_does_not_create_it(tmp_path: Path) -> None:
    (found,) = machine_checks.writable_findings("runs folder", tmp_path / "runs", "")
    assert found.text.startswith(f"runs folder {tmp_path}/runs: writable, ")
    assert list(tmp_path.iterdir()) == []


def torch_facts(**changed: Any) -> TorchFacts:
    facts = TorchFacts("2.13.0+cu130", "13.0", gpus=[], gloo=True, nccl=True, seconds=1.5, torchvision="0.28.0")
    return replace(facts, **changed)


def test_cuda_torch_without_local_gpus_is_ok() -> None:
    found = list(machine_checks.torch_findings(torch_facts(), "", ["gpu"]))
    assert seen(found) == [
        ("ok", "torch 2.13.0+cu130 (for CUDA 13.0; GPUs here: none), imported in 1.5 s"),
        ("ok", "torchvision 0.28.0"),
    ]


def test_cpu_torch_with_gpu_partitions_is_a_warning() -> None:
    found = next(iter(machine_checks.torch_findings(torch_facts(version="2.13.0+cpu", cuda=None), "", ["gpu", "big"])))
    assert found.level == "warning"
    assert found.text.endswith(": runs on the GPUs of gpu, big would compute on the CPU")


def test_torch_without_gloo_fails_the_check() -> None:
    assert next(iter(machine_checks.torch_findings(torch_facts(gloo=False), "", []))).level == "failed"


def test_import_errors_of_torch_and_torchvision_are_quoted() -> None:
    (found,) = machine_checks.torch_findings(None, "fails on import: ImportError: libcudart.so.13", [])
    assert (found.level, found.text) == ("failed", "torch fails on import: ImportError: libcudart.so.13")
    broken = torch_facts(torchvision=None, torchvision_problem="RuntimeError: no")
    found = list(machine_checks.torch_findings(broken, "", []))[1]
    assert (found.level, found.text) == ("warning", "torchvision fails on import: RuntimeError: no")


def test_torchvision_is_optional() -> None:
    (found,) = machine_checks.torch_findings(torch_facts(torchvision=None), "", [])
    assert found.text.startswith("torch 2.13.0")
