"""The first process inside a cluster's namespaces: makes the machine that SLURM's daemons find, then reaps.

`cluster.py` starts it as PID 1 under `unshare --mount --pid --net --uts`. All mounts, interfaces and names it makes
belong to these namespaces, so the host keeps its own, and the end of this process ends everything that runs inside.
It uses the standard library alone, since it has to run before any environment is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

INSIDE = Path("/run/cluster")  # the state folder as the daemons see it: short enough for sockets, open to every user
DATABASE = Path("/run/database")
CLONE_NEWCGROUP = 0x02000000
SOCKET = Path("/run/mysqld/mysqld.sock")  # where slurmdbd looks


def main(state: Path) -> None:
    setup = json.loads((state / "setup.json").read_text())
    # read while /proc is still the host's: the number that nsenter needs on the host
    pid = os.readlink("/proc/self")
    if setup["cgroups"]:
        enter_cgroups(setup["cgroups"], setup["token"])
    isolate(state, setup["layers"])
    for path in setup["opened"]:
        open_to_users(Path(path))
    copying = subprocess.Popen(["cp", "-r", "--sparse=always", setup["database"], str(DATABASE)])
    become_controller(setup["addresses"])
    start(["munged", "--foreground", f"--key-file={INSIDE}/munge.key", "--seed-file=/run/munge/seed"], "munged.out")
    if copying.wait() != 0:
        raise SystemExit("the database could not be copied")
    database = start([*MARIADB, f"--datadir={DATABASE}"], "mariadbd.out")
    # slurmdbd, where it comes first, tries again only after 5 s
    while not SOCKET.exists():
        if database.poll() is not None:
            raise SystemExit("mariadbd does not start: see mariadbd.out")
        time.sleep(0.01)
    # by which the host tells this cluster from a process that has its number later
    (Path("/run") / setup["token"]).touch()
    written = state / "pid.part"
    written.write_text(pid)
    written.rename(state / "pid")
    reap()


# Reached through its socket alone, which lies in these namespaces: no network, no users, and nothing that survives
# a crash, since the database goes with the cluster.
MARIADB = [
    "mariadbd",
    "--no-defaults",
    "--user=root",
    "--skip-networking",
    "--skip-grant-tables",
    f"--socket={SOCKET}",
    # those of several clusters have one process id, each in its own namespace, and name their files in /tmp by it
    f"--tmpdir={SOCKET.parent}",
    "--pid-file=/run/mysqld/mysqld.pid",
    "--innodb-buffer-pool-size=64M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-log-file-size=16M",
    "--innodb-doublewrite=0",
    "--innodb-lock-wait-timeout=900",
]


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def enter_cgroups(hierarchies: list[str], name: str) -> None:
    """Goes into cgroups of this name, which are from then on all that is seen of the machine's."""
    for hierarchy in hierarchies:
        folder = Path("/sys/fs/cgroup") / hierarchy / name
        folder.mkdir()
        (folder / "cgroup.procs").write_text("0")
    # Python has os.unshare since 3.12
    if ctypes.CDLL(None).unshare(CLONE_NEWCGROUP) != 0:
        raise SystemExit("no namespace of cgroups can be made")
    mount("-t", "tmpfs", "tmpfs", "/sys/fs/cgroup")
    for hierarchy in hierarchies:
        own = Path("/sys/fs/cgroup") / hierarchy
        own.mkdir()
        mount("-t", "cgroup", "-o", hierarchy, "cgroup", own)


def isolate(state: Path, layers: list[str]) -> None:
    """Own /proc, /run, users and host names; SLURM's files over /usr."""
    mount("-t", "proc", "proc", "/proc")
    # also hides the sockets of the host's services (name service caches above all), which know nothing of our users
    mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/run")
    for name in ("cluster", "munge", "mysqld", "netns", "slurm", "gpus"):
        (Path("/run") / name).mkdir()
    mount("--bind", state, INSIDE)
    for number in (0, 1):
        os.mknod(f"/run/gpus/nvidia{number}", stat.S_IFCHR, os.makedev(195, number))
    # Jobs inherit the PATH of their submission, and inside the commands need no wrapper.
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", state / "bin")
    # Without an upper folder an overlay is read-only, and any file system may hold its layers.
    mount("-t", "overlay", "-o", f"lowerdir={':'.join(layers)}", "overlay", "/usr")
    for name in ("hosts", "passwd", "group", "shadow"):
        mount("--bind", state / "etc" / name, Path("/etc") / name)


def become_controller(addresses: dict[str, str]) -> None:
    """A bridge with the controller's address, and a network namespace on it for each node."""
    controller, *nodes = addresses
    socket.sethostname(controller)
    # Links of `lo` are up everywhere: torch and SLURM use 127.0.0.1 too. The bridge's address matters for
    # getaddrinfo with AI_ADDRCONFIG, which finds no IPv4 name where no address but the loopback's is configured.
    commands = ["link set lo up", "link add lan type bridge", f"addr add {addresses[controller]}/24 dev lan"]
    commands.append("link set lan up")
    for node in nodes:
        commands += [f"netns add {node}", f"link add {node} type veth peer name eth0 netns {node}"]
        commands += [f"link set {node} master lan up"]
    batch("ip", commands)
    for node in nodes:
        batch(f"ip -n {node}", ["link set lo up", f"addr add {addresses[node]}/24 dev eth0", "link set eth0 up"])


def batch(program: str, commands: list[str]) -> None:
    subprocess.run([*program.split(), "-batch", "-"], input="\n".join(commands) + "\n", text=True, check=True)


def open_to_users(path: Path) -> None:
    """Lets ordinary users reach a path whose parent folders are closed to them, as below /root.

    Paths stay as they are, since an environment's scripts hold them: each closed folder is covered by one
    that may be passed, in which what it holds is mounted again. What is made in it later is not seen inside.
    """
    for folder in [*reversed(path.parents), path]:
        if folder.is_symlink():
            open_to_users(folder.resolve())
        elif folder.is_dir() and not folder.stat().st_mode & stat.S_IXOTH:
            cover(folder)


def cover(folder: Path) -> None:
    owner = folder.stat()
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    mount("-t", "tmpfs", "-o", f"mode={stat.S_IMODE(owner.st_mode) | 0o011:o}", "tmpfs", folder)
    for entry in list(os.scandir(held)):
        again = folder / entry.name
        if entry.is_symlink():
            again.symlink_to(os.readlink(entry.name, dir_fd=held))
            continue
        again.mkdir() if entry.is_dir() else again.touch()
        # as it is: mount(8) would turn it into a path, which now leads to what covers the folder
        mount("--no-canonicalize", "--rbind", f"/proc/{os.getpid()}/fd/{held}/{entry.name}", again)
    os.close(held)


def start(command: list[str], log: str) -> subprocess.Popen[bytes]:
    with (INSIDE / "log" / log).open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def reap() -> None:
    """Takes the exit codes of all that ends: daemons and jobs that lost their parent come to PID 1, and their
    numbers would stay taken, so that SLURM would count them as alive."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
