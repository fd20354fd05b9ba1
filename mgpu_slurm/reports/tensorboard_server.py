"""Show runs in TensorBoard: a folder of links to their event files, and the server on it.

The links are named as in `status`. They are in the user's state home, so that TensorBoard sees exactly those runs; a
link to files that are not written yet works once they are. `--logdir_spec` would name runs as well, but TensorBoard's
fast data server does not support it. The trials of sweeps are linked as they begin.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mgpu_slurm.core import interpreter, processes
from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import index, lookup
from mgpu_slurm.reports.aggregation.run_sources import EVENT_FILES, Source, sources, trials_of
from mgpu_slurm.run_folder import layout
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import hparams

NEWEST = 20
"""Number of runs and groups that are shown by default."""

SAMPLES = 1_000_000
"""Maximum points per curve; TensorBoard's default is a sample of 1,000. A value of 0 means all points in the Python
reader, but none in the fast data server."""

HOST = "127.0.0.1"
"""Only this machine, because TensorBoard has no password; users on other machines need a tunnel."""

FIRST_PORT = 6006
"""TensorBoard's default port."""
PORTS = 200
STARTS = 3
"""Maximum attempts to start on a port that was free a moment ago."""

RELOAD_SECONDS = 5
PATIENCE = 120
"""Seconds for a server to start: its imports may come over a busy network."""
GRACE = 5
"""Seconds for a server to end."""


@dataclass(frozen=True)
class Choice:
    """The runs to show."""

    sources: list[Source]
    """The runs; each sweep is one source."""
    left_out: int
    """Number of older runs and groups that are not shown."""

    @property
    def runs(self) -> list[Source]:
        """The single runs, including the trials of sweeps that have begun."""
        return trials_of(self.sources)

    @property
    def studies(self) -> list[RunFolder]:
        return [source.own for source in self.sources if source.own is not None and source.is_study]


def choose(words: Sequence[str], note: Note = quiet) -> Choice:
    """Return the named runs, or the newest ones.

    Args:
        note: called if a cluster does not answer.

    Raises:
        UserError: a word names nothing, or there are no runs.
    """
    if words:
        return Choice(sources(words, made_here=True), 0)
    groups = lookup.all_groups(note)
    if not groups:
        raise UserError("there are no runs yet: submit one, or name a folder with event files")
    newest = sources([str(folder.path) for folder in groups[:NEWEST]])
    return Choice(newest, len(groups[NEWEST:]))


@contextlib.contextmanager
def linked(chosen: Choice) -> Iterator[Links]:
    """Create a folder with a link to each run, and remove it afterwards."""
    base = index.state_home() / "tensorboard"
    with contextlib.suppress(OSError):
        _remove_left_over(base)
    folder = base / f"{socket.gethostname()}-{os.getpid()}-{processes.started_at(os.getpid())}"
    runs = folder / "runs"
    try:
        runs.mkdir(parents=True)
        single = [source for source in chosen.sources if not source.is_study]
        _link(runs, single)
        links = Links(runs, chosen.studies, single)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{str(base)!r} cannot be written ({error.strerror}): set XDG_STATE_HOME to a folder of your own"
        ) from None
    try:
        yield links
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name_of_seed(trial: str, run: RunFolder) -> str:
    return f"{trial}-seed-{run.path.name}"


def _link(folder: Path, found: Sequence[Source]) -> None:
    """Link own runs by their names, then foreign ones, except those below a linked folder, which shows them already."""
    seen = {source.path.resolve() for source in found if source.own is None}
    for source in sorted(found, key=lambda source: source.own is None):
        if source.own is not None or not seen.intersection(source.path.resolve().parents):
            link = _free_link(folder, source.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.curves.absolute())


def _free_link(folder: Path, name: str) -> Path:
    """Return a free path for a link of that name; never below another link, which would be inside a run."""
    if any((folder / parent).is_symlink() for parent in Path(name).parents):
        name = name.replace(os.sep, "-")
    number = 1
    link = folder / name
    while os.path.lexists(link):
        number += 1
        link = folder / f"{name}-{number}"
    return link


