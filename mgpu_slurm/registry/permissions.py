"""The owner of a run, and who may read or change it."""

from __future__ import annotations

import os
from pathlib import Path

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.registry.index import roots


def check_may_change(folder: RunFolder, what: str) -> None:
    """Refuse to change a run in whose folder this user may not write.

    Args:
        what: the change, as a verb for the message: `cancel`, `resume` or `delete`.

    Raises:
        UserError: the run belongs to another user.
    """
    # in a runs folder that many may write to, it could be renamed anyway
    if not os.access(folder.group.path, os.W_OK):
        owner = files.name_of_owner(folder.group.path)
        raise UserError(f"run {folder.run} belongs to {owner}: only they can {what} it")


def refuse_closed(name: str) -> None:
    """Distinguish a run that this user may not read from one that does not exist.

    Raises:
        UserError: a run of that name exists, and its owner keeps it closed.
    """
    for path in [Path(name), *(root / name for root in roots())]:
        try:
            os.stat(path / "spec.yaml")
        except PermissionError:
            raise UserError(
                f"run {str(path)!r} is not readable by you: its owner can set `readable-by: group` in mgpu.yaml"
                " and use a runs folder of a group that you share"
            ) from None
        except OSError:
            continue
