"""Start and end the process that sends the reports of a run to trackers, such as MLflow."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.processes import RUN_VARIABLE, SINK_VARIABLE
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder


class TrackerProcess:
    """The process, if the run has trackers. Its end is nobody's failure: it is started again at the end of the job.

    It is no child of this process, which signals and ends everything below it together with the ranks.
    """

    def __init__(self, folder: RunFolder, spec: Spec) -> None:
        self._folder = folder
        self._spec = spec
        self._connection = self._start() if spec.sinks else None

    def _start(self) -> socket.socket | None:
        """Start the process, and return a connection that it has as standard input; None if that is impossible."""
        command = interpreter.command(sys.executable, "mgpu_slurm.job", "tracker", str(self._folder.path))
        log = os.fspath(self._folder.logs / "sinks.log")
        with suppress(OSError):
            ours, its = socket.socketpair()
            try:
                _start_apart(command, _environment(self._folder, self._spec), its.fileno(), log)
                return ours
            except OSError:
                ours.close()
            finally:
                its.close()
        return None

    def end(self, patience: float) -> None:
        """Tell the process that the job is over: it sends the rest and ends, at the latest after half a minute.

        Args:
            patience: seconds to wait for its end.
        """
        if self._connection is not None and _has_ended(self._connection):
            self._connection.close()
            self._connection = self._start()
        if self._connection is None:
            return
        with self._connection, suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            if patience:
                self._connection.settimeout(patience)
                self._connection.recv(1)


def _environment(folder: RunFolder, spec: Spec) -> dict[str, str]:
    own = {**os.environ, **spec.environment, SINK_VARIABLE: str(folder.path)}
    # by that variable all processes of an attempt are found and killed
    own.pop(RUN_VARIABLE, None)
    return own


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _start_apart(command: list[str], environment: Mapping[str, str], stdin: int, log: str) -> None:
    """Start a program in a session of its own, with all signals blocked, that is no child of this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    output = _opened(log)
                    for source, target in ((stdin, 0), (output, 1), (output, 2)):
                        os.dup2(source, target)
                    os.execve(command[0], command, environment)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _opened(log: str) -> int:
    try:
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
