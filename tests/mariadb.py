"""A real MariaDB for tests: a server of its own, in a folder of its own, reached by a Unix socket alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import pymysql

from tests.on_slurm.cluster import PREPARED
from tests.on_slurm.packages import DATABASE_PASSWORD

MISSING = "a real MariaDB needs make cluster-deps, as root"


def is_there() -> bool:
    return os.geteuid() == 0 and (PREPARED / "ready").exists()


class Server:
    """A server that runs, with the user root."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "socket"
        self._databases = 0

    def query(self, text: str) -> tuple[tuple[object, ...], ...]:
        with closing(pymysql.connect(unix_socket=str(self.socket), user="root", password=DATABASE_PASSWORD)) as own:
            cursor = own.cursor()
            cursor.execute(text)
            return cursor.fetchall()

    def answers(self) -> bool:
        # asked first: a driver that finds no socket leaves its own end open
        if not self.socket.exists():
            return False
        try:
            self.query("SELECT 1")
        except pymysql.OperationalError:
            return False
        return True

    def new_database(self) -> str:
        """Return the name of an empty database."""
        self._databases += 1
        name = f"database{self._databases}"
        self.query(f"CREATE DATABASE {name}")
        return name

    def url(self, database: str, password: str = quote(DATABASE_PASSWORD)) -> str:
        return f"mariadb://root:{password}@/{database}?unix_socket={self.socket}"


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Start a server and wait until it answers; stop it at the end.

    Args:
        folder: does not exist yet; its path has to be short, as that of any Unix socket.
    """
    folder.mkdir(mode=0o700)
    usr = PREPARED / "packages/usr"
    shutil.copytree(PREPARED / "database", folder / "data")
    (folder / "start.sql").write_text(f"ALTER USER root@localhost IDENTIFIED BY '{DATABASE_PASSWORD}';\n")
    options = {
        "user": "root",
        "basedir": usr,
        "datadir": folder / "data",
        "socket": folder / "socket",
        "pid-file": folder / "pid",
        "tmpdir": folder,
        # as Debian configures it, and MySQL by default
        "character-set-server": "utf8mb4",
        "init-file": folder / "start.sql",
        "innodb-buffer-pool-size": "64M",
        "innodb-log-file-size": "16M",
    }
    words = ["--no-defaults", "--skip-networking", *(f"--{name}={value}" for name, value in options.items())]
    libraries = ":".join(str(path) for path in usr.glob("lib/*-linux-gnu*"))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            # it ends with the process that started it, however that ends
            ["setpriv", "--pdeathsig", "TERM", str(usr / "sbin/mariadbd"), *words],
            env=os.environ | {"LD_LIBRARY_PATH": libraries},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the process that uses it
        )
    made = Server(folder)
    give_up = time.monotonic() + 60
    try:
        while not made.answers():
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"MariaDB does not start: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.02)
        yield made
    finally:
        process.terminate()
        process.wait(30)