class Links:
    """A folder of runs for TensorBoard, to which new trials of sweeps are added."""

    def __init__(self, folder: Path, studies: Sequence[RunFolder], single: Sequence[Source]) -> None:
        """
        Args:
            folder: contains the links of all other runs.
            single: these runs; trials among them may have several seeds.
        """
        self.folder = folder
        self._single = single
        self._seeds: set[str] = set()
        """The names of the runs of their seeds that are linked."""
        self._studies: dict[RunFolder, Path] = {}
        for study in studies:
            self._studies[study] = _free_link(folder, study.run)
            (self._studies[study] / layout.TRIALS).mkdir(parents=True)
        self._experiment: Path | None = None
        self._experiments = 0
        self._written: list[tuple[int, int]] = []
        """The state of the experiments in `_experiment`, to detect changes."""
        self.refresh()

    def refresh(self) -> None:
        """Link trials that have begun since the last call, and add their new parameters."""
        for study, place in self._studies.items():
            linked = set(os.listdir(place / layout.TRIALS))
            begun = os.listdir(study.trials) if study.trials.is_dir() else []
            for number in filter(str.isdigit, begun):
                trial, *seeds = study.of_trial(int(number)).with_seeds()
                runs = {number: trial} | {_name_of_seed(number, run): run for run in seeds}
                for name in runs.keys() - linked:
                    (place / layout.TRIALS / name).symlink_to(runs[name].tensorboard)
        for source in self._single:
            for run in source.own.with_seeds()[1:] if source.own is not None else ():
                if (name := _name_of_seed(source.name, run)) not in self._seeds:
                    self._seeds.add(name)
                    _free_link(self.folder, name).symlink_to(run.tensorboard)
        self._write_experiment()

    def _write_experiment(self) -> None:
        """Write one experiment for all sweeps, as a new run whenever it changes.

        TensorBoard uses only the first experiment that it finds, and never reads it again.
        """
        files = [hparams.experiment_file(study) for study in self._studies]
        found = [file.stat() for file in files if file.exists()]
        written = [(stat.st_mtime_ns, stat.st_ino) for stat in found]
        if written == self._written:
            return
        self._experiments += 1
        number = f"-{self._experiments}" if self._experiments > 1 else ""
        old, self._experiment = self._experiment, _free_link(self.folder, f"hparams{number}")
        hparams.write_merged(self._studies, self._experiment)
        self._written = written
        if old is not None:
            shutil.rmtree(old)


def _remove_left_over(base: Path) -> None:
    """Remove the folders of killed servers of this machine."""
    for folder in base.glob(f"{socket.gethostname()}-*-*"):
        pid, _, start = folder.name.removeprefix(f"{socket.gethostname()}-").partition("-")
        if pid.isdigit() and start.isdigit() and not processes.is_alive(int(pid), int(start)):
            shutil.rmtree(folder, ignore_errors=True)


def described(chosen: Choice) -> str:
    """Return a description of the shown runs."""
    runs = chosen.runs
    silent = sum(not source.parts and not any(source.curves.glob(EVENT_FILES)) for source in runs)
    words = [runs[0].name if len(chosen.sources) == len(runs) == 1 else counted(len(runs), "run")]
    if chosen.studies:
        words.append(f"trials of {', '.join(study.run for study in chosen.studies)} appear as they start")
    if chosen.left_out:
        words.append(f"the newest {NEWEST} of {NEWEST + chosen.left_out} runs and groups, name others to see them")
    if silent:
        words.append(f"{silent} without curves yet")
    return "; ".join(words)


def lines(server: Server) -> list[str]:
    """Return lines on how to open it in a browser."""
    return [
        f"address   {server.address}",
        f"tunnel    {server.tunnel}",
        "          (run this on your own computer, then open the address in its browser)",
        "-- Ctrl-C ends it",
    ]


