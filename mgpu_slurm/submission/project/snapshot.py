"""The code snapshot: a copy of the project at submission, so that later edits do not affect a queued run.

Inside a git repository it contains the tracked files, as they are on disk now, and new files that git does not ignore,
including those of nested repositories and submodules. Outside git it contains the folder without caches, hidden folders
and virtual environments. Files that commands have written on request are left out, unless git tracks them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import set_mode
from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.run_folder.layout import RUNS, RunFolder
from mgpu_slurm.submission.project.outputs import without_outputs

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
class _Listing:
    """The files of a repository and those nested in it, by their names in it."""

    tracked: list[str]
    """Deleted ones are included."""
    new: list[str]


@dataclass(frozen=True)
class _Entry:
    """A file or link of the project at the time of its listing."""

    name: str
    """Relative to the root, with undecodable bytes as surrogates."""
    mode: int
    size: int
    modified_ns: int


def find_root(anchor: Path) -> Path:
    """Return the folder to snapshot for a submission from `anchor`: its git top level, else the folder itself.

    The folder itself is also used if its repository ignores it (a project below a home folder kept in git), and for the
    code of a run that submits another run.

    Raises:
        UserError: git refuses the repository, for example because another user owns it.
    """
    anchor = anchor.absolute()
    for folder in (anchor, *anchor.parents):
        if RunFolder(folder.parent).code == folder and RunFolder(folder.parent).spec.exists():
            return folder
    output = _git(anchor, "rev-parse", "--show-toplevel")
    if output is None:
        return anchor
    top = Path(os.fsdecode(output.removesuffix(b"\n")))
    if top.samefile(anchor):
        return top
    is_foreign = _git(anchor, "check-ignore", ".") and not _git(anchor, "ls-files", "-z", "--", ".")
    return anchor if is_foreign else top


def take(root: Path, destination: Path, limit: int, skip: Collection[Path], workdir: str = ".") -> Snapshot:
    """Copy the project to `destination`, a folder that does not exist yet.

    Args:
        root: the project, from `find_root`.
        destination: becomes the copy; its parent has to exist.
        limit: maximum size of all files together, in bytes.
        skip: files and folders that are never part of the code, such as the runs folder.
        workdir: the job's working directory, relative to the root; created if it contains no file of the code.

    Raises:
        UserError: over the limit, over `MAX_FILES`, or a file cannot be read; nothing is left behind.
    """
    skipped = frozenset(filter(None, (_relative_name(each, root) for each in skip)))
    listing = _git_listing(root, skipped) if (root / ".git").exists() else None
    if listing is None:
        commit, dirty = None, False
        advice = "move data out of the folder, or keep the code in a git repository with a .gitignore"
        entries = _entries(root, without_outputs(root, _walk_names(root, skipped)), advice)
    else:
        commit, has_changes = _git_state(root, skipped)
        dirty = has_changes or bool(listing.new)
        advice = "add what is not code to .gitignore"
        entries = _entries(root, [*listing.tracked, *listing.new], advice)
    _check_size(root, entries, limit, advice)
    destination.mkdir()
    try:
        files, size, digest = _copy(root, destination, entries)
        (destination / workdir).mkdir(parents=True, exist_ok=True)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    return Snapshot(root, commit, dirty, files, size, digest)


def _relative_name(folder: Path, root: Path) -> str | None:
    """Return the name of `folder` relative to the root, or None if it is not below the root."""
    # only the parent is resolved: runs/ may itself be a link to a scratch file system
    folder = folder.absolute()
    name = os.path.relpath(os.path.join(os.path.realpath(folder.parent), folder.name), os.path.realpath(root))
    return None if name == "." or name.split(os.sep)[0] == ".." else name


# --- what belongs to the project -------------------------------------------------------------------------------------


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return git's output, or None without git or a work tree.

    Raises:
        UserError: git refuses for any other reason; copying the folder as if it had no git would hide that.
    """
    # GIT_DIR and similar variables, set inside hooks, would select another repository
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    except (FileNotFoundError, PermissionError):
        return None
    # check-ignore means "not ignored" by exit code 1 without a message
    if done.returncode == 0 or (done.returncode == 1 and not done.stderr):
        return done.stdout
    message = os.fsdecode(done.stderr)
    if "not a git repository" in message or "must be run in a work tree" in message:
        return None
    if "dubious ownership" in message:
        raise UserError(
            f"git refuses the repository of {str(folder)!r} because another user owns it:"
            f" run `git config --global --add safe.directory {_repository_in(message) or folder}`"
        )
    first_line = (message.splitlines() or [f"exit code {done.returncode}"])[0]
    raise UserError(f"git cannot read the repository of {str(folder)!r} ({first_line}): fix it, or submit elsewhere")


