"""Copy data sets to the disk of each node, once, before the job's own code runs there: `--stage`.

Each rank of a node holds a lock of the copy, and the first one makes it. The kernel releases the locks of a process
that ends, however that happens: the last rank can delete the copy, and the next job finds what killed ones have left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import is_own, name_of_owner
from mgpu_slurm.core.formatting import counted, human_size

VARIABLE = "MGPU_STAGED"
"""The copies on this node, as JSON: the path of each original, and that of its copy."""

START_VARIABLE = "MGPU_STAGED_FROM"
"""The folder that relative paths start from, in the environment of every rank."""

COPIERS = 16
"""Threads that copy files: a parallel file system answers many requests at once."""


def staged(path: str | Path) -> Path:
    """Return where to read a data set on this node: its copy by `--stage`, or else the path itself.

    Args:
        path: the data set, or a file or folder within it. A relative one starts where the job was submitted.
    """
    copies: dict[str, str] = json.loads(os.environ.get(VARIABLE, "{}"))
    asked = Path(os.path.normpath(Path(os.environ.get(START_VARIABLE, "")) / path))
    for original, copy in copies.items():
        if asked.is_relative_to(original):
            return Path(copy) / asked.relative_to(original)
    return asked


@contextmanager
def copies_of(originals: Sequence[str], base: str | None) -> Iterator[None]:
    """Keep copies of data sets on this node during the block, for `staged`.

    Args:
        originals: absolute paths of files or folders.
        base: a folder on this node's own disk, in which variables are replaced; None for that of temporary files.

    Raises:
        UserError: they do not fit on the disk, cannot be read, or the folder belongs to another user.
    """
    if not originals:
        yield
        return
    folder = _own_folder(_replaced(base) if base else Path(tempfile.gettempdir()))
    with ExitStack() as held:
        copies = {}
        for original in map(Path, originals):
            if _is_on_disk_of(folder, original):
                log_lines.say(f"--stage {original}: it is on the disk of {folder.parent} already, and is not copied")
            else:
                copies[str(original)] = str(held.enter_context(closing(_Copy(original, folder))).path)
        _delete_remains(folder)
        os.environ[VARIABLE] = json.dumps(copies)
        yield


class _Copy:
    """A copy that this process holds."""

    def __init__(self, original: Path, folder: Path) -> None:
        self._original = original
        self._place = folder / hashlib.sha256(str(original).encode()).hexdigest()[:16]
        self.path = self._place / original.name
        self._lock = _opened_lock(self._place)
        with ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self._take()
            undo.pop_all()

    def _take(self) -> None:
        """Wait until the copy is complete, and make it if nobody does."""
        mark = self._place / "complete"
        while True:
            if _try_lock(self._lock):
                try:
                    mark.unlink(missing_ok=True)
                    self._place.mkdir(exist_ok=True)
                    _synchronize(self._original, self.path)
                    mark.touch()
                except OSError as error:
                    _delete(self._place)
                    raise UserError(f"--stage {self._original}: {error}") from None
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if mark.exists():
                return
            # whoever was copying it has failed
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the copy; the last process deletes it."""
        if _try_lock(self._lock):
            _delete(self._place)
        # workers of a loader that still end have the same lock
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


def _replaced(base: str) -> Path:
    """Return a path with the variables of this node.

    Raises:
        UserError: a variable is not set, or the path is relative.
    """
    found = os.path.expandvars(base)
    if "$" in found or not os.path.isabs(found):
        raise UserError(f"--stage: stage-to {base!r} is {found!r} on {os.uname().nodename}: name a folder of the nodes")
    return Path(found)


def _own_folder(base: Path) -> Path:
    """Return the folder of this user's copies.

    Raises:
        UserError: it cannot be made, or another user has made it.
    """
    top = Path(*base.parts[:2])
    if not top.exists():
        where = f"{top} does not exist on {os.uname().nodename}"
        raise UserError(f"--stage: {where}: set stage-to in mgpu.yaml to a folder of the nodes")
    folder = base / f"mgpu-stage-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--stage: {folder} cannot be made ({error.strerror}): set stage-to in mgpu.yaml") from None
    # in a folder for all users, anybody can take the name
    if folder.is_symlink() or not is_own(folder):
        raise UserError(f"--stage: {folder} belongs to {name_of_owner(folder)}: set stage-to in mgpu.yaml")
    return folder


def _is_on_disk_of(folder: Path, original: Path) -> bool:
    try:
        return original.stat().st_dev == folder.stat().st_dev
    except OSError as error:
        raise UserError(f"--stage {original}: {error.strerror} on {os.uname().nodename}") from None


def _opened_lock(place: Path) -> int:
    lock = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    # a program that replaces this process holds the copy, too
    os.set_inheritable(lock, True)
    return lock


def _try_lock(lock: int) -> bool:
    """Lock a copy against all other processes, unless one of them holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _delete_remains(folder: Path) -> None:
    """Delete copies that nobody holds, of jobs that were killed."""
    for path in folder.glob("*.lock"):
        lock = _opened_lock(path.with_suffix(""))
        if _try_lock(lock):
            _delete(path.with_suffix(""))
        os.close(lock)


def _delete(place: Path) -> None:
    # first the mark: this process may be killed before it has deleted the rest
    (place / "complete").unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _synchronize(original: Path, copy: Path) -> None:
    """Make a copy equal to the original: by names, sizes and times of modification, as rsync does.

    Raises:
        UserError: it does not fit on the disk.
        OSError: a file cannot be read or written.
    """
    wanted = {path: path.stat() for path in _files_of(original)}
    targets = {copy / path.relative_to(original): path for path in wanted}
    for path in [*_files_of(copy)] if copy.exists() else []:
        if path not in targets:
            path.unlink()
    missing = {target: path for target, path in targets.items() if not _is_copy(target, wanted[path])}
    size = sum(wanted[path].st_size for path in missing.values())
    if original.is_dir():
        copy.mkdir(exist_ok=True)
    if not missing:
        return
    node, free = os.uname().nodename, shutil.disk_usage(copy.parent).free
    if size > free:
        raise UserError(
            f"--stage {original}: {human_size(size)} do not fit on {copy.parent.parent} of {node}, which has"
            f" {human_size(free)} left: set stage-to in mgpu.yaml to a larger disk of the nodes"
        )
    began = time.monotonic()
    for target in missing:
        _make_room(target)
    for folder in {target.parent for target in missing}:
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(COPIERS) as pool:
        # the first error is raised; the rest is copied, and found by the next try
        list(pool.map(shutil.copy2, missing.values(), missing))
    took = f"{time.monotonic() - began:.1f} s"
    amount = f"{human_size(size)} in {counted(len(missing), 'file')}"
    log_lines.say(f"staged {original}: {amount} to {copy} on {node} in {took}")


def _make_room(target: Path) -> None:
    """Delete an older version, which may be read-only, or a folder of that name."""
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _files_of(path: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Yield a file, or all files below a folder; links are followed.

    Args:
        above: identifies the folders that it is in: a link to one of them would lead in a circle.
    """
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        yield path
    elif (own := (status.st_dev, status.st_ino)) not in above:
        for child in path.iterdir():
            yield from _files_of(child, above | {own})


def _is_copy(path: Path, of: os.stat_result) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (of.st_size, of.st_mtime_ns)