# -- the server


class Server:
    """A TensorBoard that listens on this machine only, and ends with this process."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        """Start the server.

        Args:
            folder: contains a folder for each run.
            port: None for a free port.

        Raises:
            UserError: the port is taken.
            MgpuError: it does not start; with its output.
        """
        if port is not None and not _is_free(port):
            raise UserError(f"--port {port}: it is in use on this machine: leave --port out for a free one")
        for attempt in range(STARTS):
            self.port = _free_port(attempt) if port is None else port
            # next to the links, not among them
            self._log = folder.parent / "log"
            self._process = _start(folder, self.port, self._log)
            try:
                taken = self._wait_until_it_answers()
            except BaseException:
                self.stop()
                raise
            if not taken:
                return
            self.stop()
        raise MgpuError(f"port {self.port} was taken by another process at the same time: try again")

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/"

    @property
    def tunnel(self) -> str:
        """The command to run on the user's own machine to reach the server."""
        user = pwd.getpwuid(os.getuid()).pw_name
        return f"ssh -N -L {self.port}:{HOST}:{self.port} {user}@{socket.gethostname()}"

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the server ends by itself, which is an error, or this process is ended.

        Args:
            meanwhile: called repeatedly, as often as the server reloads its data.

        Raises:
            MgpuError: the server has ended.
        """
        while self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(RELOAD_SECONDS)
            # a temporary file system error must not end the server
            with contextlib.suppress(OSError):
                meanwhile()
        raise MgpuError(f"TensorBoard ended with exit code {self._process.returncode}: {self._last_words()}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.unlink(missing_ok=True)

    def _wait_until_it_answers(self) -> bool:
        """Wait until the server answers; return whether another process took its port instead."""
        give_up = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            if f":{self.port}/ " in self._said():
                return False
            if time.monotonic() > give_up:
                raise MgpuError(f"TensorBoard did not start within {PATIENCE} s: {self._last_words()}")
            time.sleep(0.05)
        if "already in use" in self._said():
            return True
        raise MgpuError(f"TensorBoard did not start: {self._last_words()}: try `{sys.executable} -m tensorboard.main`")

    def _said(self) -> str:
        return self._log.read_text(errors="replace")

    def _last_words(self) -> str:
        return (self._said().strip().splitlines() or ["no output"])[-1]


def _start(folder: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    options = [
        f"--logdir={folder}",
        f"--host={HOST}",
        f"--port={port}",
        f"--samples_per_plugin=scalars={SAMPLES}",
        f"--reload_interval={RELOAD_SECONDS}",
        # needed without the fast data server: a restarted run continues in another file
        "--reload_multifile=true",
    ]
    parent = os.getpid()
    with log.open("wb") as output:
        return subprocess.Popen(
            interpreter.command(sys.executable, "tensorboard.main", *options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # a user's cmd.py must not shadow the module that TensorBoard imports (from Python 3.11 on)
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            # Ctrl-C is for this process, which then ends the server
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM, parent),
        )


def _free_port(skip: int) -> int:
    """Return a free port from TensorBoard's default on, so that it rarely changes and a tunnel remains valid.

    Args:
        skip: number of free ports to skip.
    """
    free = (port for port in range(FIRST_PORT, FIRST_PORT + PORTS) if _is_free(port))
    for _ in range(skip):
        next(free, None)
    found = next(free, None)
    if found is None:
        raise MgpuError(f"ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are all in use: choose one with --port")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        # a server that ended a moment ago does not block the port
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
        except OSError:
            return False
    return True


def serve(chosen: Choice, port: int | None, say: Callable[[Server], None]) -> None:
    """Show runs until this process is ended by Ctrl-C, a signal or the end of its terminal."""
    # with nohup(1) it continues after the end of its terminal
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        with linked(chosen) as links:
            server = Server(links.folder, port)
            try:
                say(server)
                server.wait(links.refresh)
            finally:
                server.stop()
    except KeyboardInterrupt:
        return
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
