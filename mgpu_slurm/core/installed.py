"""The interpreter of this process and what is installed for it, read from folder names: no metadata file is opened."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mgpu_slurm.core import interpreter

# "Recording installed projects" of the packaging specifications: NAME-VERSION.dist-info, NAME with underscores
_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-[^/]*)?\.(?:dist|egg)-info")


def python() -> dict[str, str]:
    """`version` and `executable` of this interpreter."""
    return {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable}


def packages(search_path: list[str]) -> dict[str, str]:
    """Versions of the distributions found on a module search path, by normalized name; the first found wins.

    importlib.metadata, which opens every METADATA file, takes 100 ms for 60 of them.
    """
    found: dict[str, str] = {}
    for folder in search_path:
        for name in _names_in(Path(folder)):
            match = _INSTALLED.fullmatch(name)
            if match:
                found.setdefault(normalized(match["name"]), match["version"])
    return dict(sorted(found.items()))


def normalized(name: str) -> str:
    """`mgpu-slurm` for every way to write the name of that distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def facts() -> dict[str, Any]:
    """`python` and `packages` of this process: what may differ between two nodes."""
    # what a project's own files say of it in the program's own folder does not travel
    return {"python": python(), "packages": packages(interpreter.search_path())}


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        # zip archives and folders that do not exist are common on sys.path
        return []
