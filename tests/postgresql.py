"""A real PostgreSQL for tests and benchmarks: a server of its own, in a folder of its own, reached by a Unix socket.

Nothing of the machine's own PostgreSQL is used but its programs, where it has some. No port is taken, so that any
number may run side by side.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg

from tests.on_slurm.cluster import PREPARED
from tests.on_slurm.packages import DATABASE_PASSWORD, postgresql

MISSING = "a real PostgreSQL needs make cluster-deps"


def is_there() -> bool:
    with contextlib.suppress(PermissionError):
        return (PREPARED / "ready").exists() and (PREPARED / "postgresql/PG_VERSION").exists()
    return False


class Server:
    """One server; its databases outlive it until the folder goes. Settings are as Debian ships them, fsync is on."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: is made, and closed to others; its path has to be short, as any Unix socket's.
        """
        self.folder = folder
        folder.mkdir(mode=0o700)
        shutil.copytree(PREPARED / "postgresql", self.folder / "data")
        (self.folder / "data").chmod(0o700)
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0

    def start(self, *settings: str) -> None:
        """Returns when it answers.

        Args:
            settings: lines of postgresql.conf that differ.
        """
        options = ["-D", str(self.folder / "data"), "-k", str(self.folder)]
        for setting in ("listen_addresses=", *settings):
            options += ["-c", setting]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                postgresql(PREPARED / "packages", "postgres", *options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the one who uses it
            )
        give_up = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.stop()
                raise RuntimeError(f"PostgreSQL does not start: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host=str(self.folder), user="postgres", password=DATABASE_PASSWORD, dbname=database, autocommit=True
        )

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Ends it, and with it all connections; SIGQUIT as a crash does, with nothing said to anybody."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(30)

    def query(self, text: str, database: str = "postgres") -> list[tuple[object, ...]]:
        with contextlib.closing(self._connect(database)) as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def new_database(self) -> str:
        """The name of one without anything in it."""
        self._databases += 1
        name = f"database{self._databases}"
        self.query(f"CREATE DATABASE {name}")
        return name

    def url(self, database: str, password: str = quote(DATABASE_PASSWORD)) -> str:
        return f"postgresql://postgres:{password}@/{database}?host={self.folder}"


@contextmanager
def server(folder: Path, *settings: str) -> Iterator[Server]:
    made = Server(folder)
    made.start(*settings)
    try:
        yield made
    finally:
        # nobody needs the data, which a clean end would write to a busy disk
        made.stop(signal.SIGQUIT)
