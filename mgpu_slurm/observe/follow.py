"""Following a run: the log of one rank as it grows, over attempts, and what happens to the run, until it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from mgpu_slurm.launch import registry, states
from mgpu_slurm.launch.runs import log_files
from mgpu_slurm.paths import RunFolder, read_jsonl

PAUSE = 0.1
"""Seconds between two looks at the files; the executor is asked ten times less often."""


def follow(folder: RunFolder, rank: int = 0, since_event: int = 0) -> Iterator[str]:
    """Yields pieces of text as they appear, and ends with the run.

    Args:
        since_event: events of the run's history that were there before, and are not told again.
    """
    tails: dict[Path, _Tail] = {}
    told = since_event
    ended = False
    looks = 0
    while True:
        # the state is read before the logs: what is written before the end is shown before the end
        if looks % 10 == 0:
            ended = not states.is_alive(registry.state(folder)["state"])
        looks += 1
        for event in list(read_jsonl(folder.attempts))[told:]:
            told += 1
            if event["event"] == "requeued":
                yield "-- requeued: the run starts again from its newest checkpoint\n"
        for path in log_files(folder, rank):
            yield from tails.setdefault(path, _Tail(path)).read()
        if ended:
            return
        time.sleep(PAUSE)


class _Tail:
    """What was added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> Iterator[str]:
        with open(self._path, "rb") as file:
            file.seek(self._position)
            added = file.read()
        self._position += len(added)
        if added:
            yield added.decode(errors="replace")
