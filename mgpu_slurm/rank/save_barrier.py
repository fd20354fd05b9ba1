"""Track which ranks have finished a save, through the store of their attempt, so that no step costs a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WRITTEN, _LOST = "written", "lost"


class SaveBarrier:
    """The saves of one run, by number, and which ranks have finished each.

    Each rank sets a separate value. A counter would be faster to read, but could not be signed.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    def done(self, save: int, is_lost: bool) -> None:
        """Note that this rank is done with a save.

        Args:
            is_lost: whether this rank could not write its part.
        """
        self._store.set(f"{save}/{self._rank}", _LOST if is_lost else _WRITTEN)

    def is_over(self, save: int) -> bool:
        """Return whether all ranks are done with a save."""
        return bool(self._store.check(self._keys(save)))

    def is_lost(self, save: int) -> bool:
        """Return whether any rank could not write its part; call it when all ranks are done."""
        return any(self._store.get(key) == _LOST.encode() for key in self._keys(save))

    def forget(self, save: int) -> None:
        """Delete the ranks' values of a save."""
        for key in self._keys(save):
            self._store.delete_key(key)

    def _keys(self, save: int) -> list[str]:
        return [f"{save}/{rank}" for rank in range(self._world_size)]
