"""Write, read and lock files, and check who owns them.

Whole files are written to a temporary name, synced and renamed. `.jsonl` files are append-only: readers ignore a torn
last line, left by a writer that died, and the next writer cuts it off.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.retry import noting_after

_BLOCK = 1 << 16
"""Bytes read at once from the end of a file."""


def write_whole(
    path: Path, content: str | bytes, sync: bool = True, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Write a file atomically.

    `sync=False` does not wait for the disk: for files that are rewritten every second and rebuilt when lost.

    Args:
        is_wanted: called when only the last step is left; if it returns False, the file stays as it is.
    """
    # does not contain the file's name: TensorBoard reads every file with "tfevents" in its name
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        # mkstemp creates it with 0600; the folder's group may read its files too
        os.chmod(temporary, 0o640)
        if not is_wanted():
            os.unlink(temporary)
            return
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, sync: bool = True, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Write the value as JSON, with `sync` and `is_wanted` as for `write_whole`."""
    write_whole(path, json.dumps(value, indent=1) + "\n", sync, is_wanted)


def read_json(path: Path) -> Any:
    """Return the value in a file, or None if there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def without_nan(value: Any) -> Any:
    """Return the value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, list) else value


def append_jsonl(path: Path, *records: dict[str, Any]) -> None:
    """Append a line for each record, after cutting off a torn line that a dead writer left."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with open(path, "ab+") as file:
        cut_torn_tail(file.fileno())
        file.write(lines.encode())


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in the complete lines of a file; nothing if the file does not exist."""
    try:
        lines = complete_lines(path)
    except FileNotFoundError:
        return
    for line in lines:
        # two machines that append at once may tear a line; the other lines are still valid
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def complete_lines(path: Path, start: int = 0) -> list[bytes]:
    """Return the lines of a file to which others append, without their line breaks; an incomplete last one is left out.

    All is read in one call: between two, a writer could cut off a torn last line and append another one, and a line
    made of both would be returned.

    Args:
        start: offset of the first line.
    """
    # opened each time: a network file system shows writes of others only to those who open the file afterwards
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        found = file.read(max(0, os.fstat(file.fileno()).st_size - start))
    return found.split(b"\n")[:-1]


def cut_torn_tail(descriptor: int) -> None:
    """Cut off everything after the last line break: its writer died, and nobody has read it."""
    end = os.fstat(descriptor).st_size
    if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
        return
    line_break = -1
    while end and line_break < 0:
        start = max(0, end - _BLOCK)
        line_break = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + line_break + 1
    os.ftruncate(descriptor, end)


def end_of(path: Path) -> str:
    """Return the end of a log that may be long; an empty string if the file does not exist."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _BLOCK))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def set_mode(folder: Path, mode: int) -> None:
    """Set a folder's permissions, whatever the umask; keep its setgid bit."""
    folder.chmod(mode | (folder.stat().st_mode & stat.S_ISGID))


def set_umask_for(readable_by: str) -> None:
    """Let the group read the files that this process writes from here on, if the run is readable by the group.

    For `owner` nothing changes: nobody else can enter the run folder.
    """
    if readable_by == "group":
        os.umask(os.umask(0o077) & ~0o050)


def name_of_owner(path: Path) -> str:
    """Return the user name of the owner of a file or folder; in containers an owner may not have one."""
    number = path.stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def is_own(path: Path) -> bool:
    """Return whether the file or folder belongs to this user."""
    return path.stat().st_uid == os.geteuid()


def refuse_foreign_owner(path: Path, why: str) -> None:
    """Refuse a file or folder that another user could have created.

    Args:
        why: what a stranger could do with it, and what to do instead.

    Raises:
        UserError: the file or folder belongs neither to this user nor to root.
    """
    if path.stat().st_uid not in (os.geteuid(), 0):
        raise UserError(f"{str(path)!r} belongs to {name_of_owner(path)}, {why}")


# -- locks of workers on all nodes, which are released when their holders end


SLOW_LOCK_SECONDS = 30.0
"""Seconds after which a process that waits for the lock prints so: a hanging file system looks the same."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is created if it does not exist.

    The lock is by fcntl: the system queues waiters, and releases the lock of a process or node that is gone. Use a
    separate file for it: closing any descriptor of a file releases all locks of the process on that file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with noting_after(SLOW_LOCK_SECONDS, lambda: _note_wait(path)):
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def hold_if_free(path: Path) -> int | None:
    """Lock a file, which is created if it does not exist, until its descriptor is closed; return that.

    None is returned if another process has the lock, which is as in `locked`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _note_wait(path: Path) -> None:
    log_lines.say(
        f"waiting for the lock {str(path)!r} for {SLOW_LOCK_SECONDS:g} s:"
        " another worker has it, or the file system hangs",
        file=sys.stderr,
    )
