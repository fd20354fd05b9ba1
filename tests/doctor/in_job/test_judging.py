"""What is made of what the ranks of a checkup have measured."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.doctor.in_job import gpus, network, node_facts
from mgpu_slurm.doctor.in_job.team import Answer, Member

GB = 1 << 30


def answered(*values: Any, ranks_per_node: int = 1) -> list[Answer]:
    """The answers of ranks 0, 1, ... in their order."""
    members = [Member(rank, node := rank // ranks_per_node, f"n{node + 1}", rank % ranks_per_node)
               for rank in range(len(values))]  # fmt: skip
    return [Answer(member, value) for member, value in zip(members, values, strict=True)]


def seen(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in found]


def versions(*differences: str) -> dict[str, Any]:
    return {"differences": list(differences), "python": "3.11.2", "packages": 60}


def test_nodes_with_submitted_versions_are_reported_in_one_line() -> None:
    found = node_facts.judge_versions(answered(versions(), versions()))
    assert seen(found) == [("ok", "n[1-2]: Python 3.11.2 and all packages as at submission")]


def test_different_torch_version_fails_and_other_packages_warn() -> None:
    other_torch, other_numpy = "torch 2.12.0 instead of 2.13.0", "numpy 2.0 instead of 2.1"
    found = node_facts.judge_versions(answered(versions(), versions(other_torch, other_numpy), versions(other_numpy)))
    assert seen(found)[1:] == [("failed", f"n2: {other_torch}, {other_numpy}"), ("warning", f"n3: {other_numpy}")]


def test_cores_per_rank_are_compared_with_the_request() -> None:
    enough = {"asked": 4, "usable": 4, "on_machine": 16, "ranks": 2}
    few = {"asked": 4, "usable": 1, "on_machine": 16, "ranks": 2}
    found = node_facts.judge_cores(answered(enough, enough, few, few, ranks_per_node=2))
    assert seen(found) == [
        ("ok", "ranks 0-1 on n1: 4 cores each (4 requested)"),
        ("warning", "ranks 2-3 on n2: requested 4 cores per rank, but this rank may use 1"),
    ]
    unbound = {"asked": None, "usable": 16, "on_machine": 16, "ranks": 2}
    found = node_facts.judge_cores(answered(unbound, unbound, ranks_per_node=2))
    assert seen(found) == [("ok", "ranks 0-1 on n1: 16 cores shared by 2 ranks (none requested)")]


def limits(**changed: Any) -> dict[str, Any]:
    usual = {"shared_memory": 8 * GB, "files": 131072, "locked": resource.RLIM_INFINITY, "infiniband": ["mlx5_0"]}
    return usual | changed


def test_low_node_limits_are_warnings() -> None:
    assert seen(node_facts.judge_limits(answered(limits(), limits(shared_memory=4 * GB)))) == [
        ("ok", "shared memory (/dev/shm): 4.0 GB free on n2")
    ]
    narrow = limits(shared_memory=64 << 20, files=1024, locked=64 << 10)
    assert seen(node_facts.judge_limits(answered(limits(), narrow))) == [
        ("warning", "shared memory (/dev/shm): 0.1 GB free on n2, which loader workers fill soon"),
        ("warning", "open files: 1024 for each process on n2 (ulimit -n)"),
        ("warning", "locked memory: 64 KB on n2 (ulimit -l), which have InfiniBand"),
    ]


def test_low_locked_memory_is_ok_without_infiniband() -> None:
    found = node_facts.judge_limits(answered(limits(locked=64 << 10, infiniband=[])))
    assert [finding.level for finding in found] == ["ok"]


def gpu(identity: str | None, asked: int | None = 2, visible: int = 2) -> dict[str, Any]:
    return {"asked": asked, "visible": visible, "gpu": identity, "name": "NVIDIA H200" if identity else ""}


def test_missing_and_shared_gpus_are_reported() -> None:
    found = gpus.judge_gpus(answered(gpu("GPU-a"), gpu("GPU-b"), ranks_per_node=2))
    assert seen(found) == [("ok", "ranks 0-1 on n1: NVIDIA H200")]
    found = gpus.judge_gpus(answered(gpu("GPU-a"), gpu("GPU-a"), gpu(None, visible=0), ranks_per_node=2))
    assert [finding.level for finding in found] == ["failed", "warning", "ok"]
    assert found[0].text.startswith("rank 2 on n2: requested 2 GPUs per node, but torch sees none")
    assert found[1].text == "ranks 0-1 compute on the same GPU, GPU-a of n1, and communicate without NCCL"
    found = gpus.judge_gpus(answered(gpu(None, asked=None, visible=0)))
    assert seen(found) == [("ok", "no GPUs were requested, and none are visible")]


def health(**changed: Any) -> dict[str, Any]:
    usual = {"uuid": "GPU-a", "name": "NVIDIA H200", "uncorrected": 0, "retirement_pending": None, "slowed": []}
    return usual | {"remapping": [0, 0, 0, 0], "temperature": 41, "others": 0, "persistent": 1} | changed


def test_healthy_gpus_are_reported_in_one_line() -> None:
    found = gpus.judge_gpu_health(answered({"gpus": [health(), health(temperature=63)]}))
    assert seen(found) == [("ok", "n1: 2 GPUs without memory errors or slowdown, 63 C at most")]


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"uncorrected": 3}, "failed", "has had 3 uncorrectable memory errors since its driver was loaded"),
        ({"remapping": [0, 1, 1, 0]}, "failed", "has memory rows that a GPU reset has to remap"),
        ({"retirement_pending": 1}, "failed", "has memory pages that a GPU reset has to retire"),
        ({"slowed": ["thermal slowdown"]}, "warning", "is throttled: thermal slowdown"),
        ({"others": 20 * GB}, "warning", "processes outside of this run hold 20.0 GB of its memory"),
    ],
)
def test_unhealthy_gpu_is_named_with_its_node(changed: dict[str, Any], level: str, words: str) -> None:
    (found,) = gpus.judge_gpu_health(answered({"gpus": [health(), health(uuid="GPU-b", **changed)]}))
    assert found.level == level
    assert found.text.startswith("n1: GPU GPU-b (NVIDIA H200)")
    assert words in found.text
    assert "--exclude n1" in found.fix


def test_gpu_without_health_values_is_ok() -> None:
    unknown = dict.fromkeys(("uncorrected", "retirement_pending", "remapping", "temperature", "persistent"))
    found = gpus.judge_gpu_health(answered({"gpus": [health(**unknown)]}))
    assert [finding.level for finding in found] == ["ok"]


def test_missing_nvml_library_is_a_warning() -> None:
    found = gpus.judge_gpu_health(answered({"gpus": None}, {"gpus": None}))
    words = "n[1-2]: GPU health was not read: nvidia-ml-py is not installed"
    assert seen(found) == [("warning", words)]


def test_health_of_gpus_that_nvml_does_not_list_is_unknown() -> None:
    found = gpus.judge_gpu_health(answered({"gpus": []}))
    assert seen(found) == [("ok", "n1: GPU health is unknown: NVML does not list them (as with MIG)")]


def looked_up(forward: float | None = 0.001, backward: float | None = 0.001) -> dict[str, Any]:
    return {"address": "10.0.0.2" if forward is not None else None, "forward": forward, "backward": backward}


def test_failed_and_slow_name_lookups_are_reported() -> None:
    assert seen(network.judge_names(answered({"n1": looked_up(), "n2": looked_up()}))) == [
        ("ok", "node names resolve on n1: 1 ms at most")
    ]
    assert seen(network.judge_names(answered({"n2": looked_up(forward=None), "n3": looked_up(backward=1.0)}))) == [
        ("failed", "n1 cannot resolve n2"),
        ("warning", "n1 takes 1.0 s to look up 10.0.0.2 (n3)"),
    ]
    # a resolver that did not answer in the time that it was given
    (found,) = network.judge_names(answered({"n2": looked_up(backward=None)}))
    assert found.text == "n1 takes 15.0 s to look up 10.0.0.2 (n2)"


def reached(problem: str | None = None) -> dict[str, Any]:
    return {"port": 12345, "seconds": 0.1, "problem": problem}


def test_unreachable_port_fails_the_check() -> None:
    (found,) = network.judge_ports(answered({"n2": reached("timed out")}, {"n1": reached()}))
    assert (found.level, found.text) == ("failed", "n1 cannot reach n2 on port 12345: timed out")


def reduced(**changed: Any) -> dict[str, Any]:
    usual = {"making": 0.1, "small": 0.002, "large": 0.064, "backend": "gloo", "interfaces": {"eth0": 1000, "ib0": 0}}
    return usual | {"transport": ""} | changed


def test_slow_all_reduce_is_a_warning() -> None:
    assert seen(network.judge_gloo(answered(reduced(), reduced(large=0.0671)))) == [
        ("ok", "all-reduce by gloo, ranks 0-1 on n[1-2]: 1 MB in 2 ms, 64 MB in 67 ms (1 GB/s)")
    ]
    (found,) = network.judge_gloo(answered(reduced(), reduced(large=6.4)))
    assert found.level == "warning"
    assert "set GLOO_SOCKET_IFNAME to the fastest interface (eth0 (1 Gb/s), ib0)" in found.fix
    (found,) = network.judge_gloo(answered(reduced(small=0.7, large=None), reduced(small=0.6, large=None)))
    assert found.text == "all-reduce by gloo, ranks 0-1 on n[1-2]: 1 MB in 700 ms, so 64 MB was not tried"


def test_nccl_transport_is_reported() -> None:
    found = network.judge_nccl(answered(reduced(backend="nccl", transport="IB"), reduced(backend="nccl")))
    assert seen(found)[1:] == [("ok", "NCCL connects nodes by IB")]


@pytest.mark.parametrize(
    ("log", "name"),
    [
        ("n1:41:41 [0] NCCL INFO NET/Plugin: none\nn1:41:77 [0] NCCL INFO Using network Socket\nrest\n", "Socket"),
        ("n1:41:77 [0] NCCL INFO Using network AWS Libfabric\n", "AWS Libfabric"),
        ("trained\n", ""),
    ],
)
def test_nccl_transport_is_read_from_its_log(log: str, name: str) -> None:
    assert network.nccl_transport(log) == name


def test_interfaces_that_are_up_are_listed_with_their_speed(tmp_path: Path) -> None:
    for name, state, speed in (
        ("lo", "unknown", "0"),
        ("eth0", "up", "25000"),
        ("eth1", "down", "-1"),
        ("ib0", "up", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    assert network.interfaces_of(tmp_path) == {"eth0": 25000, "ib0": 0}
