"""Start Python safely, and list the packages installed for this interpreter.

Python is started without the working directory on the module search path. `python -m` puts it first there, so that a
file `mgpu_slurm.py` or `torch.py` in it would run with the rights of whoever starts something there. Installed packages
are read from folder names, without opening metadata files.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = "mgpu_slurm"

_BY_HAND = (
    "import sys; sys.path[:] = [*filter(None, sys.argv[1:2]), *filter(None, sys.path)]; del sys.argv[1];"
    " import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""Takes a folder to import from, or an empty word, and a module. The empty entry of the path is the one of `-c`."""

# "Recording installed projects" of the packaging specifications: NAME-VERSION.dist-info, NAME with underscores
_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-[^/]*)?\.(?:dist|egg)-info")


def command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module.

    Args:
        python: an interpreter; one other than this may be older, and may have its own version of this package.
    """
    is_this = python == sys.executable
    home = _home() if is_this else ""
    if is_this and sys.version_info >= (3, 11) and not home:
        return [python, "-P", "-m", module, *arguments]
    return [python, "-c", _BY_HAND, home, module, *arguments]


def search_path() -> list[str]:
    """Return this process's module search path, without the program's folder that Python may have put first."""
    return sys.path if is_safe() else sys.path[1:]


def is_safe() -> bool:
    """Return whether this process was started by `command`."""
    return bool(getattr(sys.flags, "safe_path", False)) or sys.orig_argv[1:3] == ["-c", _BY_HAND]


def python() -> dict[str, str]:
    """Return `version` and `executable` of this interpreter."""
    return {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable}


def packages(places: list[str]) -> dict[str, str]:
    """Return the versions of the distributions on a module search path by normalized name; the first found wins.

    importlib.metadata opens every METADATA file, which takes 100 ms for 60 of them.
    """
    found: dict[str, str] = {}
    for folder in places:
        for name in _names_in(Path(folder)):
            match = _INSTALLED.fullmatch(name)
            if match:
                found.setdefault(normalized(match["name"]), match["version"])
    return dict(sorted(found.items()))


def normalized(name: str) -> str:
    """Return a distribution's normalized name: `mgpu-slurm` for every spelling of it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def numbers(version: str) -> tuple[int, ...]:
    """Return `(2, 13, 0)` for `2.13.0+cpu`: enough to compare with a lower bound."""
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def facts() -> dict[str, Any]:
    """Return `python` and `packages` of this process, which may differ between two nodes."""
    # the metadata of a project in the program's own folder is not copied to other nodes
    return {"python": python(), "packages": packages(search_path())}


@cache
def _home() -> str:
    """Return this package's folder if only the program's folder leads to it, as in a clone; else an empty string."""
    home = Path(__file__).resolve().parents[2]
    finders = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]
    found = [importlib.machinery.PathFinder.find_spec(_PACKAGE, search_path())]
    # an editable installation may have a finder of its own
    found += [finder.find_spec(_PACKAGE, None) for finder in finders]
    places = [Path(spec.origin).resolve().parents[1] for spec in found if spec is not None and spec.origin]
    return "" if home in places[:1] else str(home)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        # zip archives and folders that do not exist are common on sys.path
        return []
