"""Gets the programs of real SLURMs, Charliecloud, PostgreSQL and Chromium without installing them: `make cluster-deps`.

With sbatch in /usr/bin, `--executor auto` would mean another thing on this machine, and Debian would start its
services. So the packages are only unpacked, into folders that `init.py` lays over /usr in a namespace of its own.

Each release of SLURM is that of a release of Debian, whatever this machine has, with the libraries for which it was
built. The other programs are this machine's own, and dependencies that it has are used from there. PostgreSQL and
Chromium need no namespace: they find their files from where their programs lie. The standard library alone is used, as
no environment is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ["mariadb-server", "iproute2", "postgresql", "libfaketime", "charliecloud-runtime"]
# Chromium's program, its files, and the only fonts of the tests, so that a text is as wide on every machine
NAMES += ["chromium-headless-shell", "chromium-common", "fonts-dejavu-core"]

DATABASE_PASSWORD = "known to all tests"
"""Of PostgreSQL's user postgres and MariaDB's root. Nobody reaches a server who cannot open its folder."""


@dataclass(frozen=True)
class Release:
    """A release of SLURM, and how it is set up."""

    suite: str
    """The release of Debian that has it."""
    no_cgroups: str
    """The lines of cgroup.conf where nothing uses cgroups: slurmd asks for a plugin all the same, and finding out by
    itself which one there is fails where /sys is not as expected."""
    answers_within: float
    """Seconds after which the controller has seen every answer of a node that has got through."""


RELEASES = {
    # this plugin does nothing at its start, while the one for version 2 wants systemd
    "22.05": Release("bookworm", "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n", 0.3),
    "24.11": Release("trixie", "CgroupPlugin=disabled\n", 1.3),
}
OLDEST = next(iter(RELEASES))

OF_SLURM = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge")
KEPT = ("lib", "slurm", "munge", "zlib")
"""Beginnings of the names of their dependencies that are unpacked: what else a machine needs, this one has."""

IMAGE = "image"
OF_IMAGE = ("python3-minimal", "python3", "bash", "coreutils", "dash", "libgomp1", "libstdc++6")
"""A system in which torch runs, but for torch."""

PYTHONS = {(3, 11): "bookworm", (3, 13): "trixie"}
"""The releases of Debian by their Python. That of the image has to be this one's, for which torch was built."""

SOURCES = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {suite} main\n"


def check_machine() -> None:
    """Raises SystemExit with one line where this machine cannot run a cluster."""
    if os.geteuid() != 0:
        raise SystemExit("a cluster needs root (namespaces and mounts): try sudo make cluster-deps")
    if shutil.which("apt-get") is None:
        raise SystemExit("a cluster needs Debian's packages, and there is no apt-get on this machine")


def prepare_slurm(folder: Path, name: str) -> None:
    """Makes folder/NAME, with the programs of this release, whatever an interrupted attempt left there."""
    check_machine()
    own = folder / name
    shutil.rmtree(own, ignore_errors=True)
    archives = download_whole(own / "apt", RELEASES[name].suite, OF_SLURM)
    for archive in archives.glob("*.deb"):
        if not archive.name.startswith(KEPT):
            archive.unlink()
    (libc,) = archives.glob("libc6_*.deb")
    (own / "libc").write_text(libc.name.split("_")[1].partition("-")[0])
    unpack(archives, own)
    shutil.rmtree(own / "apt")


def prepare_image(folder: Path) -> None:
    """Makes folder/image/root, a system for a container; empty where Debian has no release with this Python."""
    check_machine()
    own = folder / IMAGE
    shutil.rmtree(own, ignore_errors=True)
    root = own / "root"
    root.mkdir(parents=True)
    if (suite := PYTHONS.get(sys.version_info[:2])) is None:
        return
    unpack(download_whole(own / "apt", suite, OF_IMAGE), root)
    shutil.rmtree(own / "apt")
    # what a container's runtime mounts its own files on
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    # as Debian's installation writes it
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


