"""The runs folders of this user, the runs in them, and who may read or change a run."""

from __future__ import annotations

import contextlib
import grp
import os
import stat
import tempfile
from pathlib import Path

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import append_jsonl, read_jsonl
from mgpu_slurm.run_folder import layout
from mgpu_slurm.run_folder.layout import RunFolder


def state_home() -> Path:
    """Return the folder of this user's index of runs folders."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "mgpu_slurm"


def _index() -> Path:
    return state_home() / "runs-folders.jsonl"


def remember_root(root: Path) -> None:
    """Add a runs folder to this user's index, unless it is there already."""
    index = _index()
    if any(record["folder"] == str(root) for record in read_jsonl(index)):
        return
    # without a writable home, runs are still found from their own folder
    with contextlib.suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(index, {"folder": str(root)})


def roots() -> list[Path]:
    """Return the runs folder of the working directory, then all others that this user has used and that still exist."""
    known = [layout.runs_root(), *(Path(record["folder"]) for record in read_jsonl(_index()))]
    # two paths to the same folder count once
    found = dict.fromkeys(root.resolve() for root in known)
    return [root for root in found if os.path.isdir(root) and os.access(root, os.R_OK | os.X_OK)]


def folders(root: Path) -> list[RunFolder]:
    """Return the runs and groups in a runs folder, except other users' private ones."""
    return [
        RunFolder(path)
        for path in root.iterdir()
        if not path.name.startswith(".") and os.path.exists(path / "state.json")
    ]


def make_writable(folder: Path) -> None:
    """Create a folder for runs and check that it is writable.

    Raises:
        UserError: its name is reserved, or it cannot be written.
    """
    if folder.name in (layout.TASKS, layout.TRIALS):
        raise UserError(f"runs folder {str(folder)!r}: {folder.name!r} is a reserved name: choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"runs folder {str(folder)!r} cannot be written ({error.strerror}): set MGPU_RUNS to a folder of your own"
        ) from None


# -- the owner of a run, and who may read or change it


def is_open_to_replacement(runs: Path) -> bool:
    """Return whether other users can write to a folder of runs, and put their own in the place of someone's run.

    A group that has the name of the owner is theirs alone, as `useradd` makes it.
    """
    found = runs.stat()
    if found.st_mode & stat.S_ISVTX:
        return False
    is_shared = found.st_mode & stat.S_IWGRP and _name_of_group(found.st_gid) != files.name_of_owner(runs)
    return bool(is_shared or found.st_mode & stat.S_IWOTH)


def _name_of_group(number: int) -> str | None:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return None


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
