"""The facts of `environment.json`: with what, from where and by whom a run was submitted.

Environment variables are not among them, since they hold secrets.
"""

from __future__ import annotations

import os
import pwd
import re
import sys
from pathlib import Path
from typing import Any

from mgpu_slurm.launch.snapshot import Snapshot

# "Recording installed projects" of the packaging specifications: NAME-VERSION.dist-info, NAME with underscores
_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-[^/]*)?\.(?:dist|egg)-info")


def describe(snapshot: Snapshot | None) -> dict[str, Any]:
    """Plain values for `environment.json`.

    `python` (version, executable), `platform`, `host`, `user`, `command` (the words of this process's command
    line), `commit` and `dirty` and `digest` of the snapshot (None without one), and `packages`, the versions of all
    installed distributions by normalized name (`mgpu-slurm`, `torch`, ...).
    """
    system = os.uname()
    return {
        "python": {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable},
        "platform": f"{system.sysname} {system.release} {system.machine}",
        "host": system.nodename,
        "user": _user(),
        "command": list(sys.orig_argv),
        "commit": snapshot.commit if snapshot else None,
        "dirty": snapshot.dirty if snapshot else None,
        "digest": snapshot.digest if snapshot else None,
        "packages": installed_packages(sys.path),
    }


def installed_packages(search_path: list[str]) -> dict[str, str]:
    """Versions of the distributions found on a module search path, by normalized name; the first found wins.

    Read from folder names: importlib.metadata, which opens every METADATA file, takes 100 ms for 60 of them.
    """
    found: dict[str, str] = {}
    for folder in search_path:
        for name in _names_in(Path(folder)):
            match = _INSTALLED.fullmatch(name)
            if match:
                found.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return dict(sorted(found.items()))


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        # zip archives and folders that do not exist are common on sys.path
        return []


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        # containers run with ids that no passwd file knows
        return str(os.getuid())
