from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.submission.project import snapshot
from mgpu_slurm.submission.project.outputs import GENERATOR
from mgpu_slurm.submission.project.project_files import find_root
from mgpu_slurm.submission.project.snapshot import Snapshot, take
from mgpu_slurm.trackers.destinations import database_files

LIMIT = 1_000_000


@pytest.fixture(autouse=True)
def own_git_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    git(home, "config", "--global", "user.name", "A")
    git(home, "config", "--global", "user.email", "a@example.org")
    git(home, "config", "--global", "protocol.file.allow", "always")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path / "project"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(root: Path, files: dict[str, str]) -> None:
    """Texts by relative name."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def repository(root: Path, files: dict[str, str] | None = None) -> Path:
    write(root, files or {})
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def names(folder: Path) -> set[str]:
    """Files and links below a folder, relative, as text with surrogates."""
    found = set()
    for path, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        found |= {os.path.relpath(os.path.join(path, name), folder) for name in files + links}
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., tuple[Snapshot, Path]]:
    """Takes a snapshot of a root into a new folder."""

    def do(root: Path, limit: int = LIMIT, skip: Path | None = None) -> tuple[Snapshot, Path]:
        destination = tmp_path / f"copy-{len(list(tmp_path.glob('copy-*')))}"
        return take(root, destination, limit, skip or root / "runs"), destination

    return do


Copy = Callable[..., tuple[Snapshot, Path]]


# --- the root --------------------------------------------------------------------------------------------------------


def test_root_is_the_top_of_the_repository(project: Path) -> None:
    repository(project, {"a/b/train.py": ""})
    (project / "empty").mkdir()
    assert find_root(project / "a" / "b") == project
    assert find_root(project / "empty") == project
    assert find_root(project) == project


def test_root_outside_git_is_the_folder_itself(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, {"train.py": ""})
    assert find_root(project) == project
    monkeypatch.chdir(project)
    assert find_root(Path()) == project


def test_folder_ignored_by_the_repository_above_is_its_own_root(project: Path) -> None:
    dotfiles = repository(project, {"profile": ""})
    write(dotfiles, {".gitignore": "*\n"})
    write(dotfiles / "work", {"train.py": ""})
    assert find_root(dotfiles / "work") == dotfiles / "work"
    git(dotfiles, "add", "-f", "work/train.py")
    assert find_root(dotfiles / "work") == dotfiles


def test_git_variables_set_by_a_hook_are_ignored(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: Copy
) -> None:
    other = repository(tmp_path / "other", {"other.py": ""})
    repository(project, {"train.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert find_root(project) == project
    assert names(copy(project)[1]) == {"train.py"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_repository_of_another_user_is_rejected_with_the_fix(project: Path, copy: Copy) -> None:
    repository(project, {"train.py": ""})
    for path in (project, project / ".git"):
        os.chown(path, 65534, 65534)
    for call in (lambda: find_root(project), lambda: copy(project)):
        with pytest.raises(UserError, match=f"git config --global --add safe.directory {project}") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_broken_repository_is_an_error_not_a_plain_folder(project: Path) -> None:
    repository(project, {"train.py": ""})
    (project / ".git" / "config").write_text("[core\n")
    with pytest.raises(UserError, match="bad config"):
        find_root(project)


# --- what is copied --------------------------------------------------------------------------------------------------


def test_tracked_changed_and_new_files_are_copied_unless_ignored(project: Path, copy: Copy) -> None:
    repository(
        project, {"same": "1", "changed": "1", "deleted": "1", "src/deep/mod.py": "1", ".gitignore": "*.bin\nout/\n"}
    )
    write(project, {"changed": "2", "new": "1", "src/new": "1", "data.bin": "1", "out/log": "1"})
    (project / "deleted").unlink()
    taken, there = copy(project)
    assert names(there) == {"same", "changed", "new", ".gitignore", "src/deep/mod.py", "src/new"}
    assert (there / "changed").read_text() == "2"
    assert (taken.root, taken.commit, taken.dirty) == (project, git(project, "rev-parse", "HEAD"), True)
    assert (taken.files, taken.bytes) == (6, 5 + len("*.bin\nout/\n"))


def test_tracked_file_is_copied_even_if_ignored(project: Path, copy: Copy) -> None:
    repository(project, {"keep.bin": "1"})
    write(project, {".gitignore": "*.bin\n", "drop.bin": "1"})
    assert names(copy(project)[1]) == {"keep.bin", ".gitignore"}


def test_clean_repository_is_not_dirty(project: Path, copy: Copy) -> None:
    repository(project, {"train.py": "", ".gitignore": "*.log\n"})
    write(project, {"a.log": "1"})
    assert copy(project)[0].dirty is False


@pytest.mark.parametrize("change", ["edited", "staged", "new", "deleted"])
def test_any_difference_from_the_commit_is_dirty(project: Path, copy: Copy, change: str) -> None:
    repository(project, {"train.py": "1", "other": "1"})
    git(project, "config", "status.showUntrackedFiles", "no")
    if change == "deleted":
        (project / "other").unlink()
    else:
        write(project, {"new" if change == "new" else "other": "2"})
    if change == "staged":
        git(project, "add", "-A")
    assert copy(project)[0].dirty is True


def test_repository_without_commits_is_copied(project: Path, copy: Copy) -> None:
    project.mkdir()
    git(project, "init", "-q")
    write(project, {"staged": "1", "new": "1"})
    git(project, "add", "staged")
    taken, there = copy(project)
    assert (taken.commit, taken.dirty, names(there)) == (None, True, {"staged", "new"})


def test_git_index_is_not_changed(project: Path, copy: Copy) -> None:
    repository(project, {"train.py": "1"})
    index = project / ".git" / "index"
    before = index.read_bytes()
    os.utime(project / "train.py", (1, 1))
    copy(project)
    assert index.read_bytes() == before


def test_submodules_and_nested_repositories_are_copied(project: Path, tmp_path: Path, copy: Copy) -> None:
    library = repository(tmp_path / "library", {"lib.py": "", ".gitignore": "*.bin\n"})
    repository(project, {"train.py": ""})
    git(project, "submodule", "add", "-q", str(library), "libs/sub")
    git(project, "commit", "-q", "-m", "submodule")
    assert copy(project)[0].dirty is False
    git(project, "clone", "-q", str(library), "cloned")
    git(project, "init", "-q", "fresh")
    for name in ("libs/sub", "cloned", "fresh"):
        write(project / name, {"new.py": "", "left.bin": ""})
    (project / "fresh" / "left.bin").unlink()
    taken, there = copy(project)
    inner = {f"{name}/{file}" for name in ("libs/sub", "cloned") for file in ("lib.py", "new.py", ".gitignore")}
    assert names(there) - {"libs/sub/.git"} == {"train.py", ".gitmodules", "fresh/new.py"} | inner
    assert taken.dirty is True


def test_caches_hidden_folders_and_environments_are_skipped_outside_git(project: Path, copy: Copy) -> None:
    write(project, {"train.py": "1", ".hidden": "1", "src/mod.py": "1", "runs/old/log": "1"})
    write(project, {"src/__pycache__/mod.pyc": "1", "node_modules/x": "1", ".cache/x": "1"})
    write(project, {"env/pyvenv.cfg": "", "env/bin/tool": "1"})
    taken, there = copy(project)
    assert names(there) == {"train.py", ".hidden", "src/mod.py"}
    assert (taken.commit, taken.dirty, taken.files, taken.bytes) == (None, False, 3, 3)


def test_without_git_on_the_path_a_repository_is_a_plain_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, copy: Copy
) -> None:
    repository(project, {"src/train.py": "", ".gitignore": "*.bin\n"})
    write(project, {"data.bin": "1"})
    monkeypatch.setenv("PATH", str(project))
    assert find_root(project / "src") == project / "src"
    taken, there = copy(project)
    assert names(there) == {"src/train.py", ".gitignore", "data.bin"}
    assert taken.commit is None


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.parametrize("runs", ["runs", "out/my [runs]*", "out/link"])
def test_runs_folder_is_never_copied_and_never_counts_as_dirty(
    project: Path, tmp_path: Path, copy: Copy, in_git: bool, runs: str
) -> None:
    write(project, {"train.py": "1", "out/kept": "1", "nested/runs/kept": "1"})
    if in_git:
        repository(project)
    if runs == "out/link":
        (tmp_path / "scratch").mkdir()
        (project / runs).symlink_to(tmp_path / "scratch")
    write(project / runs, {"one/log": "1"})
    taken, there = copy(project, skip=project / runs)
    assert names(there) == {"train.py", "out/kept", "nested/runs/kept"}
    assert taken.dirty is False


def test_old_runs_in_the_project_are_not_copied(project: Path, tmp_path: Path, copy: Copy) -> None:
    write(project, {"train.py": "1", "lib/runs/kept": "1", "runs/one/spec.yaml": "", "runs/one/code/train.py": "1"})
    assert names(copy(project, skip=tmp_path / "elsewhere")[1]) == {"train.py", "lib/runs/kept"}


@pytest.mark.parametrize("in_git", [True, False])
def test_what_commands_have_written_is_not_copied_and_does_not_count_as_dirty(
    project: Path, tmp_path: Path, copy: Copy, in_git: bool
) -> None:
    own = {"train.py": "1", "page.html": "<html>", "data/aggregate.json": "{}", "mark.svg": "<svg/>", "curves.csv": "1"}
    write(project, own)
    if in_git:
        repository(project)
    page = f"<!doctype html><meta {GENERATOR}>"
    event_file = "events.out.tfevents.1795910290.node.1.0"
    folder = dict.fromkeys(("aggregate.json", "curves.csv", f"tensorboard/a/{event_file}"), "1")
    write(project, {"report.html": page, "pages/new.html": page, "figures/curve-1.svg": f"<svg><!-- {GENERATOR} -->"})
    write(project, {event_file: "1", **{f"aggregate-a/{name}": text for name, text in folder.items()}})
    write(project, {"mlflow.db": "1", "mlflow.db-wal": "1"})
    databases = database_files([f"mlflow=sqlite:///{project}/mlflow.db#digits", "wandb=digits"])
    there = tmp_path / "there"
    taken = take(project, there, LIMIT, project / "runs", ".", databases)
    assert names(there) == {*own}
    assert taken.dirty is False
    assert names(copy(project)[1]) == {*own, "mlflow.db", "mlflow.db-wal"}
    # code in the folder of the curves is code
    write(project, {"aggregate-a/plot.py": "1"})
    assert names(copy(project)[1]) == {*own, "mlflow.db", "mlflow.db-wal", "aggregate-a/plot.py"}


def test_what_git_tracks_is_copied_whoever_has_written_it(project: Path, tmp_path: Path, copy: Copy) -> None:
    tracked = {"report.html": f"<meta {GENERATOR}>", "a/aggregate.json": "{}", "a/curves.csv": "1", "mlflow.db": "1"}
    inner = repository(tmp_path / "inner", tracked)
    repository(project, tracked)
    git(project, "submodule", "add", "-q", str(inner), "module")
    git(project, "commit", "-q", "-m", "module")
    git(project, "clone", "-q", str(inner), "cloned")
    there = tmp_path / "there"
    take(project, there, LIMIT, project / "runs", ".", [project / "mlflow.db"])
    prefixes = ("", "module/", "cloned/")
    assert names(there) - {".gitmodules"} == {f"{prefix}{name}" for prefix in prefixes for name in tracked}


def test_report_in_a_submodule_is_no_change(project: Path, tmp_path: Path, copy: Copy) -> None:
    inner = repository(tmp_path / "inner", {"lib.py": "1"})
    repository(project, {"train.py": "1"})
    git(project, "submodule", "add", "-q", str(inner), "module")
    git(project, "commit", "-q", "-m", "module")
    write(project, {"module/report.html": f"<meta {GENERATOR}>"})
    taken, there = copy(project)
    assert (names(there), taken.dirty) == ({"train.py", ".gitmodules", "module/lib.py"}, False)
    write(project, {"module/new.py": "1"})
    assert copy(project)[0].dirty is True
    (project / "module" / "new.py").unlink()
    write(project, {"module/lib.py": "2"})
    assert copy(project)[0].dirty is True


def test_pipe_with_the_name_of_a_page_is_not_waited_for(project: Path, copy: Copy) -> None:
    write(project, {"train.py": "1"})
    os.mkfifo(project / "page.html")
    assert names(copy(project)[1]) == {"train.py"}


def test_tracked_files_in_the_runs_folder_are_not_copied(project: Path, copy: Copy) -> None:
    repository(project, {"train.py": "1", "runs/old/log": "1"})
    assert names(copy(project)[1]) == {"train.py"}


def test_runs_folder_above_the_project_skips_nothing(project: Path, copy: Copy) -> None:
    write(project, {"train.py": "1"})
    assert names(copy(project, skip=project.parent)[1]) == {"train.py"}


@pytest.mark.parametrize("in_git", [True, False])
def test_any_file_name_works(project: Path, copy: Copy, in_git: bool) -> None:
    project.mkdir()
    raw = [b"with space", b"new\nline", b"not-utf8-\xff\xfe", "ünïcode".encode(), b"-dash", b"quote\"'", b"tab\t"]
    for name in raw:
        (project / os.fsdecode(name)).write_bytes(name)
    if in_git:
        repository(project)
        (project / os.fsdecode(b"untracked\n\xff")).touch()
        raw.append(b"untracked\n\xff")
    _, there = copy(project)
    assert {os.fsencode(name) for name in names(there)} == set(raw)
    assert (there / os.fsdecode(raw[2])).read_bytes() == raw[2]


# --- how it is copied ------------------------------------------------------------------------------------------------


def test_execute_bits_and_times_are_kept(project: Path, copy: Copy) -> None:
    repository(project, {"run.sh": "#!/bin/sh\n", "data": "", "src/deep": ""})
    (project / "run.sh").chmod(0o755)
    os.utime(project / "data", (1_000_000_000, 1_000_000_000))
    old = os.umask(0o077)
    try:
        _, there = copy(project)
    finally:
        os.umask(old)
    assert os.access(there / "run.sh", os.X_OK)
    assert (there / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (there / "data").stat().st_mode & 0o777 == 0o640
    assert (there / "src").stat().st_mode & 0o777 == 0o750
    assert (there / "data").stat().st_mtime == 1_000_000_000


@pytest.mark.parametrize("in_git", [True, False])
def test_links_within_the_snapshot_are_kept_and_others_made_absolute(
    project: Path, tmp_path: Path, copy: Copy, in_git: bool
) -> None:
    write(project, {"src/mod.py": "1", ".gitignore": "/data/\n", "data/images": "1"})
    write(tmp_path, {"shared/set": "1"})
    (project / "file").symlink_to("src/mod.py")
    (project / "folder").symlink_to("src")
    (project / "src" / "up").symlink_to("../src/mod.py")
    (project / "dangling").symlink_to("nothing")
    (project / "shared").symlink_to("../shared")
    (project / "absolute").symlink_to(tmp_path / "shared")
    (project / "chain").symlink_to("shared/set")
    (project / "ignored").symlink_to("data/images")
    if in_git:
        repository(project)
    _, there = copy(project)
    text = {name: os.readlink(there / name) for name in names(there) if (there / name).is_symlink()}
    assert text == {
        "file": "src/mod.py",
        "folder": "src",
        "src/up": "../src/mod.py",
        "dangling": "nothing",
        "shared": str(tmp_path / "shared"),
        "absolute": str(tmp_path / "shared"),
        "chain": str(project / "shared/set"),
        "ignored": str(project / "data/images") if in_git else "data/images",
    }
    assert (there / "chain").read_text() == "1"


def test_link_with_dots_after_a_linked_folder_points_to_the_same_file(
    project: Path, tmp_path: Path, copy: Copy
) -> None:
    write(tmp_path, {"far/deep/x": "", "far/set": "1"})
    write(project, {"x": ""})
    (project / "deep").symlink_to("../far/deep")
    (project / "set").symlink_to("deep/../set")
    _, there = copy(project)
    assert (there / "set").read_text() == "1"


def test_link_that_replaced_a_tracked_folder_is_copied_as_a_link(project: Path, tmp_path: Path, copy: Copy) -> None:
    repository(project, {"train.py": "1", "conf/a": "1", "conf/b": "1"})
    shutil.move(project / "conf", tmp_path / "conf")
    (project / "conf").symlink_to(tmp_path / "conf")
    taken, there = copy(project)
    assert os.readlink(there / "conf") == str(tmp_path / "conf")
    assert taken.files == 2


@pytest.mark.parametrize("in_git", [True, False])
def test_pipes_and_sockets_are_left_out(
    project: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch, in_git: bool
) -> None:
    write(project, {"train.py": "1", "replaced": "1"})
    if in_git:
        repository(project)
    (project / "replaced").unlink()
    os.mkfifo(project / "replaced")
    monkeypatch.chdir(project)  # the path of a socket is limited to 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert names(copy(project)[1]) == {"train.py"}


def test_file_that_vanishes_while_copying_is_skipped(project: Path, tmp_path: Path) -> None:
    write(project, {"a": "1", "b": "22", "c/d": "333"})
    entries = snapshot._entries(project, ["a", "b", "c/d"], "")
    (project / "b").unlink()
    shutil.rmtree(project / "c")
    there = tmp_path / "there"
    there.mkdir()
    files, size, _ = snapshot._copy(project, there, entries)
    assert (files, size, names(there)) == (1, 1, {"a"})


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.parametrize("name", ["secret", "folder"])
def test_unreadable_path_is_named_and_no_copy_is_left(
    project: Path, tmp_path: Path, copy: Copy, name: str, in_git: bool, ordinary_user: None
) -> None:
    write(project, {"a": "1", "secret": "1", "folder/b": "1"})
    if in_git:
        repository(project)
    (project / name).chmod(0)
    with pytest.raises(UserError, match=rf"{name}.*Permission denied"):
        copy(project)
    (project / name).chmod(0o700)
    assert list(tmp_path.glob("copy-*")) == []


# --- the digest ------------------------------------------------------------------------------------------------------


def test_equal_code_has_an_equal_digest_in_any_folder(project: Path, tmp_path: Path, copy: Copy) -> None:
    write(project, {"a": "1", "src/b": "2", "data/big": "3"})
    (project / "link").symlink_to("../outside")
    first, _ = copy(project)
    shutil.copytree(project, tmp_path / "elsewhere" / "copy", symlinks=True)
    (tmp_path / "elsewhere" / "copy" / "a").touch()
    assert copy(tmp_path / "elsewhere" / "copy")[0].digest == first.digest


@pytest.mark.parametrize("change", ["content", "name", "mode", "link", "moved byte"])
def test_digest_changes_with_every_difference(project: Path, copy: Copy, change: str) -> None:
    write(project, {"a": "1", "ab": "23"})
    (project / "link").symlink_to("a")
    first, _ = copy(project)
    if change == "content":
        write(project, {"a": "2"})
    elif change == "name":
        (project / "a").rename(project / "c")
    elif change == "mode":
        (project / "a").chmod(0o755)
    elif change == "link":
        (project / "link").unlink()
        (project / "link").symlink_to("ab")
    else:
        write(project, {"a": "12", "ab": "3"})
    assert copy(project)[0].digest != first.digest


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_git", "fix"), [(True, r"to \.gitignore"), (False, "in a git repository")])
def test_too_large_snapshot_names_the_largest_files_and_is_not_left(
    project: Path, tmp_path: Path, copy: Copy, in_git: bool, fix: str
) -> None:
    write(project, {"tiny": "1", "a": "x" * 400_000, "data/b": "x" * 300_000, "c": "x" * 500_000, "d": "x" * 200})
    if in_git:
        repository(project)
    with pytest.raises(UserError, match=fix) as caught:
        copy(project)
    text = str(caught.value)
    assert "is 1.2 MB; the limit is 1.0 MB" in text
    assert "'c' 500 KB, 'a' 400 KB, 'data/b' 300 KB)" in text
    assert "snapshot-limit: in mgpu.yaml" in text
    assert "\n" not in text
    assert list(tmp_path.glob("copy-*")) == []


def test_snapshot_exactly_at_the_limit_is_accepted(project: Path, copy: Copy) -> None:
    write(project, {"a": "x" * 600, "b": "x" * 400})
    assert copy(project, limit=1000)[0].bytes == 1000
    with pytest.raises(UserError, match="the limit is 999 B"):
        copy(project, limit=999)


def test_too_many_files_are_rejected_with_their_folder(
    project: Path, tmp_path: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_FILES", 20)
    write(project, {"train.py": "", **{f"images/{number}": "" for number in range(19)}})
    assert copy(project)[0].files == 20
    write(project, {"images/more": ""})
    with pytest.raises(UserError, match=r"more than 20 files, most of them in 'images'"):
        copy(project)
    assert len(list(tmp_path.glob("copy-*"))) == 1
