"""Track the memory of tensors that have shapes but no values, so that a model of any size can be tried anywhere.

Torch's fake tensors take the place of a model's parameters and inputs; operations on them compute shapes only. See
https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from mgpu_slurm.data.batching.nests import children_of, rebuilt
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.training.memory import fake_torch_adapter

Kind = Literal["parameters", "gradients", "optimizer", "inputs", "activations"]


class MemoryTracker(fake_torch_adapter.DispatchMode):  # type: ignore[misc]
    """Counts the bytes of all fake tensors on the device, and keeps the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = fake_torch_adapter.fake_mode()
        self._has_begun = False
        self._end = ExitStack()
        self._scalar = 1.0
        """The value of each number that the job reads."""
        self._kind: Kind = "activations"
        """The kind of new tensors."""
        self._known: dict[int, tuple[weakref.ref[Any], Kind, int]] = {}
        """Each storage with its kind and bytes, by address."""
        self._bytes: Counter[str] = Counter()
        self.total = 0
        self.peak = 0
        self.at_peak: Mapping[str, int] = {}
        """Bytes of each kind at the peak."""
        self.phase = "forward and backward pass"
        """What the job does now."""
        self.phase_of_peak = ""
        self.makes_fakes = False
        """Whether tensors that are made of no others are fake, too."""

    @contextmanager
    def allocating(self, kind: Kind, phase: str | None = None) -> Iterator[None]:
        """Count new tensors as this kind within the block."""
        before = self._kind, self.phase
        self._kind, self.phase = kind, self.phase if phase is None else phase
        try:
            yield
        finally:
            self._kind, self.phase = before

    @contextmanager
    def making_buckets(self) -> Iterator[None]:
        """Count what DDP allocates in this block: the gradients are views of it."""
        before, self.makes_fakes = self.makes_fakes, True
        try:
            with self.allocating("gradients"):
                yield
        finally:
            self.makes_fakes = before

    @contextmanager
    def reading(self, scalar: float) -> Iterator[None]:
        """Give each number that is read from a fake tensor in this block this value."""
        before, self._scalar = self._scalar, scalar
        try:
            yield
        finally:
            self._scalar = before

    def fake(self, tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
        """Return a fake tensor in place of one, and count it; the same one if it is fake already."""
        found = tensor if torch_adapter.is_fake(tensor) else self._fake.from_tensor(tensor)
        self.count(found, kind)
        return found

    def make_fake(self, parameter: nn.Parameter) -> None:
        """Turn a parameter into a fake one wherever it is referred to, and count it."""
        if not torch_adapter.is_fake(parameter) and not torch_adapter.is_dtensor(parameter):
            fake_torch_adapter.become_fake(parameter, self._fake)
        self.count(parameter, "parameters")

    def fake_all(self, nest: Any, kind: Kind) -> Any:
        """Return a nest of tensors with fake ones."""
        if isinstance(nest, torch.Tensor):
            return self.fake(nest, kind)
        children = children_of(nest)
        return nest if children is None else rebuilt(nest, [self.fake_all(child, kind) for child in children])

    def count(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Count a fake tensor, or the one of this rank in a distributed tensor, as a kind."""
        if torch_adapter.is_dtensor(tensor):
            tensor = torch_adapter.local_part(tensor)
        if not torch_adapter.is_fake(tensor, self._fake) or tensor.device.type == "meta":
            # of torch's own use of fake tensors, which finds out shapes
            return
        storage = tensor.untyped_storage()
        key = fake_torch_adapter.storage_address(storage)
        if key in self._known:
            reference, before, size = self._known[key]
            self._known[key] = reference, kind, size
            self._bytes[before] -= size
            self._bytes[kind] += size
        else:
            self._known[key] = weakref.ref(storage, self._forget(key)), kind, 0
            self._resize(key, storage.nbytes())

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor any more, as it is not on the device."""
        key = fake_torch_adapter.storage_address(tensor.untyped_storage())
        if key in self._known:
            self._resize(key, 0)

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._resize(key, 0)
            del self._known[key]

        return forget

    def _resize(self, key: int, size: int) -> None:
        reference, kind, before = self._known[key]
        self._known[key] = reference, kind, size
        self._bytes[kind] += size - before
        self.total += size - before
        if self.total > self.peak:
            self.peak, self.at_peak, self.phase_of_peak = self.total, dict(self._bytes), self.phase

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = 0

    def begin(self) -> None:
        """Track memory from now on, if it has not begun yet."""
        if self._has_begun:
            return
        self._has_begun = True
        resizing = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            # sharded models free and allocate the memory of gathered parameters by this method
            result = resizing(storage, size)
            if (key := fake_torch_adapter.storage_address(storage)) in self._known:
                self._resize(key, size)
            return result

        self._end.enter_context(torch_adapter.replaced(torch.UntypedStorage, resize_=resize))
        self._end.enter_context(self)

    def close(self) -> None:
        """Track no memory any more."""
        self._end.close()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(map(torch_adapter.is_dtensor, types)):
            # it calls operations on local tensors, which come here
            return NotImplemented
        if function is fake_torch_adapter.READS_SCALAR and torch_adapter.is_fake(args[0]):
            is_bool, is_float = args[0].dtype == torch.bool, args[0].dtype.is_floating_point
            return _assumed_truth(args[0]) if is_bool else self._scalar if is_float else 1
        if self.makes_fakes and not fake_torch_adapter.makes_fakes() and not _takes_tensors(args):
            with self._fake:
                result = function(*args, **(kwargs or {}))
        else:
            result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            self._see(each, self._kind)
            if torch_adapter.is_fake(each) and each.dtype == torch.bool:
                each.assumed_truth = _truth(function.overloadpacket.__name__, args, self._scalar)
        for each in args:
            # of a model that was not wrapped
            self._see(each, "parameters" if isinstance(each, nn.Parameter) else self._kind)
        return result

    def _see(self, value: Any, kind: Kind) -> None:
        if (
            torch_adapter.is_fake(value)
            and fake_torch_adapter.storage_address(value.untyped_storage()) not in self._known
        ):
            self.count(value, kind)


def _takes_tensors(args: tuple[Any, ...]) -> bool:
    parts = (part for each in args for part in (each if isinstance(each, (tuple, list)) else (each,)))
    return any(isinstance(part, torch.Tensor) for part in parts)


_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _assumed_truth(tensor: torch.Tensor) -> bool:
    """Return the value that all elements of a fake tensor are taken to have."""
    return getattr(tensor, "assumed_truth", False)


def _truth(operation: str, args: tuple[Any, ...], number: float) -> bool:
    """Return the truth values that an operation results in if all numbers are the same: a job that checks its loss, or
    draws until all numbers are within bounds, then continues.

    Args:
        number: that number.
    """
    truths = [_assumed_truth(each) for each in args if torch_adapter.is_fake(each) and each.dtype == torch.bool]
    if operation in _COMPARISONS:
        values = [number if isinstance(each, torch.Tensor) else each for each in args[:2]]
        # many initializers draw again what is out of bounds, and bounds may be narrower than this number
        is_drawn = operation in ("lt", "gt") and not isinstance(args[1], torch.Tensor) and args[0].numel() > 1
        return not is_drawn and bool(_COMPARISONS[operation](*values))
    if operation in ("logical_not", "bitwise_not"):
        return bool(truths) and not truths[0]
    if operation in ("logical_or", "bitwise_or", "__or__"):
        return any(truths)
    return bool(truths) and all(truths)
