"""Which files belong to a user's project, and its state in git.

Inside a git repository these are the tracked files, as they are on disk now, and new files that git does not ignore,
including those of nested repositories and submodules. Outside git it is the folder without caches, hidden folders and
virtual environments. What commands have written on request is left out, unless git tracks it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.run_folder.layout import RUNS, RunFolder
from mgpu_slurm.submission.project.outputs import without_outputs


@dataclass(frozen=True)
class ProjectFiles:
    """What a project consists of."""

    names: Iterable[str]
    """Relative to its root, with undecodable bytes as surrogates; tracked files that are deleted are included. They can
    be read once: of a folder with too many files, only the first are listed."""
    in_git: bool
    commit: str | None = None
    """None outside git and before the first commit."""
    dirty: bool = False
    """Whether the files differ from the commit, including new files. False outside git."""


@dataclass(frozen=True)
class _Listing:
    """The files of a repository and those nested in it."""

    names: list[str]
    """Relative to it; tracked files that are deleted are included."""
    has_new: bool
    """Whether one of them is not tracked."""


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


def files_of(root: Path, skip: Path, databases: Iterable[Path] = ()) -> ProjectFiles:
    """Return what belongs to a project.

    Args:
        root: the project, from `find_root`.
        skip: a folder that is never part of it: the runs folder.
        databases: files that programs write while jobs run; they belong to it only if git tracks them.

    Raises:
        UserError: git or a folder cannot be read.
    """
    skipped = _relative_name(skip, root)
    written = {name for file in databases if (name := _relative_name(file, root)) is not None}
    listing = _git_listing(root, skipped, written) if (root / ".git").exists() else None
    if listing is None:
        names = without_outputs(root, _walk_names(root, skipped))
        return ProjectFiles((name for name in names if name not in written), in_git=False)
    commit, has_changes = _git_state(root, skipped)
    return ProjectFiles(listing.names, in_git=True, commit=commit, dirty=has_changes or listing.has_new)


def _relative_name(folder: Path, root: Path) -> str | None:
    """Return the name of `folder` relative to the root, or None if it is not below the root."""
    # only the parent is resolved: runs/ may itself be a link to a scratch file system
    folder = folder.absolute()
    name = os.path.relpath(os.path.join(os.path.realpath(folder.parent), folder.name), os.path.realpath(root))
    return None if name == "." or name.split(os.sep)[0] == ".." else name


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


def _git_listing(root: Path, skipped: str | None, written: Set[str] = frozenset()) -> _Listing | None:
    """Return the files of a repository that are tracked, or new and not ignored; None without git.

    Args:
        written: names of new files that are left out.
    """
    excluded = [] if skipped is None else [f"--exclude=/{_escape_pattern(skipped)}"]
    tracked = _git(root, "ls-files", "-z", "--cached")
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", *excluded)
    if tracked is None or new is None:
        return None
    names: list[str] = []
    has_new = False
    for name in _names_in(tracked, skipped):
        if _is_repository(root / name):
            inner = _nested(root, name, skipped)
            names += inner.names
            has_new = has_new or inner.has_new
        else:
            names.append(name)
    own: list[str] = []
    for name in _names_in(new, skipped):
        if _is_repository(root / name):
            names += _nested(root, name, skipped).names
            has_new = True
        elif name not in written:
            own.append(name)
    own = [*without_outputs(root, own)]
    return _Listing(names + own, has_new or bool(own))


def _names_in(output: bytes, skipped: str | None) -> set[str]:
    names = {os.fsdecode(name).removesuffix("/") for name in output.split(b"\0") if name}
    return {name for name in names if skipped is None or not _is_below(name, skipped)}


def _is_repository(folder: Path) -> bool:
    """Return whether it is a submodule, or a repository cloned into another: of those, git lists only the folder."""
    return os.path.lexists(folder / ".git") and not os.path.islink(folder)


def _nested(root: Path, name: str, skipped: str | None) -> _Listing:
    inner_skipped = skipped.removeprefix(f"{name}/") if skipped and skipped.startswith(f"{name}/") else None
    found = _git_listing(root / name, inner_skipped)
    # a submodule with a broken .git still contains code
    names = found.names if found is not None else _walk_names(root / name, inner_skipped)
    return _Listing([f"{name}/{inner}" for inner in names], found is not None and found.has_new)


def _git_state(root: Path, skipped: str | None) -> tuple[str | None, bool]:
    """Return the commit (None before the first) and whether tracked files differ from it."""
    excluded = [] if skipped is None else ["--", ".", f":(exclude,literal){skipped}"]
    flags = ["--porcelain=v2", "--branch", "-z", "--untracked-files=no", "--ignore-submodules=untracked"]
    output = _git(root, "status", *flags, "--no-renames", "--no-ahead-behind", *excluded) or b""
    commit, dirty = None, False
    for record in output.split(b"\0"):
        if record.startswith(b"# branch.oid ") and not record.endswith(b"(initial)"):
            commit = record.rpartition(b" ")[2].decode()
        elif record and not record.startswith(b"# "):
            dirty = True
    return commit, dirty


def _walk_names(root: Path, skipped: str | None) -> Iterator[str]:
    """Yield the files and links of a folder outside git."""
    pending = [""]
    while pending:
        folder = pending.pop()
        for name, is_folder in _children(root, folder):
            if name == skipped:
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
        raise cannot_copy(os.path.join(root, folder), error) from None


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


def cannot_copy(path: str, error: OSError) -> UserError:
    """Return the error for a file or folder that cannot be read."""
    return UserError(f"cannot copy {path!r} into the code snapshot ({error.strerror}): fix that or move it away")
