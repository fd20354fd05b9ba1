"""Which runs folders this user has, and what is in them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mgpu_slurm.core import layout
from mgpu_slurm.core.files import append_jsonl, read_jsonl
from mgpu_slurm.core.layout import RunFolder


def _index() -> Path:
    return layout.state_home() / "runs-folders.jsonl"


def remember_root(root: Path) -> None:
    """Adds a runs folder to this user's index, once."""
    index = _index()
    if any(record["folder"] == str(root) for record in read_jsonl(index)):
        return
    # without a home that can be written, runs are still found from their own folder
    with contextlib.suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(index, {"folder": str(root)})


def roots() -> list[Path]:
    """The runs folder of the working directory, then every other one that this user has used and that still exists."""
    known = [layout.runs_root(), *(Path(record["folder"]) for record in read_jsonl(_index()))]
    # two ways to the same folder are one
    found = dict.fromkeys(root.resolve() for root in known)
    return [root for root in found if os.path.isdir(root) and os.access(root, os.R_OK | os.X_OK)]


def folders(root: Path) -> list[RunFolder]:
    """The runs and groups in a runs folder, but for those of others who keep theirs to themselves."""
    return [
        RunFolder(path)
        for path in root.iterdir()
        if not path.name.startswith(".") and os.path.exists(path / "state.json")
    ]
