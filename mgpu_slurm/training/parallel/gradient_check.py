"""Detect gradients that ranks do not exchange, although they train the same model."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.parallelism import Layout

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""
_BITS = 26
"""Of each digest: two of them fit into the 53 bits of a float."""


def check_loss(loss: torch.Tensor) -> None:
    """Check that a loss has gradients.

    Raises:
        UserError: it depends on no trained parameter.
    """
    if not loss.requires_grad:
        raise UserError(
            "run.backward: the loss depends on no trained parameter: unfreeze one, and compute the loss without"
            " torch.no_grad()"
        )


class GradientCheck:
    """A digest of what ranks that train the same model must have in common.

    Ranks compare it when they meet anyway, such as at the end of an epoch, so that no step costs a message, and a rank
    that trains something alone does not wait for the others.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._unseen: dict[int, list[torch.Tensor]] = {}
        """Parameters whose first gradient has not been seen, by the id of their optimizer."""
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        """The others, by id."""
        self._gradients = self._trained = 0
        self._why = "run.update: ranks train different parameters that are in no model returned by run.wrap"

    @property
    def digest(self) -> float:
        """All that was recorded on this rank."""
        return float(self._trained << _BITS | self._gradients)

    def check(self, digests: Sequence[float]) -> None:
        """Check that ranks with the same layers agree.

        Args:
            digests: digests of all ranks.

        Raises:
            UserError: they do not.
        """
        of_stages: dict[int, float] = {}
        for rank, digest in enumerate(digests):
            first = of_stages.setdefault(self._layout.stage(rank), digest)
            if first != digest:
                if int(first) >> _BITS == int(digest) >> _BITS:
                    raise UserError(self._why)
                raise UserError(
                    "run.wrap: ranks have frozen different parameters of a model: freeze and unfreeze the same ones at"
                    " the same step on all ranks"
                )

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Record which parameters of a model are trained from now on."""
        self._trained = _digest(self._trained, *trained)

    def watch(self, optimizer: Any, parameters: Sequence[torch.Tensor], why: str) -> None:
        """Record the first gradients of these parameters of an optimizer, which no model exchanges.

        Args:
            why: the error if they differ between ranks.
        """
        waiting = self._unseen.setdefault(id(optimizer), [])
        known = {*map(id, waiting), *(number for number, seen in self._seen.items() if seen() is not None)}
        if unseen := [each for each in parameters if id(each) not in known]:
            waiting += unseen
            self._why = why

    def before_update(self, optimizer: Any) -> None:
        """Record gradients that are seen for the first time. The job may have exchanged them itself by now."""
        waiting = self._unseen.pop(id(optimizer), [])
        unseen = []
        for number, parameter in enumerate(waiting):
            bits = None if parameter.grad is None else _bits(parameter.grad)
            if bits is None:
                unseen.append(parameter)
            else:
                self._seen[id(parameter)] = weakref.ref(parameter)
                self._gradients = _digest(self._gradients, number, bits)
        if unseen:
            self._unseen[id(optimizer)] = unseen


def _digest(*values: int) -> int:
    return zlib.crc32(repr(values).encode()) % (1 << _BITS)


def _bits(gradient: torch.Tensor) -> int | None:
    """Return the sum of the bits of a gradient as integers, which does not depend on the order of summation; None if
    it says nothing, because it is zero or not finite."""
    held = gradient.detach()
    values = held.coalesce().values() if held.is_sparse else held.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    largest = values.abs().amax() if values.numel() else torch.zeros(())
    if not 0 < float(largest) < float("inf"):
        return None
    return int(values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
