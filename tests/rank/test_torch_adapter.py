"""The private names of torch: which version has them, that they are there, and that one module alone uses them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as recorders
from torch._dynamo import eval_frame
from torch._inductor import codecache
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.flop_counter import FlopCounterMode

from mgpu_slurm.core import torch_versions
from mgpu_slurm.rank import torch_adapter, wrapper_adapter
from mgpu_slurm.training.memory import fake_torch_adapter
from tests.support import REPOSITORY
from tests.test_imports import FILES, imports

WRITTEN_AGAINST = "2.13.0"
OLDEST = "2.6"

MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())

NAMES: list[tuple[Any, tuple[str, ...]]] = [
    (torch, ("_foreach_copy_", "_dynamo", "_functorch", "_inductor")),
    (torch.Tensor, ("_fix_weakref",)),
    (MODEL(torch.zeros(1, 2)).grad_fn, ("_sequence_nr",)),
    (torch.autograd, ("_profiler_enabled",)),
    (FlopCounterMode, ("_count_flops",)),
    (nn.Module, ("_compiled_call_impl",)),
    (DTensor, ("__create_chunk_list__",)),
    (MODEL, ("_modules", "_parameters", "_buffers", "_apply")),
    (MODEL, ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")),
    (torch.UntypedStorage, ("_cdata",)),
    (torch.ops.aten, ("_local_scalar_dense",)),
    (torch._C, ("_get_dispatch_mode", "_dispatch_has_kernel_for_dispatch_key")),
    (FSDPModule, ("_get_fsdp_state",)),
    (_fsdp_state.FSDPState, ("_lazy_init",)),
    (inspect.getsource(_fsdp_state.FSDPState), ("_fsdp_param_groups", "_is_root")),
    (
        inspect.getsource(_fsdp_param_group.FSDPParamGroup),
        ("_all_reduce_hook", "_all_gather_comm", "_reduce_scatter_comm"),
    ),
    (DataLoader, ("_get_iterator",)),
    (inspect.getsource(DistributedDataParallel), ("_check_reducer_finalized", "_comm_hooks", "_join_config")),
    (eval_frame, ("OptimizedModule",)),
    (type(OPTIMIZER).step, ("hooked",)),
    (torch.amp.GradScaler, ("_found_inf_per_device",)),
    (worker, ("_worker_info", "WorkerInfo")),
    (dist.distributed_c10d, ("_get_default_store", "default_pg_timeout")),
    (dist.ProcessGroupGloo, ("options", "allgather", "broadcast", "gather")),
    (recorders, ("_dump_fr_trace", *(["_dump_nccl_trace"] if dist.is_nccl_available() else []))),
]

NOT_IN_ALL = {"_fsdp_param_groups", "_all_reduce_hook", "_all_gather_comm", "_reduce_scatter_comm", "_dump_fr_trace"}
OF_OLDER = {
    "_world",
    "_fsdp_param_group",
    "_verify_param_shape_across_processes",
    "_sync_module_states",
    "_n_microbatches",
    "_get_init_p2p_neighbors_ops",
}
"""Names that only older versions have, or are used for them alone."""

OF_NAMED_TUPLES = {"_replace", "_fields"}
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*\._")

OTHERS = sorted(
    name
    for name in FILES
    if not name.endswith((".torch_versions", ".torch_adapter", ".fake_torch_adapter"))
    and not name.endswith((".wrapper_adapter", ".optuna_adapter", ".submitit_adapter"))
)


def test_documented_torch_versions_match_the_project() -> None:
    words = " ".join((torch_adapter.__doc__ or "").split())
    assert f"written for torch {WRITTEN_AGAINST}, and works from torch {OLDEST} on" in words
    assert f"\ntorch=={WRITTEN_AGAINST}\n" in (REPOSITORY / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("owner", "name"), [pytest.param(owner, name, id=name) for owner, names in NAMES for name in names]
)
def test_installed_torch_has_each_private_name(owner: Any, name: str) -> None:
    is_there = name in owner if isinstance(owner, str) else hasattr(owner, name)
    if name in NOT_IN_ALL and not torch.__version__.startswith(WRITTEN_AGAINST):
        pytest.skip("older versions may lack it, and are used without it")
    assert is_there


def test_table_lists_every_private_name_the_adapter_uses() -> None:
    adapters = (torch_adapter, wrapper_adapter, fake_torch_adapter, torch_versions)
    trees = [ast.parse(FILES[each.__name__].read_text()) for each in adapters]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not _is_name(node.value, {"self"})}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # a private attribute may also be replaced, by `replaced(owner, name=...)`
    keywords = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg is not None}
    used = {name for name in attributes | texts | keywords if re.fullmatch(r"_[a-z]\w*|__create_chunk_list__", name)}
    expected = {name for _, names in NAMES for name in names if name.startswith("_")} | {"_dump_nccl_trace"}
    assert used - {torch_adapter.COMPILED_MODULE} - OF_OLDER == expected


@pytest.mark.parametrize("module", OTHERS)
def test_no_other_module_uses_private_names_of_a_library(module: str) -> None:
    nodes = list(ast.walk(ast.parse(FILES[module].read_text())))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    # a class may use its own private names on another object of it
    own = {node.attr for node in attributes if _is_name(node.value, {"self", "cls"})}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    of_others = {
        node.attr
        for node in attributes
        if re.match(r"_[a-z]", node.attr) and not _is_name(node.value, {"self", "cls", *sys.stdlib_module_names})
    }
    assert of_others - own - OF_NAMED_TUPLES == set()
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert texts.isdisjoint(name for _, names in NAMES for name in names)
    assert {name for name in imports(module, everywhere=True) | texts if PRIVATE_MODULE.match(name)} == set()


def _is_name(value: ast.expr, names: set[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def test_compiled_module_is_recognized_and_holds_the_original() -> None:
    compiled = torch.compile(MODEL, backend="eager")
    assert (torch_adapter.is_compiled(compiled), torch_adapter.is_compiled(MODEL)) == (True, False)
    assert getattr(compiled, torch_adapter.COMPILED_MODULE) is MODEL


def test_registered_members_of_a_module_are_found_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    norm = torch_adapter.registered(model, "0")
    assert norm is model[0]
    assert torch_adapter.registered(norm, "weight") is norm.weight
    assert torch_adapter.registered(norm, "running_mean") is norm.running_mean
    assert torch_adapter.registered(norm, "eps") is None


def test_steps_skipped_by_a_fused_optimizer_are_detected() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    heard = []
    handle = optimizer.register_step_post_hook(lambda own, *_: heard.append(torch_adapter.skips_step(own)))
    for value in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([[value]])).sum()).backward()
        scaler.step(optimizer)
        assert torch_adapter.has_found_infinite(scaler, optimizer) is (value != 1.0)
        scaler.update()
    handle.remove()
    assert heard == [True, False]


def test_as_only_worker_hides_the_worker_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_info", "info")
    with torch_adapter.as_only_worker():
        assert get_worker_info() is None
    assert get_worker_info() == "info"


def test_paths_of_waiting_code_and_of_the_compiler_exist() -> None:
    assert all(Path(path).exists() for path in (*torch_adapter.WAITING_CODE, *torch_adapter.COMPILER_CODE))


def test_compilation_is_recognized_while_it_lasts() -> None:
    assert not torch_adapter.is_compiling()
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(torch_adapter.is_compiling())
        return graph

    torch.compile(nn.Linear(2, 1), backend=backend)(torch.zeros(1, 2))
    assert (seen, torch_adapter.is_compiling()) == ([True], False)


@pytest.mark.needs_torch("2.9")
def test_precompiled_headers_are_kept_in_a_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        # restores them
        monkeypatch.setattr(codecache, name, getattr(codecache, name))
    torch_adapter.keep_headers_in(tmp_path)
    assert Path(codecache._HEADER_LOCK_DIR).parent == Path(codecache._HEADER_DIR) == tmp_path


@pytest.mark.needs_torch("2.13")
def test_compiled_code_can_be_independent_of_measured_times() -> None:
    assert torch_versions.deterministic_options() == {"deterministic": True}
