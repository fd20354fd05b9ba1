"""What differs between versions of torch.

Each function works from torch 2.6 on; docs/reference/versions.md lists the versions that are tested. Torch is imported
when one is called: the batch step, which serves the ranks' store, needs it only then.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

OLDEST_TORCH = (2, 6)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2
"""Seconds between two looks at a store."""


def serve_store(listener: socket.socket) -> TCPStore:
    """Serve a store on a listening socket for the lifetime of the returned object."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = listener.getsockname()
    return TCPStore(address or "localhost", port, None, True, wait_for_workers=False, **serving_on(listener.detach()))


def serving_on(descriptor: int | None) -> dict[str, Any]:
    """Return the options of a `TCPStore` that serves on a listening socket, if one is given."""
    # of torch 2.6, only the older of its two servers takes a socket that is bound already
    return {} if descriptor is None else {"master_listen_fd": descriptor, "use_libuv": _has_clones()}


def waiting_client(store: Store) -> Store:
    """Return a client of the same store that can wait: a client that does blocks all of its other requests.

    A client of torch 2.6 cannot be cloned. There, the client itself is returned, which looks again and again.
    """
    return store.clone() if _has_clones() else _LookingClient(store)  # type: ignore[attr-defined, return-value]


def _has_clones() -> bool:
    from torch.distributed import Store  # type: ignore[attr-defined]

    return hasattr(Store, "clone")


class _LookingClient:
    """A client of a store that others use at the same time."""

    def __init__(self, client: Store) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        from torch.distributed import DistStoreError

        pause, give_up = _SHORTEST_PAUSE, time.monotonic() + timeout.total_seconds()
        while not self._client.check(keys):
            if time.monotonic() > give_up:
                raise DistStoreError(f"no value of {', '.join(keys)} in {timeout}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def deterministic_options() -> dict[str, Any]:
    """Return the options of `torch.compile` for code that does not depend on measurements of time; torch 2.9 has
    none."""
    inductor = importlib.import_module("torch._inductor")
    return {"deterministic": True} if "deterministic" in inductor.list_options() else {}


def check_sharding(device: Any) -> None:
    """
    Raises:
        UserError: this torch cannot shard a model on such a device.
    """
    import torch

    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise UserError(
            f"a model is sharded on CPUs from torch 2.7 on, and this is {torch.__version__}: use --strategy ddp"
        )


def check_pipeline(device: Any) -> None:
    """
    Raises:
        UserError: this torch cannot pass micro-batches between such devices.
    """
    import torch

    # before, a schedule forgot all but the last of the messages that gloo sends at once, and ranks waited forever
    if device.type == "cpu" and interpreter.numbers(torch.__version__) < (2, 8):
        raise UserError(
            f"a pipeline runs on CPUs from torch 2.8 on, and this is {torch.__version__}: leave out --pipeline"
        )


def connect_with_equal_types(stage: Any) -> None:
    """Let a stage of a pipeline send the first messages of its connections with the type that is expected.

    Those of torch 2.9 are twice as long: gloo ends the ranks, and over several nodes NCCL may hang. See
    https://github.com/pytorch/pytorch/pull/165539.
    """
    import torch

    if interpreter.numbers(torch.__version__) >= (2, 10) or not hasattr(stage, "_get_init_p2p_neighbors_ops"):
        return
    first_messages = stage._get_init_p2p_neighbors_ops

    def of_equal_types() -> list[Any]:
        messages: list[Any] = first_messages()
        for message in messages:
            message.tensor = message.tensor.float()
        return messages

    stage._get_init_p2p_neighbors_ops = of_equal_types


def make_schedule(kind: Any, stage: Any, micro_batches: int, loss_of: Callable[..., Any]) -> Any:
    """Return a pipeline's schedule that leaves the gradients as they are, as torch 2.6 always does.

    Args:
        kind: its class; only GPipe may have fewer micro-batches than stages.
    """
    options = {"scale_grads": False} if "scale_grads" in inspect.signature(kind).parameters else {}
    try:
        return kind(stage, micro_batches, loss_fn=loss_of, **options)
    except ValueError:
        # torch 2.7 to 2.9 refuse fewer micro-batches than stages for GPipe, too
        made = kind(stage, max(micro_batches, stage.num_stages), loss_fn=loss_of, **options)
        made._n_microbatches = micro_batches
        return made


@functools.cache
def no_outputs() -> Mapping[str, Any]:
    """Return the options of a pipeline's `step`, or `eval`, that returns no outputs; torch 2.9 always does."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    # `eval` passes on what it does not name
    known = inspect.signature(PipelineScheduleSingle.step).parameters
    return {"return_outputs": False} if "return_outputs" in known else {}


def compilation_limit() -> str:
    """Return the name of the limit of compilations in `torch._dynamo.config`; torch 2.6 has another."""
    config = importlib.import_module("torch._dynamo").config
    return "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"


def can_repeat_passes() -> bool:
    """Return whether exchanges of sharded models can be watched, and such a model be brought back to the beginning of a
    pass; torch 2.9 cannot do the latter."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_custom_all_gather") and hasattr(FSDPModule, "reset_iter_state")


def check_planning() -> None:
    """
    Raises:
        UserError: the collectives of this torch do not accept fake tensors.
    """
    import torch

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):
        raise UserError(
            f"the memory of a model that ranks divide is planned from torch 2.13 on, and this is {torch.__version__}:"
            " plan it with a newer torch, or try it on GPUs"
        )


def all_gather_single(*args: Any) -> Any:
    """Call `torch.distributed.all_gather_single`, or what torch 2.9 has in its place."""
    import torch.distributed as dist

    return (dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor)(*args)


def reduce_scatter_single(*args: Any) -> Any:
    """Call `torch.distributed.reduce_scatter_single`, or what torch 2.9 has in its place."""
    import torch.distributed as dist

    return (dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor)(*args)


def destroy_groups() -> None:
    """Destroy all process groups that torch knows of, if there are any.

    Torch 2.6 frees gloo groups while it holds the GIL, and waits there for their threads, which may need it. So with
    versions that are not known to differ, the groups are left to the end of the process.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if interpreter.numbers(torch.__version__) < (2, 9):
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    dist.destroy_process_group()


def name_group(group: Any, name: str, ranks: list[int]) -> None:
    """Give a gloo group a name and its ranks in the job, which flight recorders note; torch 2.6 records no gloo."""
    if hasattr(group.options, "group_name"):
        group.options.group_name = name
        group.options.global_ranks_in_group = ranks
