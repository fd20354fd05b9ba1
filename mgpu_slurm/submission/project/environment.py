"""The content of `environment.json`: with which software, from where and by whom a run was submitted.

Environment variables are not included, since they may hold secrets.
"""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import asdict, dataclass

from mgpu_slurm.core import interpreter
from mgpu_slurm.submission.project.snapshot import Snapshot


@dataclass(frozen=True)
class Environment:
    """The fields of `environment.json`."""

    python: dict[str, str]
    """`version` and `executable`."""
    packages: dict[str, str]
    """Versions of all installed distributions by normalized name (`torch`, `numpy`, ...)."""
    platform: str
    host: str
    user: str
    command: list[str]
    """The words of the command line of the process that submits."""
    commit: str | None
    """The snapshot's commit; None, as `dirty` and `digest`, without a snapshot."""
    dirty: bool | None
    digest: str | None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def describe(snapshot: Snapshot | None) -> Environment:
    """Return the environment of this process, which submits the snapshot."""
    system, facts = os.uname(), interpreter.facts()
    return Environment(
        python=facts["python"],
        packages=facts["packages"],
        platform=f"{system.sysname} {system.release} {system.machine}",
        host=system.nodename,
        user=_user(),
        command=list(sys.orig_argv),
        commit=snapshot.commit if snapshot else None,
        dirty=snapshot.dirty if snapshot else None,
        digest=snapshot.digest if snapshot else None,
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        # containers may run with ids that are not in the passwd file
        return str(os.getuid())
