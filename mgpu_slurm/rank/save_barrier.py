"""Which ranks have finished a save: they say so through the store of their attempt, so that no step costs a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WRITTEN, _LOST = "written", "lost"


class SaveBarrier:
    """The saves of one run, by their numbers, and which ranks have finished each.

    Each rank has a value of its own: a counter would be quicker to read, and could not be signed.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    def done(self, save: int, is_lost: bool) -> None:
        """This rank is done with it.

        Args:
            is_lost: whether it could not write its part.
        """
        self._store.set(f"{save}/{self._rank}", _LOST if is_lost else _WRITTEN)

    def is_over(self, save: int) -> bool:
        """Whether all ranks are done with it."""
        return bool(self._store.check(self._keys(save)))

    def is_lost(self, save: int) -> bool:
        """Whether one of them could not write its part; asked when all are done."""
        return any(self._store.get(key) == _LOST.encode() for key in self._keys(save))

    def forget(self, save: int) -> None:
        """Remove what the ranks have told of it."""
        for key in self._keys(save):
            self._store.delete_key(key)

    def _keys(self, save: int) -> list[str]:
        return [f"{save}/{rank}" for rank in range(self._world_size)]
