"""All uses of private names of torch that fake tensors need: tensors with shapes, but without values.

Torch may change these names in any version. This module was written for torch 2.13.0, like `rank.torch_adapter`, which
has the other ones; the same test checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_slurm.rank.torch_adapter import replaced
from mgpu_slurm.rank.wrapper_adapter import without_first_sync

DispatchMode: Any = TorchDispatchMode
"""Base class of objects that see each operation on tensors."""

READS_SCALAR = torch.ops.aten._local_scalar_dense.default
"""What `item()` of a tensor calls, and its conversion to a number or a truth value."""


def fake_mode() -> Any:
    """Return a mode in which new tensors have shapes but no values; operations with others that have are allowed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def makes_fakes() -> bool:
    """Return whether a mode in which new tensors have no values is entered."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def exchanging_nothing(allocating: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Make each DDP that is created in this block keep its own gradients: a group of ranks that do not exist returns no
    result, which DDP expects.

    Args:
        allocating: a context in which DDP may allocate its buckets.
    """
    create = DistributedDataParallel.__init__

    def create_alone(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        # the other ranks' tensors would be compared with its own
        with allocating(), without_first_sync() as options:
            create(model, *args, **kwargs | options)
        model.register_comm_hook(None, _unchanged)
        model.reducer = _WithFixedBuckets(model.reducer)  # type: ignore[assignment]

    with replaced(DistributedDataParallel, __init__=create_alone):
        yield


class _WithFixedBuckets:
    """DDP's reducer, which does not divide the gradients into other buckets after its first step: it would compare the
    new order with the other ranks'."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _unchanged(_, bucket):  # type: ignore[no-untyped-def]
    # without annotations, because DDP does not accept those that are text
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def needs_values(error: BaseException) -> bool:
    """Return whether an operation on tensors without values failed because its result depends on them."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def become_fake(parameter: nn.Parameter, mode: Any) -> None:
    """Turn a parameter into a fake one, wherever it is referred to."""
    with mode:
        made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    _become(parameter, made)


def _become(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    fresh = nn.Parameter(tensor.detach(), parameter.requires_grad)
    vars(fresh).update(vars(parameter))
    torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]


@contextmanager
def converting_fakes() -> Iterator[None]:
    """Let modules with fake parameters be converted in this block, as by `to`: torch swaps them with the results, even
    where they are the same, which fails for tensors that it has seen."""

    def apply(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in module.children():
                child._apply(convert)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            found = convert(parameter.detach())
            if (found.dtype, found.device) == (parameter.dtype, parameter.device):
                continue
            if found.device == parameter.device:
                # of another dtype, also for an optimizer that has it already
                _become(parameter, found)
            else:
                module._parameters[name] = nn.Parameter(found, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
        return module

    with replaced(nn.Module, _apply=apply):
        yield


@contextmanager
def reading_fakes() -> Iterator[None]:
    """Let jobs print fake tensors in this block, and convert them to lists and arrays: each number is what `item()` of
    the tensor returns."""
    from torch._subclasses.fake_tensor import FakeTensor

    def numpy(tensor: Any, **_: Any) -> Any:
        # for a dtype that NumPy does not have, an error like torch's own
        kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
        return np.full(tuple(tensor.shape), tensor.new_empty(()).item(), kind)

    own = {
        "numpy": numpy,
        "tolist": lambda tensor: numpy(tensor).tolist(),
        "__array__": lambda tensor, *kind: numpy(tensor).astype(*kind) if kind else numpy(tensor),
        "__format__": lambda tensor, form: format(tensor.item() if tensor.dim() == 0 else str(tensor), form),
    }
    with replaced(FakeTensor, **own):
        yield


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has while this one exists."""
    address: int = storage._cdata
    return address


def join_fake_group(rank: int, world_size: int) -> None:
    """Create the default process group of a world of ranks that do not exist; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@contextmanager
def loading_in_this_process(begin: Callable[[], None], change: Callable[[Any], Any]) -> Iterator[None]:
    """Make DataLoaders have no workers in this block, and change each of their batches.

    Args:
        begin: called before each batch is fetched.
        change: returns what the job gets in place of a batch.
    """
    from torch.utils.data import dataloader

    class Changed(dataloader._SingleProcessDataLoaderIter):
        def __init__(self, loader: Any) -> None:
            begin()
            loader.num_workers, loader.timeout = 0, 0
            super().__init__(loader)

        def __next__(self) -> Any:
            begin()
            return change(super().__next__())

    with replaced(dataloader.DataLoader, _get_iterator=lambda loader: Changed(loader)):
        yield
