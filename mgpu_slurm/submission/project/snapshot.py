"""The code snapshot: a copy of the project at submission, so that later edits do not affect a queued run."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import set_mode
from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.submission.project.project_files import cannot_copy, files_of

MAX_FILES = 50_000
"""With more files it is probably a data folder, and every submission would be slow."""

_CHUNK = 1 << 20
_LARGEST_SHOWN = 3


@dataclass(frozen=True)
class Snapshot:
    """The copied folder, and its state in git."""

    root: Path
    """The folder that was copied."""
    commit: str | None
    """None outside git and before the first commit."""
    dirty: bool
    """Whether the files differ from the commit, including new files. False outside git."""
    files: int
    bytes: int
    digest: str
    """sha256 over relative names, kinds (file, executable, link) and content: equal for equal code, anywhere."""


@dataclass(frozen=True)
class _Entry:
    """A file or link of the project at the time of its listing."""

    name: str
    """Relative to the root, with undecodable bytes as surrogates."""
    mode: int
    size: int
    modified_ns: int


def take(
    root: Path, destination: Path, limit: int, skip: Path, workdir: str = ".", databases: Iterable[Path] = ()
) -> Snapshot:
    """Copy the project to `destination`, a folder that does not exist yet.

    Args:
        root: the project, from `find_root`.
        destination: becomes the copy; its parent has to exist.
        limit: maximum size of all files together, in bytes.
        skip: a folder that is never part of the code: the runs folder.
        workdir: the job's working directory, relative to the root; created if it contains no file of the code.
        databases: files that programs write while jobs run; they are part of the code only if git tracks them.

    Raises:
        UserError: over the limit, over `MAX_FILES`, or a file cannot be read; nothing is left behind.
    """
    found = files_of(root, skip, databases)
    advice = (
        "add what is not code to .gitignore"
        if found.in_git
        else "move data out of the folder, or keep the code in a git repository with a .gitignore"
    )
    entries = _entries(root, found.names, advice)
    _check_size(root, entries, limit, advice)
    destination.mkdir()
    try:
        files, size, digest = _copy(root, destination, entries)
        (destination / workdir).mkdir(parents=True, exist_ok=True)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    return Snapshot(root, found.commit, found.dirty, files, size, digest)


# --- how much it is --------------------------------------------------------------------------------------------------


def _entries(root: Path, names: Iterable[str], advice: str) -> list[_Entry]:
    """Return the files and links among the names, sorted, without vanished ones and others (pipes, sockets)."""
    entries = []
    for name in names:
        try:
            facts = os.lstat(root / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise cannot_copy(os.path.join(root, name), error) from None
        if not (stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode)):
            continue
        size = facts.st_size if stat.S_ISREG(facts.st_mode) else 0
        entries.append(_Entry(name, facts.st_mode, size, facts.st_mtime_ns))
        if len(entries) > MAX_FILES:
            raise _too_many(root, entries, advice)
    entries = _without_names_behind_links(entries)
    return sorted(entries, key=lambda entry: os.fsencode(entry.name))


def _without_names_behind_links(entries: list[_Entry]) -> list[_Entry]:
    """Drop tracked files below a folder that was replaced by a link since: the link itself is copied."""
    links = {entry.name for entry in entries if stat.S_ISLNK(entry.mode)}
    return [entry for entry in entries if links.isdisjoint(_parents(entry.name))]


def _parents(name: str) -> Iterator[str]:
    while name := os.path.dirname(name):
        yield name


def _too_many(root: Path, entries: list[_Entry], advice: str) -> UserError:
    (most, _), *_ = Counter(entry.name.split("/")[0] for entry in entries).most_common(1)
    return UserError(f"the code in {str(root)!r} has more than {MAX_FILES:,} files, most of them in {most!r}: {advice}")


def _check_size(root: Path, entries: list[_Entry], limit: int, advice: str) -> None:
    total = sum(entry.size for entry in entries)
    if total <= limit:
        return
    largest = sorted(entries, key=lambda entry: -entry.size)[:_LARGEST_SHOWN]
    shown = ", ".join(f"{entry.name!r} {human_size(entry.size)}" for entry in largest)
    raise UserError(
        f"the code in {str(root)!r} is {human_size(total)}; the limit is {human_size(limit)}"
        f" (largest: {shown}): {advice}, or raise snapshot-limit: in mgpu.yaml"
    )


# --- the copy --------------------------------------------------------------------------------------------------------


def _copy(root: Path, destination: Path, entries: list[_Entry]) -> tuple[int, int, str]:
    """Copy files and links; return their number, the bytes and the digest of the copy."""
    present = {entry.name for entry in entries} | {parent for entry in entries for parent in _parents(entry.name)}
    digest = hashlib.sha256()
    files = size = 0
    set_mode(destination, 0o750)
    made = {""}
    for entry in entries:
        _make_folders(destination, os.path.dirname(entry.name), made)
        try:
            if stat.S_ISLNK(entry.mode):
                kind, copied = b"link", 0
                content = _copy_link(root, destination, entry.name, present)
            else:
                kind = b"executable" if entry.mode & 0o100 else b"file"
                copied, content = _copy_file(root / entry.name, destination / entry.name, entry)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except OSError as error:
            raise cannot_copy(os.path.join(root, entry.name), error) from None
        files += 1
        size += copied
        digest.update(b"\0".join((kind, os.fsencode(entry.name), content)))
    return files, size, digest.hexdigest()


def _make_folders(destination: Path, name: str, made: set[str]) -> None:
    if name in made:
        return
    _make_folders(destination, os.path.dirname(name), made)
    folder = destination / name
    folder.mkdir()
    # regardless of the umask: the run folder above decides who may read it
    set_mode(folder, 0o750)
    made.add(name)


def _copy_file(source: Path, target: Path, entry: _Entry) -> tuple[int, bytes]:
    """Copy a file; return the bytes and sha256 of the copy."""
    digest = hashlib.sha256()
    size = 0
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            _write_all(writer.fileno(), chunk)
        os.fchmod(writer.fileno(), 0o750 if entry.mode & 0o100 else 0o640)
        os.utime(writer.fileno(), ns=(entry.modified_ns, entry.modified_ns))
    return size, digest.digest()


def _write_all(descriptor: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def _copy_link(root: Path, destination: Path, name: str, present: set[str]) -> bytes:
    """Copy a link; return the sha256 of its text in the project: the digest must not depend on the project's path."""
    text = os.readlink(root / name)
    os.symlink(_link_text(root, name, text, present), destination / name)
    return hashlib.sha256(os.fsencode(text)).digest()


def _link_text(root: Path, name: str, text: str, present: set[str]) -> str:
    """Return the link unchanged if its target is in the snapshot, else as an absolute path to its current target."""
    if os.path.isabs(text):
        return text
    plain = os.path.join(root, os.path.dirname(name), text)
    target = os.path.realpath(plain)
    inside = os.path.relpath(target, os.path.realpath(root))
    leads_out = inside.split(os.sep)[0] == ".."
    left_out = inside != "." and inside not in present and os.path.lexists(target)
    if not leads_out and not left_out:
        return text
    normal = os.path.normpath(plain)
    # `..` after a link to a folder means that folder's parent, which text alone does not show
    return normal if os.path.realpath(normal) == target else plain
