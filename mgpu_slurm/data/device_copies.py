"""Copy batches to the device: on a GPU, the next one on a stream of its own while the current step computes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch

from mgpu_slurm.data.batching.nests import map_tensors, to_device

Received = TypeVar("Received")


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Return an iterator over the same batches on the device."""
    if device.type == "cuda":
        return one_ahead(iter(batches), functools.partial(_send, device))
    # a generator would keep a reference to the batch
    return map(functools.partial(to_device, device=device), batches)


def one_ahead(batches: Iterator[Any], send: Callable[[Any], Callable[[], Received]]) -> Iterator[Received]:
    """Yield each batch once the next one has been sent. An error of the next one is raised where that is asked for.

    Args:
        send: begins the copy of a batch, and returns a function that returns the copied batch to the stream that uses
            it.
    """
    # emptied before each yield: no reference is kept while the job has a batch
    sent: deque[Callable[[], Received]] = deque()
    while True:
        try:
            sent.append(send(next(batches)))
        except StopIteration:
            break
        except Exception as error:
            sent.append(functools.partial(_fail, error))
            break
        if len(sent) > 1:
            yield sent.popleft()()
    while sent:
        yield sent.popleft()()


def _fail(error: Exception) -> NoReturn:
    raise error


def _send(device: torch.device, batch: Any) -> Callable[[], Any]:
    """Begin to copy the tensors of a batch on the side stream; see `one_ahead`."""
    side = _side_stream(device)
    copies: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        # others cannot be marked as used by a stream, and are copied when they are received
        if tensor.device == device or tensor.is_nested or tensor.layout is not torch.strided:
            return tensor
        copies.append(tensor.to(device, non_blocking=True))
        return copies[-1]

    with torch.cuda.stream(side):
        sent = map_tensors(batch, copy)
        copied = side.record_event()

    def receive() -> Any:
        user = torch.cuda.current_stream(device)
        user.wait_event(copied)
        for each in copies:
            # their memory must not be used for the next copy while this stream still computes with them
            each.record_stream(user)
        return to_device(sent, device)

    return receive


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies: each stream has memory of its own, which no other one reuses."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
