"""All uses of private and undocumented names of torch.

Torch may change these names in any version. This module was written for torch 2.13.0, and works from torch 2.6 on;
docs/reference/versions.md lists the versions that are tested. Its test checks that each name exists. Besides
`wrapper_adapter`, and `core.torch_versions` for older versions, no other module uses one when it runs: only for type
checkers do they import the store classes from `torch._C`, as torch's hints have them nowhere else.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mgpu_slurm.core import torch_versions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class or a module in this block."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                # inherited
                delattr(owner, name)


# -- tensors


def is_dtensor(tensor: Any) -> bool:
    """Return whether this is a DTensor, or its class, without importing DTensor's modules."""
    return hasattr(tensor, "__create_chunk_list__")


def is_fake(value: Any, mode: Any = None) -> bool:
    """Return whether this is a tensor without values, of a mode if one is given."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(value, fakes.FakeTensor) and mode in (None, value.fake_mode)


def own_chunk(dtensor: Any) -> Any:
    """Return the `offsets` and `sizes` of this rank's part of a DTensor."""
    (chunk,) = dtensor.__create_chunk_list__()
    return chunk


def is_composed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of others, such as an optimizer state in 8 bits; but not if it is a DTensor."""
    return hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor)


def components(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors that a composed one consists of, by name, and what else its class needs to compose it."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def composed(kind: Any, tensors: dict[str, torch.Tensor], context: Any) -> torch.Tensor:
    """Return a tensor of a class from what `components` returned."""
    tensor: torch.Tensor = kind.__tensor_unflatten__(tensors, context, None, None)
    return tensor


def local_part(dtensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, without a gradient."""
    part: torch.Tensor = dtensor.detach().to_local()
    return part


def like_dtensor(dtensor: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with another part on this rank, divided in the same way."""
    made: torch.Tensor = type(dtensor).from_local(
        part, dtensor.device_mesh, dtensor.placements, shape=dtensor.shape, stride=dtensor.stride(), run_check=False
    )
    return made


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others, without waiting for a device."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def sequence_number(node: Any) -> int:
    """Return the number of a node of a graph; later nodes have larger ones, and those of leaves the largest of all."""
    number: int = node._sequence_nr()
    return number


def flop_counter() -> Any:
    """Return a mode that counts the FLOPs of what it can: an operator with other arguments than its formula expects,
    such as attention with grouped queries, must not end a training."""
    module = importlib.import_module("torch.utils.flop_counter")

    class Counter(module.FlopCounterMode):  # type: ignore[misc, name-defined]
        def _count_flops(self, packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
            with suppress(Exception):
                super()._count_flops(packet, out, args, kwargs)
            return out

    return Counter(display=False)


def is_profiling() -> bool:
    """Return whether a profiler records this thread; another one would take its events."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def fix_weak_reference(tensor: torch.Tensor) -> None:
    """Make a tensor safe to use after it was taken from a weak reference.

    `torch.utils.weak.TensorWeakRef` does the same, but is slow to create.
    """
    tensor._fix_weakref()  # type: ignore[attr-defined]


# -- modules

COMPILED_MODULE = "_orig_mod"
"""Attribute of a compiled module with the original one."""


def is_compiled(module: Any) -> bool:
    """Return whether `torch.compile` returned this module."""
    # before torch has imported this (a slow import), no compiled modules exist
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def has_compiled(module: nn.Module) -> bool:
    """Return whether a module, or any module of it, calls compiled code."""
    return any(is_compiled(each) or getattr(each, "_compiled_call_impl", None) is not None for each in module.modules())


def import_compiler() -> None:
    """Import torch's compiler, which DistributedDataParallel needs."""
    importlib.import_module("torch._dynamo")


def limit_compilers(processes: int) -> None:
    """Compile in this many processes, if torch's compiler was imported before the environment said so."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.compile_threads = processes


def allow_compilations(number: int, for_each_size: bool) -> None:
    """Let torch compile a method for this many more kinds of modules than before.

    Args:
        for_each_size: also for each size of their inputs, as often as there are new ones: which ones would not be
            compiled depends on the order in which they come.

    Torch compiles a method `recompile_limit` times; after that, it calls it as it is. That is meant for one kind of
    module, with other shapes of inputs, and with and without gradients.
    """
    config = importlib.import_module("torch._dynamo").config
    limit = torch_versions.compilation_limit()
    new = _UNLIMITED if for_each_size else getattr(config, limit) + number * _COMPILATIONS
    setattr(config, limit, new)
    of_all = f"accumulated_{limit}"
    setattr(config, of_all, max(getattr(config, of_all), new))


_COMPILATIONS = 8
"""Torch's own limit for one method."""
_UNLIMITED = 1 << 30


def keep_headers_in(folder: Path) -> None:
    """Keep precompiled headers of C++ with the compiled code. Torch has them in /tmp, under a name that anyone could
    create first."""
    code: Any = importlib.import_module("torch._inductor.codecache")
    code._HEADER_DIR, code._HEADER_LOCK_DIR = str(folder), str(folder / "locks")


def compile_without_headers() -> None:
    """Do not precompile headers of C++."""
    config: Any = importlib.import_module("torch._inductor.config")
    # torch 2.6 has none
    if hasattr(config, "cpp_cache_precompile_headers"):
        config.cpp_cache_precompile_headers = False


def is_compiling() -> bool:
    """Return whether torch's compiler is at work in any thread of this process.

    Its callbacks tell the same, but a compilation may begin right after the import of the compiler, and
    `torch.compiler.reset` forgets them.
    """
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:
        return False
    if not hasattr(handler, _COUNTER):
        _count_compilations(handler)
    return bool(getattr(handler, _COUNTER))


_COUNTER = "_CompilationCallbackHandler__pending_callbacks_counter"


def _count_compilations(handler: Any) -> None:
    """Count them as later versions do; torch 2.6 does not."""
    setattr(handler, _COUNTER, 0)

    def counting(run: Callable[[], None], change: int) -> Callable[[], None]:
        def counted() -> None:
            # one that began before this has only an end
            setattr(handler, _COUNTER, max(0, getattr(handler, _COUNTER) + change))
            run()

        return counted

    handler.run_start_callbacks = counting(handler.run_start_callbacks, 1)
    handler.run_end_callbacks = counting(handler.run_end_callbacks, -1)


def registered(module: nn.Module, name: str) -> Any:
    """Return the child, parameter or buffer that is registered under a name; None if there is none."""
    for held in (module._modules, module._parameters, module._buffers):
        if held.get(name) is not None:
            return held[name]
    return None


def remove_forward_pre_hook(module: nn.Module, hook: Any) -> None:
    """Remove a hook from a module, which may be a copy of the one with which it was registered."""
    for key in [key for key, each in module._forward_pre_hooks.items() if each is hook]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


# -- optimizers


def calls_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch calls its step hooks; not if a subclass does not call torch's `__init__`."""
    return getattr(type(optimizer).step, "hooked", False)


def skips_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether GradScaler told a fused optimizer, which skips steps itself, that gradients are infinite."""
    return bool(getattr(optimizer, "found_inf", None))


def has_found_infinite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler found infinite gradients of the optimizer since its last `update`."""
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())


