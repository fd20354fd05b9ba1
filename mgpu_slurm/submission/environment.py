"""The facts of `environment.json`: with what, from where and by whom a run was submitted.

Environment variables are not among them, since they hold secrets.
"""

from __future__ import annotations

import os
import pwd
import sys
from typing import Any

from mgpu_slurm.core import interpreter
from mgpu_slurm.submission.snapshot import Snapshot


def describe(snapshot: Snapshot | None) -> dict[str, Any]:
    """Plain values for `environment.json`.

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
        # containers run with ids that no passwd file knows
        return str(os.getuid())
