"""Decide which nodes measure the network between them, and pass it on: a file for each direction in each task's folder.

Each node is measured with two others where it can be. A slow node is then slow with both, while each of its partners
has another one to show that it is not to blame.
"""

from __future__ import annotations

from pathlib import Path

from mgpu_slurm.run_folder.layout import RunFolder

PARTNERS = 2


def orders(folder: RunFolder) -> Path:
    """Return the file in which `doctor` tells the task of a node whom to measure with, and when to leave."""
    return folder.path / "checkup-orders.jsonl"


def prepare(folder: RunFolder) -> None:
    """Create both files before the task starts: a network file system may remember for a minute that one is missing."""
    folder.create_task()
    folder.checkup.touch()
    orders(folder).touch()


class Partners:
    """The nodes that have reported and have not left."""

    def __init__(self) -> None:
        self._met: dict[str, set[str]] = {}
        self._busy: dict[str, str] = {}
        """The nodes that measure, with whom."""

    def arrive(self, node: str) -> None:
        self._met[node] = set()

    def leave(self, node: str) -> None:
        self._met.pop(node, None)
        if node in self._busy:
            self.end(node, self._busy[node])

    def begin(self) -> list[tuple[str, str]]:
        """Return pairs of nodes that are to measure now; each of them is busy until `end`."""
        pairs: list[tuple[str, str]] = []
        # those with the fewest partners first, so that none is left without one
        free = sorted(self.waiting(), key=lambda node: len(self._met[node]))
        while free:
            node = free.pop(0)
            other = next((each for each in free if self._is_match(node, each)), None)
            if other is not None:
                free.remove(other)
                pairs.append((node, other))
                self._busy |= {node: other, other: node}
                self._met[node].add(other)
                self._met[other].add(node)
        return pairs

    def end(self, node: str, other: str) -> None:
        for each in (node, other):
            self._busy.pop(each, None)

    def waiting(self) -> list[str]:
        """Return the nodes that do not measure at the moment."""
        return [node for node in self._met if node not in self._busy]

    def has_met(self, node: str) -> bool:
        return bool(self._met[node])

    def may_meet(self, node: str, may_come: bool) -> bool:
        """Return whether a node has somebody left to measure with.

        Args:
            may_come: whether other nodes may still arrive.
        """
        return not self._is_content(node) and (may_come or any(self._is_match(node, other) for other in self._met))

    def _is_content(self, node: str) -> bool:
        return len(self._met[node]) >= PARTNERS

    def _is_match(self, node: str, other: str) -> bool:
        is_new = other != node and other not in self._met[node]
        return is_new and not self._is_content(node) and not self._is_content(other)
