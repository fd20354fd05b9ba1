"""Gets the programs of a real SLURM, PostgreSQL and Chromium without installing them: `make cluster-deps`.

With sbatch in /usr/bin, `--executor auto` would mean another thing on this machine, and Debian would start its
services. So the packages are only unpacked, into a folder that `init.py` lays over /usr in a namespace of its own.
Dependencies that the machine has are used from there. PostgreSQL and Chromium need no namespace: they find their files
from where their programs lie. The standard library alone is used, as no environment is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ["slurm-wlm", "slurm-client", "slurmdbd", "munge", "mariadb-server", "iproute2", "postgresql", "libfaketime"]
# Chromium's program, its files, and the only fonts of the tests, so that a text is as wide on every machine
NAMES += ["chromium-headless-shell", "chromium-common", "fonts-dejavu-core"]

DATABASE_PASSWORD = "known to all tests"
"""Of PostgreSQL's user postgres and MariaDB's root. Nobody reaches a server who cannot open its folder."""


def prepare(folder: Path) -> None:
    """Makes folder/packages, folder/database and folder/postgresql, whatever an interrupted attempt left there.

    Raises SystemExit with one line where this machine cannot do it.
    """
    if os.geteuid() != 0:
        raise SystemExit("a cluster needs root (namespaces and mounts): try sudo make cluster-deps")
    if shutil.which("apt-get") is None:
        raise SystemExit("a cluster needs Debian's packages, and there is no apt-get on this machine")
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


def quiet(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, env=environ, stdin=subprocess.DEVNULL)


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
        program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)


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


if __name__ == "__main__":
    prepare(Path(sys.argv[1]).resolve())
