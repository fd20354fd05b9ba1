"""Code that was checked before: the same snapshot, target and packages import as they did, and need no second look.

What is kept is the description of the job's config class, in a small file for each code. A missing file costs a check,
nothing else; and the run fills the real class again when it starts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mgpu_slurm import paths

KEPT = 200


def key(digest: str, target: str, workdir: str, packages: dict[str, str]) -> str:
    """Names all that a check depends on.

    Args:
        digest: of the snapshot.
        workdir: where the job stands, relative to it.
        packages: versions of all installed distributions.
    """
    facts = json.dumps([digest, target, workdir, sys.executable, sys.version, packages])
    return hashlib.sha256(facts.encode()).hexdigest()


def recall(name: str) -> Any | None:
    """The description that was kept under the key, or None."""
    try:
        kept: Any = json.loads((_folder() / name).read_text())
    except (OSError, ValueError):
        return None
    return kept


def keep(name: str, description: Any) -> None:
    """Keeps a description, and the newest `KEPT` in all; where nothing can be written, nothing is kept."""
    with suppress(OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        paths.write_whole(folder / name, json.dumps(description), sync=False)
        by_age = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-KEPT]:
            old.unlink(missing_ok=True)


def _folder() -> Path:
    return paths.state_home() / "checked"
