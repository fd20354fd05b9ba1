"""Which GPUs variables make visible, as the runtimes of NVIDIA and AMD read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgpu_slurm.core import node_gpus
from mgpu_slurm.core.node_gpus import VisibleGpus


@pytest.mark.parametrize(
    ("environ", "cuda", "hip"),
    [
        ({"CUDA": "0,3"}, "0,3", None),
        ({"CUDA": "GPU-8f2"}, "GPU-8f2", None),
        ({"CUDA": ""}, "", None),
        ({"CUDA": "-1"}, "", None),
        ({"CUDA": "0, -1,2"}, "0", None),
        ({"CUDA": "MIG-a,MIG-b"}, "MIG-a,MIG-b", None),
        # AMD's runtime takes it for HIP's, if that is not set, or empty
        ({"CUDA": "2", "HIP": ""}, "2", None),
        ({"HIP": "2,5"}, "2,5", "2,5"),
        ({"HIP": "-1"}, "", ""),
        ({"HIP": "1", "CUDA": "0,1,2"}, "1", "1"),
        # HIP's are places in the list for ROCr
        ({"ROCR": "4,6"}, "0,1", "0,1"),
        ({"ROCR": "GPU-1a,GPU-2b"}, "0,1", "0,1"),
        ({"ROCR": "4,6", "HIP": "1"}, "1", "1"),
        ({"ROCR": ""}, "", ""),
        # SLURM sets the variables of all vendors if gres.conf names none
        ({"ROCR": "2,3", "CUDA": "2,3"}, "2,3", "0,1"),
        # the user's choice among SLURM's
        ({"ROCR": "2,3", "CUDA": "1"}, "1", "1"),
    ],
    ids=str,
)
def test_visible_gpus_are_those_of_the_runtime(environ: dict[str, str], cuda: str, hip: str | None) -> None:
    found = node_gpus.visible({f"{name}_VISIBLE_DEVICES": value for name, value in environ.items()})
    assert found is not None
    assert ",".join(found.cuda) == cuda
    assert (None if found.hip is None else ",".join(found.hip)) == hip


def test_no_variable_leaves_all_gpus_visible() -> None:
    assert node_gpus.visible({"HIP_VISIBLE_DEVICES": ""}) is None
    assert node_gpus.visible({}) is None


def test_chosen_gpus_are_named_for_both_runtimes() -> None:
    assert VisibleGpus(("4", "7")).chosen([1]) == {"CUDA_VISIBLE_DEVICES": "7"}
    both = VisibleGpus(("4", "7"), ("0", "1"))
    assert both.chosen([1]) == {"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "1"}
    assert both.chosen([]) == node_gpus.HIDDEN
    # what a process sees of a choice is that choice
    assert node_gpus.visible({"ROCR_VISIBLE_DEVICES": "4,7"} | both.chosen([1])) == VisibleGpus(("7",), ("1",))


def test_gpus_without_variables_are_those_of_the_drivers(
    tmp_path: Path, answers: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_gpus, "AMD_NODES", tmp_path / "nodes")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_gpus.of_this_machine({}) == VisibleGpus(())
    for number, gpu in enumerate(("0", "51234", "6", "")):
        (tmp_path / "nodes" / str(number)).mkdir(parents=True)
        (tmp_path / "nodes" / str(number) / "gpu_id").write_text(f"{gpu}\n")
    assert node_gpus.of_this_machine({}) == VisibleGpus(("0", "1"), ("0", "1"))
    answers("nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\necho '  MIG 1g.10gb Device 0: (UUID: MIG-1)'")
    assert node_gpus.of_this_machine({}) == VisibleGpus(("0",))
    assert node_gpus.of_this_machine({"CUDA_VISIBLE_DEVICES": ""}) == VisibleGpus(())


@pytest.mark.parametrize(
    ("visible", "local_ranks", "own"),
    [
        ("MIG-a,MIG-b", 2, ["MIG-a", "MIG-b"]),
        ("MIG-a,MIG-b,MIG-c,MIG-d", 2, ["MIG-a", "MIG-c"]),
        ("MIG-a,MIG-b", 1, ["MIG-a"]),
        ("MIG-a,MIG-b", 3, ["MIG-a", "MIG-b", "MIG-a"]),
        # one that the site has bound
        ("MIG-b", 2, ["MIG-b", "MIG-b"]),
    ],
)
def test_each_rank_sees_its_own_instance(visible: str, local_ranks: int, own: list[str]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    found = [node_gpus.own_variables(environ, rank, local_ranks) for rank in range(local_ranks)]
    assert found == [{"CUDA_VISIBLE_DEVICES": name} for name in own]


@pytest.mark.parametrize(
    ("environ", "changed"),
    [
        ({}, {}),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, {}),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, {}),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, {"HIP_VISIBLE_DEVICES": "0,1"}),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, {}),
        ({"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"}, {}),
    ],
    ids=str,
)
def test_whole_gpus_are_changed_only_if_slurm_has_set_all_variables(
    environ: dict[str, str], changed: dict[str, str]
) -> None:
    assert node_gpus.own_variables(environ, 1, 2) == changed


def test_gpu_of_an_instance_is_asked_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        nvmlDeviceGetHandleByUUID=lambda uuid: {"MIG-1": "instance"}[uuid],
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: {"instance": "gpu"}[handle],
        nvmlDeviceGetUUID=lambda handle: {"gpu": b"GPU-8f"}[handle],
    )
    monkeypatch.setattr(node_gpus, "load", lambda: library)

    def divided(names: str) -> str | None:
        return node_gpus.divided_gpu({"CUDA_VISIBLE_DEVICES": names})

    assert divided("MIG-1") == "GPU-8f (divided by MIG)"
    assert divided("MIG-GPU-1a2b/7/0") == "GPU-1a2b (divided by MIG)"
    # then instances of one node count as those of one GPU
    assert divided("MIG-gone") == f"a GPU of {os.uname().nodename} (divided by MIG)"
    assert [divided(names) for names in ("0", "GPU-8f", "")] == [None] * 3
    assert node_gpus.divided_gpu(dict(os.environ, CUDA_VISIBLE_DEVICES="")) is None
