"""The folder for compiled code: on the node's own disk, of this user alone, and kept for later runs.

Torch's own default is a name in /tmp that anyone could create first, although it executes what it finds there, and in
$TMPDIR, which many sites remove after each job. A shared disk is slow for many small files.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"
THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
"""The number of processes in which a rank compiles."""

PLACE = Path("/var/tmp")
"""Folder of a node that survives jobs and, by the Filesystem Hierarchy Standard, restarts."""

ROOM = 64 << 20
"""Bytes that must be free. Eight graphs of one block of three layers took 7 MB on a CPU, without headers."""


@contextmanager
def in_use() -> Iterator[str | None]:
    """Set the folder in the environment of this process, unless it is set; yield a warning if it will not be kept.

    One that is not kept is deleted at the end of the block, but not where a command replaces this process in it.
    """
    # else one process for each core of the node, in each rank
    os.environ.setdefault(THREADS_VARIABLE, os.environ["OMP_NUM_THREADS"].split(",")[0])
    with ExitStack() as undo:
        warning = None
        if CACHE_VARIABLE not in os.environ:
            folder = PLACE / f"mgpu_slurm-{os.geteuid()}"
            if (problem := _problem(folder)) is not None:
                warning = f"{folder} {problem}: compiled code is kept for this attempt only"
                own = tempfile.TemporaryDirectory(prefix="mgpu_slurm-", ignore_cleanup_errors=True)
                folder = Path(undo.enter_context(own))
                undo.callback(os.environ.pop, CACHE_VARIABLE, None)
            os.environ[CACHE_VARIABLE] = str(folder)
            os.environ.setdefault(TRITON_VARIABLE, str(folder / "triton"))
        yield warning


def _problem(folder: Path) -> str | None:
    """Create a folder of this user alone, or check it; return why it cannot be used."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return "belongs to another user"
        if stat.S_IMODE(found.st_mode) & 0o077:
            return "is open to other users (remove it)"
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    return None
