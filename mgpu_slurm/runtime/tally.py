"""How many ranks are done with a save: told through the store of their attempt, so that no step costs a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Tally:
    """Of the saves of one run, by their numbers."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size

    def done(self, save: int, is_lost: bool) -> None:
        """This rank is done with it.

        Args:
            is_lost: whether it could not write its part.
        """
        if is_lost:
            self._store.set(f"{save} lost", "")
        if self._store.add(f"{save} done", 1) == self._world_size:
            self._store.set(f"{save} all", "")

    def is_over(self, save: int) -> bool:
        """Whether all ranks are done with it."""
        return bool(self._store.check([f"{save} all"]))

    def is_lost(self, save: int) -> bool:
        """Whether one of them could not write its part."""
        return bool(self._store.check([f"{save} lost"]))

    def forget(self, save: int) -> None:
        for what in ("lost", "done", "all"):
            self._store.delete_key(f"{save} {what}")
