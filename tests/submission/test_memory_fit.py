"""Which changes are tried for a job that does not fit into the memory of its GPUs, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.run_folder.record_types import LayerMemory, MemoryPlan
from mgpu_slurm.submission import memory_fit
from mgpu_slurm.submission.memory_fit import Change, Fit, Gpu
from tests.slurm.test_script import make

GIB = 1 << 30
RECOMPUTED = "run.wrap(blocks=..., recompute=True)"
LAYER = LayerMemory(name="0", kind="Linear", shape=[8, 4], parameters=20, memory=64)


def plan_of(**values: Any) -> MemoryPlan:
    kinds = {"parameters": 10 * GIB, "activations": 80 * GIB}
    return MemoryPlan(peak=90 * GIB, kinds=kinds, phase="optimizer step", samples=64, layers=[LAYER], **values)


@pytest.mark.parametrize(
    ("ranks", "parallelism", "plan", "expected"),
    [
        (1, {}, {}, ["--precision bf16"]),
        (1, {}, {"splits": True}, ["32 samples at once, by run.gradients", "--precision bf16"]),
        (4, {}, {}, ["--strategy fsdp", "--precision bf16", "--strategy fsdp --precision bf16"]),
        (
            4,
            {},
            {"can_recompute": True},
            [
                "--strategy fsdp",
                "--precision bf16",
                RECOMPUTED,
                "--strategy fsdp --precision bf16",
                f"--strategy fsdp --precision bf16 and {RECOMPUTED}",
            ],
        ),
        (4, {"strategy": "fsdp", "precision": "bf16"}, {}, []),
        (2, {"tensor": 2}, {}, ["--precision bf16"]),
    ],
)
def test_changes_with_the_fewest_effects_are_tried_first(
    ranks: int, parallelism: dict[str, Any], plan: dict[str, Any], expected: list[str]
) -> None:
    spec = make(resources={"nodes": ranks, "ntasks_per_node": 1}, parallelism=Parallelism(**parallelism))
    changes = memory_fit._changes(spec, plan_of(**plan), Gpu(80 * GIB, "mgpu.yaml"))
    assert [change.words for change in changes] == expected


def shown(*tried: tuple[str, int | str]) -> list[str]:
    gpu = Gpu(80 * GIB, "gpu-memory in mgpu.yaml")
    changes = [(Change(words, make()), outcome) for words, outcome in tried]
    return Fit([plan_of()], gpu, "gpu", tried=changes).lines()[2:-3]


def test_change_that_fits_is_shown_last() -> None:
    assert shown(("--strategy fsdp", 75 * GIB), ("--precision bf16", 50 * GIB)) == [
        "gpu       80.0 GiB (gpu-memory in mgpu.yaml): does not fit",
        # a tenth is for CUDA and fragmentation
        "          --strategy fsdp: 75.0 GiB, does not fit",
        "          --precision bf16: 50.0 GiB, fits",
    ]


def test_more_gpus_are_the_advice_if_no_change_is_enough() -> None:
    assert shown(("--strategy fsdp", "it needs blocks"), ("--precision bf16", 78 * GIB))[1:] == [
        "          --strategy fsdp: it needs blocks",
        "          --precision bf16: 78.0 GiB, does not fit",
        "          none of these is enough: use more GPUs, or a smaller model or batch",
    ]
