"""Whose a file is. What a folder such as /tmp has lying about may be a stranger's, and is used only if it is named."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from mgpu_slurm.errors import UserError


def name_of_owner(path: Path) -> str:
    """Return the user name of the owner of a file or folder; containers have owners without one."""
    number = path.stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def refuse_strangers(path: Path, why: str) -> None:
    """
    Args:
        why: what a stranger could do by it, and what to do instead.

    Raises:
        UserError: the file or folder belongs neither to this user nor to root.
    """
    if path.stat().st_uid not in (os.geteuid(), 0):
        raise UserError(f"{str(path)!r} belongs to {name_of_owner(path)}, {why}")
