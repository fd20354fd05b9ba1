"""A store with signed values, so that values written by another user's process are detected and never used."""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mgpu_slurm.core.errors import ForgeryError
from mgpu_slurm.job import store_server

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    Store = dist.Store

_DIGEST_BYTES = 32
_HEAD = struct.Struct(">IQ")
"""The writer's rank, and the length of the value's name."""


def signed(store: Store, rank: int, environ: Mapping[str, str] = os.environ) -> Store:
    """Return the store with signed values; the store itself if it signs them already, or if there is no secret.

    Args:
        rank: This process's rank.
    """
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    key = store_server.key_of_store(environ)
    return store if key is None or isinstance(base, SignedStore) else SignedStore(store, key, rank)


class SignedStore(Store):
    """A store that signs each value, with its name and the writer's rank, and verifies it on reading.

    Write each name only once in the life of the key, because an older value of the same name would be valid too. The
    results of `add` and `wait` are not signed. They are hints: read the value with `get`.

    Process groups call these methods from C++ too. Other methods of a store are not implemented.
    """

    def __init__(self, store: Store, key: bytes, rank: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._rank = rank
        self.set_timeout(store.timeout)  # type: ignore[attr-defined]
        # process groups hold only the C++ object, which does not keep this one alive
        _kept.append(self)

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._key, self._rank)  # type: ignore[attr-defined]

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        body = _HEAD.pack(self._rank, len(key.encode())) + data
        self._store.set(key, self._signature(key, body) + body)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            ForgeryError: The value was not written by a rank of this attempt.
        """
        stored = self._store.get(key)
        signature, body = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, body)):
            raise ForgeryError(
                f"the rendezvous has a value of {key!r} that no rank of this attempt wrote: another process,"
                " possibly another user's, has connected to it"
            )
        return body[_HEAD.size :]

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys have values.

        Raises:
            ForgeryError: A value was not written by a rank of this attempt.
        """
        if not self._store.check(keys):
            return False
        for key in keys:
            self.get(key)
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    # the names under which torch calls them from C++
    deleteKey, getNumKeys = delete_key, num_keys

    def _signature(self, key: str, body: bytes) -> bytes:
        # the head contains the length of the name, so the end of the name is unambiguous
        return hmac.digest(self._key, body[: _HEAD.size] + key.encode() + body[_HEAD.size :], "sha256")


_kept: list[SignedStore] = []
