"""The facts of `environment.json`: with which software, from where and by whom a run was submitted.

Environment variables are not included, since they may hold secrets.
"""

from __future__ import annotations

import os
import pwd
import sys
from typing import Any

from mgpu_slurm.core import interpreter
from mgpu_slurm.submission.snapshot import Snapshot


def describe(snapshot: Snapshot | None) -> dict[str, Any]:
    """Return plain values for `environment.json`.

    `python` (version, executable), `platform`, `host`, `user`, `command` (the words of this process's command
    line), `commit` and `dirty` and `digest` of the snapshot (None without one), and `packages`, the versions of all
    installed distributions by normalized name (`torch`, `numpy`, ...).
    """
    system = os.uname()
    return {
        **interpreter.facts(),
        "platform": f"{system.sysname} {system.release} {system.machine}",
        "host": system.nodename,
        "user": _user(),
        "command": list(sys.orig_argv),
        "commit": snapshot.commit if snapshot else None,
        "dirty": snapshot.dirty if snapshot else None,
        "digest": snapshot.digest if snapshot else None,
    }


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        # containers may run with ids that are not in the passwd file
        return str(os.getuid())