def download_whole(apt: Path, suite: str, names: Sequence[str]) -> Path:
    """Gets the packages and all that they need, as for a machine that has nothing; the folder with them."""
    archives = apt / "archives"
    for path in (apt / "lists/partial", archives / "partial"):
        path.mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(SOURCES.format(suite=suite))
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    (apt / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    environ = {"APT_CONFIG": str(apt / "apt.conf")}
    for words in (["update"], ["install", "--download-only", "--no-install-recommends", "--yes", *names]):
        done = quiet(["apt-get", "-qq", *words], environ)
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()[-1]
            raise SystemExit(f"apt-get cannot get {' '.join(names)} of Debian's {suite}: {said}")
    return archives


def layers(folder: Path, name: str) -> list[str]:
    """The folders that lie over each other as /usr where this release runs, the first in front."""
    layers = [folder / name / "usr", folder / "packages/usr"]
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    # with a newer C library run programs that were built for an older one, but not the other way round
    is_newest = numbers((folder / name / "libc").read_text()) >= numbers(libc)
    order = [*layers, Path("/usr")] if is_newest else [Path("/usr"), *layers]
    return [str(layer) for layer in order]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def prepare(folder: Path) -> None:
    """Makes folder/packages, folder/database and folder/postgresql, whatever an interrupted attempt left there.

    Raises SystemExit with one line where this machine cannot do it.
    """
    check_machine()
    for name in ("packages", "database", "postgresql", "archives"):
        shutil.rmtree(folder / name, ignore_errors=True)
    archives = folder / "archives"
    (archives / "partial").mkdir(parents=True)
    download(archives)
    unpack(archives, folder / "packages")
    make_database(folder / "packages", folder / "database")
    make_postgresql(folder / "packages", folder / "postgresql")
    shutil.rmtree(archives)


def download(archives: Path) -> None:
    # also those that the machine has: Chromium's program and its files have to lie in one folder
    options = ["--no-install-recommends", "--reinstall"]
    options += ["-o", f"Dir::Cache::archives={archives}", "-o", "APT::Sandbox::User=root"]
    install = ["apt-get", "install", "--download-only", "--yes", "-qq", *options, *NAMES]
    # the lists of packages may be missing, as in most images, or name versions that are gone
    if not quiet(install).returncode or (
        not quiet(["apt-get", "update", "-qq"]).returncode and not quiet(install).returncode
    ):
        return
    raise SystemExit(f"apt-get cannot get {' '.join(NAMES)}: {quiet(install).stderr.strip().splitlines()[-1]}")


def quiet(
    command: list[str], more: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"} | dict(more or {})
    return subprocess.run(command, capture_output=True, text=True, env=environ, stdin=subprocess.DEVNULL, cwd=cwd)


def unpack(archives: Path, root: Path) -> None:
    # Some packages still name /bin or /lib, which are links into /usr on the machine itself.
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for archive in sorted(archives.glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as reading:
            subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", root], stdin=reading.stdout, check=True)
        if reading.returncode != 0:
            raise SystemExit(f"{archive.name} cannot be unpacked")
    # what Debian's scripts would have done by `update-alternatives`
    for program in (root / "usr/sbin").glob("*-wlm"):
        # not as a link: slurmd starts itself again, by the name behind it
        program.rename(program.with_name(program.name.removesuffix("-wlm")))


def make_database(packages: Path, database: Path) -> None:
    """An initialised database without anything in it, which every start of a cluster copies."""
    script = """
        mount -t overlay -o lowerdir="$1/usr:/usr" overlay /usr && mount -t tmpfs tmpfs /run &&
        mariadb-install-db --no-defaults --user=root --datadir="$2" --skip-test-db --skip-name-resolve \\
            --auth-root-authentication-method=normal --innodb-log-file-size=16M
    """
    done = quiet(["unshare", "--mount", "--net", "sh", "-c", script, "sh", str(packages), str(database)])
    if done.returncode != 0:
        raise SystemExit(f"no database can be made: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def make_postgresql(packages: Path, data: Path) -> None:
    """A PostgreSQL without anything in it, which every start of one copies."""
    secret = data.with_name("postgresql.password")
    secret.touch(0o600)
    secret.write_text(DATABASE_PASSWORD)
    words = ["initdb", f"--pgdata={data}", f"--pwfile={secret}", "--username=postgres", "--auth=scram-sha-256"]
    done = quiet([*postgresql(packages, *words, "--encoding=UTF8", "--locale=C", "--no-sync")])
    secret.unlink()
    if done.returncode != 0:
        raise SystemExit(f"no PostgreSQL can be made: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def postgresql(packages: Path, program: str, *options: str) -> list[str]:
    """The command that runs one of PostgreSQL's programs, unpacked or the machine's own.

    As root, which PostgreSQL refuses to be, it is an ordinary user in a namespace of its own; on the machine, where
    files are concerned, it stays who it is.
    """
    usr = packages / "usr"
    found = [path for root in (usr, Path("/usr")) for path in root.glob(f"lib/postgresql/*/bin/{program}")]
    if not found:
        raise SystemExit(f"Debian's packages hold no {program}")
    libraries = ":".join(str(path) for path in usr.glob("lib/*-linux-gnu*"))
    # it ends with the process that started it, however that ends
    words = ["env", f"LD_LIBRARY_PATH={libraries}", "setpriv", "--pdeathsig", "QUIT", str(found[0]), *options]
    return words if os.geteuid() else ["unshare", "--map-user=1000", "--map-group=1000", *words]


def main(folder: Path, name: str | None = None) -> None:
    if name is None:
        prepare(folder)
    elif name == IMAGE:
        prepare_image(folder)
    elif name in RELEASES:
        prepare_slurm(folder, name)
    else:
        raise SystemExit(f"SLURM {name}: there are {' and '.join(RELEASES)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
