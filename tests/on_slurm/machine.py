"""The machine inside of a cluster's namespaces, as the host uses it: its commands, daemons, files and processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

INSIDE = Path("/run/cluster")  # the state folder as it is named inside
NODES = ("n1", "n2", "n3", "n4")
"""The nodes of every cluster."""
SLURM_CONF = str(INSIDE / "etc/slurm.conf")
# what daemons get: jobs must not find anything of the process that started the cluster
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_CONF": SLURM_CONF}


class ClusterProblem(Exception):
    """The cluster did not do what it was told; the message holds what SLURM said."""


class Machine:
    """What runs below a first process of its own, of which `pid` is the number on the host."""

    def __init__(self, folder: Path, pid: int, token: str, nodes: Collection[str]) -> None:
        self._logs = folder / "log"
        self.pid = pid
        self._nodes = nodes
        # its file rather than its number alone, which another process may have by now
        self.mark = self.path(f"/run/{token}")

    def alive(self) -> bool:
        return self.mark.exists()

    def path(self, inside: str) -> Path:
        """A path inside as the host reaches it."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def enter(self, *options: str, node: str | None = None) -> list[str]:
        """The words that run a command inside, on the login node or another."""
        net = f"--net={self.path(f'/run/netns/{node}')}" if node else "--net"
        return ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--cgroup", net, *options]

    def run(self, *command: str, stdin: str = "") -> str:
        """Runs a command as root on the login node, with nothing of this process's environment; its output."""
        words = [*self.enter("--pid"), *command]
        done = subprocess.run(words, env=CLEAN, input=stdin, capture_output=True, text=True, timeout=60, cwd="/")
        if done.returncode != 0:
            raise ClusterProblem(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    # -- daemons

    def launch(self, *daemon: str, node: str | None = None) -> None:
        """Starts a daemon, which leaves this process by itself."""
        log = self._logs / f"{node or daemon[0]}.out"
        words = [*self.enter("--pid", node=node), *daemon]
        # to a file: it may keep what it is given as output, and a pipe would then have no end
        with log.open("ab") as out:
            code = subprocess.call(words, env=CLEAN, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/")
        if code != 0:
            raise ClusterProblem(f"{shlex.join(daemon)} does not start: {tail(log)}")

    def stop(self, daemon: str) -> None:
        try:
            number = int(self.path(f"/run/slurm/{daemon}.pid").read_text())
        except FileNotFoundError:
            return  # it does not run
        self.run("sh", "-c", f"kill {number}")
        until(f"{daemon} has stopped", lambda: not self.path(f"/proc/{number}").exists())

    def listens(self, port: int) -> bool:
        """Whether something on the login node listens at a port."""
        lines = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in map(str.split, lines))

    def until_listening(self, daemon: str, port: int) -> None:
        try:
            until(f"{daemon} listens", lambda: self.listens(port))
        except ClusterProblem as problem:
            raise ClusterProblem(f"{problem}: {tail(self._logs / f'{daemon}.log')}") from None

    # -- nodes

    def link(self, node: str, state: str) -> None:
        """Sets a node's network up or down."""
        self.run("ip", "link", "set", node, state)

    def processes(self) -> dict[str, dict[int, str]]:
        """For each node the names of its living processes by their numbers on the host: those in its network."""
        names = {f"net:[{self.path(f'/run/netns/{node}').stat().st_ino}]": node for node in self._nodes}
        found: dict[str, dict[int, str]] = {node: {} for node in self._nodes}
        for number in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it ended meanwhile
                node = names.get(os.readlink(f"/proc/{number}/ns/net"))
                if node:
                    found[node][int(number)] = Path(f"/proc/{number}/comm").read_text().strip()
        return found

    def kill(self, node: str, spared: Collection[str] = ()) -> None:
        for pid, name in self.processes()[node].items():
            if name not in spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def start_init(folder: Path, detached: bool) -> subprocess.Popen[bytes]:
    # --kill-child: whatever ends unshare ends the first process inside, and with it all others
    words = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "--kill-child"]
    words += [sys.executable, str(Path(__file__).with_name("init.py")), str(folder)]
    if not detached:
        words = ["setpriv", "--pdeathsig", "KILL", *words]
    with (folder / "log/init.log").open("wb") as log:
        return subprocess.Popen(
            words,
            env=CLEAN,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the one who uses the cluster
        )


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return " | ".join(lines[-3:]) or "(it said nothing)"


def until(what: str, condition: Callable[[], bool], seconds: float = 60, facts: object = "") -> None:
    """Waits for a condition; raises ClusterProblem with what was awaited and the facts as they then are.

    A look that takes long is followed by a longer pause: what is awaited needs the machine.
    """
    began = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now > began + seconds:
            raise ClusterProblem(f"not in {seconds:g} s: {what} {facts}".rstrip())
        time.sleep(max(0.02, min(2 * (now - looked), 1.0)))
        looked = time.monotonic()
