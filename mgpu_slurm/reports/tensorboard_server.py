"""TensorBoard on some runs: a folder of links to what they write, and the server on it.

The links are named as in `status`. They lie in the user's state home, so that TensorBoard sees exactly those runs, and
links to what a run has not written yet lead there once it has. `--logdir_spec` would name runs as well, but
TensorBoard's fast data server does not take it. The trials of sweeps are linked as they begin.
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

from mgpu_slurm.core import interpreter, layout, processes
from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup
from mgpu_slurm.reports.run_sources import EVENT_FILES, Source, sources, trials_of
from mgpu_slurm.sweeps import hparams

NEWEST = 20
"""Runs and groups that are shown where none is named."""

SAMPLES = 1_000_000
"""Points of a curve that are kept; by itself TensorBoard shows a sample of 1,000. Of 0, which stands for all of them in
the Python reader, the fast data server makes none."""

HOST = "127.0.0.1"
"""TensorBoard asks nobody for a password; who is elsewhere comes by a tunnel."""

FIRST_PORT = 6006
"""TensorBoard's own."""
PORTS = 200
STARTS = 3
"""Attempts to start on a port that was free a moment ago."""

RELOAD_SECONDS = 5
PATIENCE = 120
"""Seconds in which a server has to start: its imports may come over a busy network."""
GRACE = 5
"""Seconds that it gets to end."""


@dataclass(frozen=True)
class Choice:
    """The runs to be shown."""

    sources: list[Source]
    """Each sweep is one of them as a whole."""
    left_out: int
    """Older runs and groups that nobody has named."""

    @property
    def runs(self) -> list[Source]:
        """One by one, the trials of sweeps as far as they have begun."""
        return trials_of(self.sources)

    @property
    def studies(self) -> list[RunFolder]:
        return [source.own for source in self.sources if source.own is not None and source.is_study]


def choose(words: Sequence[str], note: Note = quiet) -> Choice:
    """The runs that words name, or the newest ones.

    Args:
        note: hears that a cluster does not answer.

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
    """A folder with a link to each run, for as long as it is needed."""
    base = layout.state_home() / "tensorboard"
    with contextlib.suppress(OSError):
        _remove_left_over(base)
    folder = base / f"{socket.gethostname()}-{os.getpid()}-{processes.started_at(os.getpid())}"
    runs = folder / "runs"
    try:
        runs.mkdir(parents=True)
        _link(runs, [source for source in chosen.sources if not source.is_study])
        links = Links(runs, chosen.studies)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{str(base)!r} cannot be written ({error.strerror}): set XDG_STATE_HOME to a folder of yours"
        ) from None
    try:
        yield links
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _link(folder: Path, found: Sequence[Source]) -> None:
    """Ours by their names; then others, but for those below one that is linked, and so is seen with it."""
    seen = {source.path.resolve() for source in found if source.own is None}
    for source in sorted(found, key=lambda source: source.own is None):
        if source.own is not None or not seen.intersection(source.path.resolve().parents):
            link = _free_link(folder, source.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.curves.absolute())


def _free_link(folder: Path, name: str) -> Path:
    """Where a link of that name can be; never behind another link, which leads into somebody's run."""
    if any((folder / parent).is_symlink() for parent in Path(name).parents):
        name = name.replace(os.sep, "-")
    number = 1
    link = folder / name
    while os.path.lexists(link):
        number += 1
        link = folder / f"{name}-{number}"
    return link


class Links:
    """A folder of runs for TensorBoard, in which sweeps grow."""

    def __init__(self, folder: Path, studies: Sequence[RunFolder]) -> None:
        """
        Args:
            folder: with the links of all other runs.
        """
        self.folder = folder
        self._studies: dict[RunFolder, Path] = {}
        for study in studies:
            self._studies[study] = _free_link(folder, study.run)
            (self._studies[study] / layout.TRIALS).mkdir(parents=True)
        self._experiment: Path | None = None
        self._experiments = 0
        self._written: list[tuple[int, int]] = []
        """By which the experiments in `_experiment` are told from later ones."""
        self.refresh()

    def refresh(self) -> None:
        """Links trials that have begun since the last time, and takes up parameters that they have brought."""
        for study, place in self._studies.items():
            linked = set(os.listdir(place / layout.TRIALS))
            begun = os.listdir(study.trials) if study.trials.is_dir() else []
            for number in begun:
                if number.isdigit() and number not in linked:
                    (place / layout.TRIALS / number).symlink_to(study.of_trial(int(number)).tensorboard)
        self._write_experiment()

    def _write_experiment(self) -> None:
        """TensorBoard takes one experiment, whichever it meets first, and never reads it again: this is one of all
        sweeps, and whenever it changes, another run."""
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
    """Of servers of this machine that were killed."""
    for folder in base.glob(f"{socket.gethostname()}-*-*"):
        pid, _, start = folder.name.removeprefix(f"{socket.gethostname()}-").partition("-")
        if pid.isdigit() and start.isdigit() and not processes.is_alive(int(pid), int(start)):
            shutil.rmtree(folder, ignore_errors=True)