def _repository_in(message: str) -> str | None:
    found = re.search(r"dubious ownership in repository at '(.+)'", message)
    return found[1] if found else None


def _git_listing(root: Path, skipped: Set[str]) -> _Listing | None:
    """Return the files of a repository that are tracked or new; None without git."""
    excluded = [f"--exclude=/{_escape_pattern(name)}" for name in skipped]
    tracked = _git(root, "ls-files", "-z", "--cached")
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", *excluded)
    if tracked is None or new is None:
        return None
    return _Listing(
        tracked=[*_git_names(root, tracked, skipped)],
        new=[*without_outputs(root, _git_names(root, new, skipped))],
    )


def _git_names(root: Path, output: bytes, skipped: Set[str]) -> Iterator[str]:
    """Yield the names that git lists, and those in the repositories among them."""
    for name in {os.fsdecode(name).removesuffix("/") for name in output.split(b"\0") if name}:
        if any(_is_below(name, each) for each in skipped):
            continue
        # of a submodule, or a repository cloned into this one, git lists only the folder
        if os.path.lexists(root / name / ".git") and not os.path.islink(root / name):
            yield from _nested_names(root, name, skipped)
        else:
            yield name


def _nested_names(root: Path, name: str, skipped: Set[str]) -> Iterator[str]:
    inner_skipped = {each.removeprefix(f"{name}/") for each in skipped if each.startswith(f"{name}/")}
    found = _git_listing(root / name, inner_skipped)
    # a submodule with a broken .git still contains code
    for inner in _walk_names(root / name, inner_skipped) if found is None else [*found.tracked, *found.new]:
        yield f"{name}/{inner}"


def _git_state(root: Path, skipped: Set[str]) -> tuple[str | None, bool]:
    """Return the commit (None before the first) and whether tracked files differ from it."""
    excluded = ["--", ".", *(f":(exclude,literal){name}" for name in skipped)] if skipped else []
    flags = ["--porcelain=v2", "--branch", "-z", "--untracked-files=no", "--ignore-submodules=none"]
    output = _git(root, "status", *flags, "--no-renames", "--no-ahead-behind", *excluded) or b""
    commit, dirty = None, False
    for record in output.split(b"\0"):
        if record.startswith(b"# branch.oid ") and not record.endswith(b"(initial)"):
            commit = record.rpartition(b" ")[2].decode()
        elif record and not record.startswith(b"# "):
            dirty = True
    return commit, dirty


def _walk_names(root: Path, skipped: Set[str]) -> Iterator[str]:
    """Yield the files and links of a folder outside git."""
    pending = [""]
    while pending:
        folder = pending.pop()
        for name, is_folder in _children(root, folder):
            if name in skipped:
                continue
            if not is_folder:
                yield name
            elif not _is_left_out(root / name):
                pending.append(name)


def _children(root: Path, folder: str) -> list[tuple[str, bool]]:
    """Return the relative names in a folder and whether each is a folder; empty if the folder vanished."""
    try:
        with os.scandir(root / folder) as found:
            return [(os.path.join(folder, item.name), item.is_dir(follow_symlinks=False)) for item in found]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise _cannot_copy(os.path.join(root, folder), error) from None


def _is_left_out(folder: Path) -> bool:
    is_others = folder.name.startswith(".") or folder.name in ("__pycache__", "node_modules")
    return is_others or os.path.exists(folder / "pyvenv.cfg") or _holds_runs(folder)


def _holds_runs(folder: Path) -> bool:
    """Return whether it is a runs folder, even if runs are stored elsewhere now."""
    return folder.name == RUNS and next(folder.glob("*/spec.yaml"), None) is not None


def _escape_pattern(name: str) -> str:
    """Return a .gitignore pattern that matches only this name."""
    return re.sub(r"([*?\[\\])", r"\\\1", name)


def _is_below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + "/")


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
            raise _cannot_copy(os.path.join(root, name), error) from None
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
            raise _cannot_copy(os.path.join(root, entry.name), error) from None
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


def _cannot_copy(path: str, error: OSError) -> UserError:
    return UserError(f"cannot copy {path!r} into the code snapshot ({error.strerror}): fix that or move it away")
