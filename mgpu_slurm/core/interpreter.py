"""How the project starts Python: without the working directory on the module search path.

`python -m` puts it there first: a file `mgpu_slurm.py` or `torch.py` in it would run as whoever starts something there.
"""

from __future__ import annotations

import importlib.machinery
import sys
from functools import cache
from pathlib import Path

_PACKAGE = "mgpu_slurm"

_BY_HAND = (
    "import sys; sys.path[:] = [*filter(None, sys.argv[1:2]), *filter(None, sys.path)]; del sys.argv[1];"
    " import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""Takes a folder to import from, or nothing, and a module. The entry that `-c` puts first is the empty one."""


def command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the words that run a module.

    Args:
        python: an interpreter; another one than this may be older, and may have its own version of this package.
    """
    is_this = python == sys.executable
    home = _home() if is_this else ""
    if is_this and sys.version_info >= (3, 11) and not home:
        return [python, "-P", "-m", module, *arguments]
    return [python, "-c", _BY_HAND, home, module, *arguments]


def search_path() -> list[str]:
    """Return where this process imports from, but for the program's own folder that Python may have put first."""
    return sys.path if is_safe() else sys.path[1:]


def is_safe() -> bool:
    """Return whether this process was started by `command`."""
    return bool(getattr(sys.flags, "safe_path", False)) or sys.orig_argv[1:3] == ["-c", _BY_HAND]


@cache
def _home() -> str:
    """The folder of this package where it is found by the program's own folder only, as in a clone; else empty."""
    home = Path(__file__).resolve().parents[2]
    finders = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]
    found = [importlib.machinery.PathFinder.find_spec(_PACKAGE, search_path())]
    # an editable installation may have a finder of its own
    found += [finder.find_spec(_PACKAGE, None) for finder in finders]
    places = [Path(spec.origin).resolve().parents[1] for spec in found if spec is not None and spec.origin]
    return "" if home in places[:1] else str(home)