def described(chosen: Choice) -> str:
    """What is to be seen, in words."""
    runs = chosen.runs
    silent = sum(not any(source.curves.glob(EVENT_FILES)) for source in runs)
    words = [runs[0].name if len(chosen.sources) == len(runs) == 1 else counted(len(runs), "run")]
    if chosen.studies:
        words.append(f"trials of {', '.join(study.run for study in chosen.studies)} appear as they begin")
    if chosen.left_out:
        words.append(f"the newest {NEWEST} of {NEWEST + chosen.left_out} runs and groups, name others to see them")
    if silent:
        words.append(f"{silent} without curves yet")
    return "; ".join(words)


def lines(server: Server) -> list[str]:
    """How to get there."""
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
        """Starts it.

        Args:
            folder: with a run in each folder below.
            port: None for a free one.

        Raises:
            UserError: the port is taken.
            MgpuError: it does not start; with what it says.
        """
        if port is not None and not _is_free(port):
            raise UserError(f"--port {port}: it is taken on this machine: leave --port out for a free one")
        for attempt in range(STARTS):
            self.port = _free_port(attempt) if port is None else port
            # beside the links, not among them
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
        raise MgpuError(f"port {self.port} was taken by somebody else at the same time: try again")

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/"

    @property
    def tunnel(self) -> str:
        """The command that brings it to the machine that one sits at."""
        user = pwd.getpwuid(os.getuid()).pw_name
        return f"ssh -N -L {self.port}:{HOST}:{self.port} {user}@{socket.gethostname()}"

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Until it ends by itself, which is an error, or somebody ends this process.

        Args:
            meanwhile: called now and then, as often as the server looks for news.

        Raises:
            MgpuError: it has ended.
        """
        while self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(RELOAD_SECONDS)
            # a file system that fails for a moment costs news, not the server
            with contextlib.suppress(OSError):
                meanwhile()
        raise MgpuError(f"TensorBoard has ended with exit code {self._process.returncode}: {self._last_words()}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.unlink(missing_ok=True)

    def _wait_until_it_answers(self) -> bool:
        """Whether somebody else took its port meanwhile."""
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
        return (self._said().strip().splitlines() or ["it said nothing"])[-1]


def _start(folder: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    options = [
        f"--logdir={folder}",
        f"--host={HOST}",
        f"--port={port}",
        f"--samples_per_plugin=scalars={SAMPLES}",
        f"--reload_interval={RELOAD_SECONDS}",
        # without the fast data server: a run that was started again goes on in another file
        "--reload_multifile=true",
    ]
    parent = os.getpid()
    with log.open("wb") as output:
        return subprocess.Popen(
            interpreter.command(sys.executable, "tensorboard.main", *options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # a user's cmd.py is not the module that TensorBoard wants (of Python 3.11 on)
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            # a Ctrl-C is for this process, which ends it then
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM, parent),
        )


def _free_port(skip: int) -> int:
    """From TensorBoard's own port on, so that it mostly stays the same and a tunnel stays right.

    Args:
        skip: free ones to leave to others.
    """
    free = (port for port in range(FIRST_PORT, FIRST_PORT + PORTS) if _is_free(port))
    for _ in range(skip):
        next(free, None)
    found = next(free, None)
    if found is None:
        raise MgpuError(f"ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are all taken: name one by --port")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        # what ended a moment ago does not hold it
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
        except OSError:
            return False
    return True


def serve(chosen: Choice, port: int | None, say: Callable[[Server], None]) -> None:
    """Shows runs until somebody ends this process by Ctrl-C, a signal or the end of its terminal."""
    # nohup(1) has it go on after the end of its terminal
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
