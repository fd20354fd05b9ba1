"""`mgpu-slurm init`: a starter project."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from mgpu_slurm.core.errors import UserError

STARTER_FILES = ("train.py", "sweep.yaml", "mgpu.yaml")


def write(folder: Path) -> list[Path]:
    """Write the files of a starter project into a folder, creating it if needed; all files or none.

    Raises:
        UserError: one of the files exists already, or the folder is not writable.
    """
    paths = [folder / name for name in STARTER_FILES]
    present = [path.name for path in paths if path.exists() or path.is_symlink()]
    if present:
        verb, them = ("exist", "them") if len(present) > 1 else ("exists", "it")
        where = f"already {verb} in {str(folder)!r}"
        raise UserError(f"{', '.join(present)} {where}: choose another folder, or move {them}")
    starter = resources.files("mgpu_slurm.submission") / "starter"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text((starter / path.name).read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"folder {str(folder)!r} cannot be written ({error.strerror}): use another folder") from None
    return paths
