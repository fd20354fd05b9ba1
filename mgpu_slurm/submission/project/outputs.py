"""What commands write into a project on request: reports, charts and aggregated curves. None of it is the job's code.

Tables and weights are, because a job may read what was exported for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

GENERATOR = 'name="generator" content="mgpu-slurm"'
"""Attributes of an element in pages and charts, near their beginning."""

AGGREGATE, CURVES = "aggregate.json", "curves.csv"
"""Files in a folder of aggregated curves."""

_HEAD_BYTES = 2000
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+.*")
"""Files for TensorBoard, of any program."""


def is_page(file: Path) -> bool:
    """Return whether a file is a report or one of its charts."""
    with suppress(OSError), file.open("rb") as opened:
        return GENERATOR.encode() in opened.read(_HEAD_BYTES)
    return False


def without_outputs(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of files below a folder that are no outputs."""
    names = list(names)
    known = set(names)
    folders = {str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name == AGGREGATE}
    aggregates = {folder for folder in folders - {"."} if f"{folder}/{CURVES}" in known}
    for name in names:
        path = PurePosixPath(name)
        if _EVENTS.fullmatch(path.name) or not aggregates.isdisjoint(map(str, path.parents)):
            continue
        if path.suffix in (".html", ".svg") and is_page(root / name):
            continue
        yield name
