"""The runs folders of this user, and the runs in them."""

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
    """Add a runs folder to this user's index, unless it is there already."""
    index = _index()
    if any(record["folder"] == str(root) for record in read_jsonl(index)):
        return
    # without a writable home, runs are still found from their own folder
    with contextlib.suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(index, {"folder": str(root)})


def roots() -> list[Path]:
    """Return the runs folder of the working directory, then all others that this user has used and that still exist."""
    known = [layout.runs_root(), *(Path(record["folder"]) for record in read_jsonl(_index()))]
    # two paths to the same folder count once
    found = dict.fromkeys(root.resolve() for root in known)
    return [root for root in found if os.path.isdir(root) and os.access(root, os.R_OK | os.X_OK)]


def folders(root: Path) -> list[RunFolder]:
    """Return the runs and groups in a runs folder, except other users' private ones."""
    return [
        RunFolder(path)
        for path in root.iterdir()
        if not path.name.startswith(".") and os.path.exists(path / "state.json")
    ]
