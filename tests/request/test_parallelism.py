"""The strategy options of a call, and the grid of ranks that follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.parallelism import Layout, Parallelism


@pytest.mark.parametrize(
    ("options", "ranks", "per_node", "layout"),
    [
        ({}, 8, 4, Layout("ddp", replicas=8)),
        ({"strategy": "ddp"}, 1, 1, Layout("ddp")),
        ({"strategy": "fsdp"}, 8, 4, Layout("fsdp", shards=8)),
        ({"strategy": "zero2"}, 8, 4, Layout("zero2", shards=8)),
        ({"strategy": "hsdp"}, 8, 4, Layout("hsdp", replicas=2, shards=4)),
        ({"strategy": "hsdp", "shard": 2}, 8, 4, Layout("hsdp", replicas=4, shards=2)),
        ({"strategy": "fsdp", "shard": 4}, 8, 8, Layout("fsdp", replicas=2, shards=4)),
        ({"precision": "bf16"}, 2, 1, Layout(replicas=2, precision="bf16")),
        ({"strategy": "fsdp", "precision": "fp16"}, 2, 1, Layout("fsdp", shards=2, precision="fp16")),
        ({"compile": True}, 2, 1, Layout(replicas=2, compile=True)),
        ({"compile": False}, 2, 1, Layout(replicas=2)),
        ({"strategy": "auto"}, 2, 1, Layout("ddp", replicas=2)),
        ({"strategy": "single"}, 1, 1, Layout("single")),
        ({"strategy": "dp"}, 1, 1, Layout("dp")),
        ({"tensor": 2}, 2, 1, Layout("ddp", tensor=2)),
        ({"strategy": "fsdp", "tensor": 2}, 8, 4, Layout("fsdp", shards=4, tensor=2)),
        ({"strategy": "fsdp", "tensor": 2, "shard": 2}, 8, 4, Layout("fsdp", replicas=2, shards=2, tensor=2)),
        ({"strategy": "hsdp", "tensor": 2}, 16, 8, Layout("hsdp", replicas=2, shards=4, tensor=2)),
        ({"pipeline": 4}, 8, 4, Layout("ddp", replicas=2, pipeline=4)),
        ({"strategy": "fsdp", "pipeline": 2}, 8, 4, Layout("fsdp", shards=4, pipeline=2)),
    ],
)
def test_layout_follows_from_options_and_ranks(
    options: dict[str, Any], ranks: int, per_node: int, layout: Layout
) -> None:
    assert Parallelism(**options).layout(ranks, per_node) == layout


@pytest.mark.parametrize(
    ("options", "ranks", "error"),
    [
        ({"strategy": "fdsp"}, 2, "--strategy fdsp: unknown strategy (did you mean 'fsdp'?)"),
        ({"strategy": "fsdp", "shard": 0}, 2, "--shard 0: expected at least 1"),
        (
            {"strategy": "fsdp", "shard": 3},
            8,
            "--shard 3 does not divide the 8 ranks of the run: use one of 1, 2, 4, 8",
        ),
        ({"precision": "bf-16"}, 2, "--precision bf-16: unknown precision (did you mean 'bf16'?)"),
        ({"shard": 2}, 8, "--shard 2 with --strategy ddp: use --strategy fsdp, zero2 or hsdp"),
        ({"strategy": "dp", "compile": True}, 1, "--compile with --strategy dp is not supported: use --strategy ddp"),
        ({"tensor": 0}, 2, "--tensor 0: expected at least 1"),
        ({"pipeline": -1}, 2, "--pipeline -1: expected at least 1"),
        (
            {"tensor": 2, "strategy": "ddp"},
            4,
            "--tensor 2 with --strategy ddp on 4 ranks: torch copies a tensor-parallel model only if it is sharded: use"
            " --strategy fsdp, or 2 ranks",
        ),
        (
            {"tensor": 2},
            4,
            "--tensor 2 with --strategy ddp on 4 ranks: torch copies a tensor-parallel model only if it is sharded: use"
            " --strategy fsdp, or 2 ranks",
        ),
        (
            {"tensor": 2, "strategy": "zero2"},
            4,
            "--tensor 2 with --strategy zero2 is not supported: use --strategy fsdp, hsdp or ddp",
        ),
        (
            {"tensor": 2, "strategy": "single"},
            1,
            "--tensor 2 with --strategy single is not supported: use --strategy fsdp, hsdp or ddp",
        ),
        ({"tensor": 3, "strategy": "fsdp"}, 8, "8 ranks are not a multiple of --tensor 3: use 6 or 9 ranks"),
        ({"pipeline": 4}, 1, "1 rank is not a multiple of --pipeline 4: use 4 ranks"),
        (
            {"tensor": 2, "strategy": "fsdp", "shard": 3},
            16,
            "--shard 3 does not divide the 8 data-parallel ranks: use one of 1, 2, 4, 8",
        ),
        (
            {"pipeline": 4, "tensor": 2, "strategy": "fsdp"},
            8,
            "--pipeline 4 with --tensor 2 is not supported: use one of them",
        ),
        (
            {"pipeline": 2, "strategy": "hsdp"},
            4,
            "--pipeline 2 with --strategy hsdp is not supported: use --strategy ddp or fsdp",
        ),
        ({"precision": "fp16", "tensor": 2}, 2, "--precision fp16 with --tensor 2 is not supported: use bf16"),
        ({"precision": "fp16", "pipeline": 2}, 2, "--precision fp16 with --pipeline 2 is not supported: use bf16"),
        ({"precision": "fp8", "tensor": 2}, 2, "--precision fp8 with --tensor 2 is not supported: use bf16"),
        (
            {"strategy": "dp"},
            4,
            "--strategy dp runs in one process, and this run has 4: use --ntasks-per-node 1, or --strategy ddp",
        ),
        (
            {"strategy": "single"},
            2,
            "--strategy single runs in one process, and this run has 2: use --ntasks-per-node 1, or --strategy ddp",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], ranks: int, error: str) -> None:
    with pytest.raises(UserError) as raised:
        Parallelism(**options).layout(ranks, ranks)
    assert str(raised.value) == error


def test_strategies_of_one_process_run_on_one_node() -> None:
    with pytest.raises(UserError) as raised:
        Parallelism("dp").layout(2, 1)
    assert str(raised.value) == "--strategy dp runs on one node: use --nodes 1, or --strategy ddp"


def test_ranks_are_arranged_by_stage_then_data_then_tensor() -> None:
    layout = Parallelism("fsdp", tensor=2).layout(8, 8)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.random_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (layout.first_ranks, layout.grid) == ([0], (1, 4, 2))
    layout = Parallelism(pipeline=2).layout(8, 8)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.random_rank(rank) for rank in range(8)] == list(range(8))
    assert (layout.first_ranks, layout.grid) == ([0, 4], (2, 4, 1))
    assert Parallelism().layout(8, 8).grid is None


def test_defaults_that_do_not_fit_the_ranks_are_left_out() -> None:
    defaults = Parallelism("fsdp", shard=2, tensor=4)
    assert defaults.fitted(8) == defaults
    assert defaults.fitted(4) == Parallelism("fsdp", tensor=4)
    assert defaults.fitted(2) == Parallelism("fsdp", shard=2)
    assert defaults.fitted(1) == Parallelism("fsdp")


def test_given_options_override_others() -> None:
    before = Parallelism("fsdp", shard=2, precision="bf16")
    assert Parallelism().over(before) == before
    assert Parallelism(shard=4).over(before) == Parallelism("fsdp", shard=4, precision="bf16")
    assert Parallelism("fsdp", precision="fp32").over(before) == Parallelism("fsdp", shard=2, precision="fp32")
    # whose own default counts
    assert Parallelism("ddp").over(before) == Parallelism("ddp", precision="bf16")


def test_words_name_what_is_compiled() -> None:
    assert Parallelism("fsdp", compile=True).words == "fsdp  compile"
    assert Parallelism(precision="bf16", compile=False).words == "ddp  precision bf16  no compile"
    assert Parallelism(compile=False).over(Parallelism("fsdp", compile=True)) == Parallelism("fsdp", compile=False)


def test_only_several_ranks_shard_a_model() -> None:
    assert not Parallelism("fsdp").layout(1, 1).is_sharded
    assert Parallelism("fsdp").layout(2, 2).is_sharded
    assert not Parallelism("ddp").layout(2, 2).is_sharded