# -- data


@contextmanager
def as_only_worker() -> Iterator[None]:
    """Make `get_worker_info` return None in this block, as in a process that is no loader's worker."""
    from torch.utils.data._utils import worker

    info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


def show_worker_dataset(dataset: Any) -> None:
    """Make `get_worker_info` of this loader's worker return a dataset."""
    from torch.utils.data._utils import worker

    info: Any = worker.get_worker_info()
    worker._worker_info = worker.WorkerInfo(id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=dataset)


# -- ranks


def default_store() -> Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def connect_lazily() -> None:
    """Let the gloo groups that this process creates connect two ranks when they first exchange something.

    Otherwise each group connects all of its ranks to each other, even if NCCL does all of its work.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def default_timeout() -> timedelta:
    """Return torch's own time-out of collectives."""
    return dist.distributed_c10d.default_pg_timeout


def gloo_group(store: Store, name: str, ranks: list[int], rank: int, timeout: timedelta) -> Any:
    """Return a gloo group that torch does not count among the groups of the job: each rank may have different ones.

    Args:
        store: a store in which the name is unique.
        ranks: the ranks of the group, this one among them.
        timeout: time-out of its collectives.
    """
    prefixed = PrefixStore(name, store)
    group: Any = dist.ProcessGroupGloo(prefixed, ranks.index(rank), len(ranks), timeout)
    torch_versions.name_group(group, name, ranks)
    return group


def flight_recorder_dumps() -> Iterator[tuple[str, bytes]]:
    """Yield the suffix of torch's file and the pickled dump of each flight recorder that this build has.

    The second is asked for only then: in a stuck rank that of NCCL may fail or block.
    """
    from torch._C import _distributed_c10d as recorders

    for suffix, name in (("-cpu", "_dump_fr_trace"), ("", "_dump_nccl_trace")):
        if hasattr(recorders, name):
            yield suffix, getattr(recorders, name)()


_TORCH = Path(torch.__file__).parent

WAITING_CODE = (str(_TORCH / "distributed"), str(_TORCH / "autograd" / "graph.py"))
"""Code of torch in which a rank waits for the others: in collectives, including those of a backward pass."""

COMPILER_CODE = tuple(str(_TORCH / name) for name in ("_dynamo", "_functorch", "_inductor"))
"""Code of torch's compiler, also for what calls compiled code."""
