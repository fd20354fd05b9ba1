"""A real SLURM of four nodes on this machine, in namespaces of its own.

`Cluster.up(folder)` starts it and its verbs disturb it as a real one is disturbed; each returns when SLURM shows the
effect. Nothing of the host changes: no mount, interface, user, service or line of a file, so several may run side by
side. It needs root and what `make cluster-deps` prepares, and only the standard library.

    ctl        10.77.0.1      controller, accounting and login
    n1 ... n4  10.77.0.11-14  four cores, 8 GB and two GPUs each (as SLURM believes)

Partition `main` is the default; jobs in `high` preempt those in `main`, which are requeued. As in any SLURM a job is
started up to a second after its submission, and sacct hears of it up to five seconds after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType

from tests.on_slurm import packages

REPOSITORY = Path(__file__).resolve().parents[2]
PREPARED = REPOSITORY / ".cluster"
INSIDE = Path("/run/cluster")  # the state folder as it is named inside
CONTROLLER_PORT, DATABASE_PORT = 6817, 6819
NODES = ("n1", "n2", "n3", "n4")
ADDRESSES = {"ctl": "10.77.0.1"} | {node: f"10.77.0.1{number}" for number, node in enumerate(NODES, 1)}
USERS = {"student": 20001, "colleague": 20003}  # ordinary ones, both in the group lab
LAB = 20002
COMMANDS = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo", "sprio"),
    *("squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
)
SLURM_CONF = str(INSIDE / "etc/slurm.conf")
# what daemons get: jobs must not find anything of the process that started the cluster
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_CONF": SLURM_CONF}


class ClusterProblem(Exception):
    """The cluster did not do what it was told; the message holds what SLURM said."""


class Cluster:
    """One running cluster with its state folder."""

    def __init__(self, folder: Path) -> None:
        """The cluster that runs in a state folder; raises ClusterProblem where none does."""
        self.folder = folder.resolve()
        try:
            self._pid = int((self.folder / "pid").read_text())
            setup = json.loads((self.folder / "setup.json").read_text())
        except FileNotFoundError:
            raise ClusterProblem(f"no cluster runs in {folder}") from None
        self.slurm: str = setup["slurm"]
        self._token: str = setup["token"]
        self._holder: subprocess.Popen[bytes] | None = None
        if not self.alive():
            raise ClusterProblem(f"no cluster runs in {folder}")

    # -- life

    @classmethod
    def up(
        cls, folder: Path, prepared: Path = PREPARED, detached: bool = False, release: str = packages.OLDEST
    ) -> Cluster:
        """Starts a cluster with its state in `folder`, which has to be empty or missing.

        It ends with the calling thread, however that ends; a detached one goes on until `down`. Where this checkout
        or its Python lie below a folder that is closed to others (as /root), ordinary users reach them all the
        same, but then what is later made directly in such a folder is not seen inside. A detached cluster, in
        which people work with new folders, therefore does without.
        """
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        folder.chmod(0o755)  # everyone's commands read the configuration
        opened = [] if detached else [str(REPOSITORY), sys.prefix, sys.base_prefix]
        write_state(folder, prepared, release, opened)
        holder = start_init(folder, detached)
        try:
            until("the namespaces are made", lambda: (folder / "pid").exists() or holder.poll() is not None)
            if holder.poll() is not None:
                raise ClusterProblem(f"the namespaces cannot be made: {tail(folder / 'log/init.log')}")
            cluster = cls(folder)
            cluster._holder = holder
            cluster._write_commands()
            cluster.start_database()
            cluster._inside("sacctmgr", "--immediate", "add", "cluster", "testbed")
            cluster._start_slurmctld()
            for node in NODES:
                cluster._start_slurmd(node)
            cluster._until_nodes("all nodes are up", NODES, usable)
        except BaseException:
            holder.kill()
            holder.wait()
            raise
        return cluster

    def down(self) -> None:
        """Ends the cluster and all that runs in it; its logs and the users' homes stay."""
        shutil.rmtree(self.folder / "bin", ignore_errors=True)
        first = Path(f"/proc/{self._pid}")
        if self.alive():
            os.kill(self._pid, signal.SIGKILL)
            if self._holder is not None:
                self._holder.wait()
            # the kernel lets it go only after all others inside
            until("the cluster has ended", lambda: not first.exists())
        (self.folder / "pid").unlink(missing_ok=True)

    def alive(self) -> bool:
        # its file rather than its number alone, which another process may have by now
        return self._path(f"/run/{self._token}").exists()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # -- use

    @property
    def environ(self) -> dict[str, str]:
        """What a process on the host needs to use this cluster as from its login node."""
        # the file as the host sees it: SLURM's own commands see what is inside
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_CONF": str(self.folder / "etc/slurm.conf"),
        }

    def home(self, user: str) -> Path:
        """An ordinary user's home folder as named inside; on the host it is `folder / "home" / user`."""
        return INSIDE / "home" / user

    def run(
        self,
        *command: str | Path,
        user: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login node to its end.

        As root it runs in this process's environment and folder, as an ordinary user in an environment and the home
        of that user's own; `env` is added to either. Ordinary users can read this checkout and run its Python.
        """
        words = self._enter("--pid", f"--wdns={cwd or (self.home(user) if user else Path.cwd())}")
        # It dies with nsenter (by a timeout, say), to which it has no other tie.
        words += ["setpriv", "--pdeathsig", "KILL"]
        if user:
            words += ["--reuid", user, "--regid", user, "--init-groups"]
            environ = {"USER": user, "LOGNAME": user, "HOME": str(self.home(user)), "SHELL": "/bin/sh"} | CLEAN
        else:
            environ = os.environ | {"SLURM_CONF": SLURM_CONF}
        return subprocess.run(
            [*words, *map(str, command)],
            env=environ | dict(env or {}),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    def job(self, job_id: str | int) -> dict[str, str]:
        """What `scontrol show job` says of a job (of an array: of one task, as ID_TASK); empty where it is unknown."""
        done = self.run("scontrol", "show", "job", "--oneliner", str(job_id))
        if done.returncode != 0:
            if "Invalid job id" in done.stderr:
                return {}
            raise ClusterProblem(done.stderr.strip())
        line = done.stdout.splitlines()[0].strip()
        return dict(pair.split("=", 1) for pair in re.split(r" (?=[A-Z][\w/:]*=)", line))

    def until_job(self, job_id: str | int, *states: str, seconds: float = 60) -> dict[str, str]:
        """Waits until a job is in one of the states (SLURM's long names); what `job` then says."""
        facts: dict[str, str] = {}

        def there() -> bool:
            facts.clear()
            facts.update(self.job(job_id))
            return facts.get("JobState") in states

        until(f"job {job_id} is {' or '.join(states)}", there, seconds, facts)
        return facts

    def start_now(self, job_id: str | int) -> None:
        """Starts a requeued job that SLURM holds back (reason BeginTime): for 46 s here, 121 s by default.

        On a busy machine it may have started by itself before.
        """

        def requeued() -> bool:
            facts = self.job(job_id)
            return facts.get("Restarts", "0") != "0" and facts["JobState"] != "COMPLETING"

        until(f"job {job_id} is requeued", requeued)
        # Nodes refuse a credential from the second in which the last one was revoked, and the job would fail.
        revoked = int(time.time())
        until("the next second has come", lambda: int(time.time()) > revoked)
        if self.job(job_id).get("Reason") == "BeginTime":
            self._inside("scontrol", "update", f"JobId={job_id}", "StartTime=now")
            until(f"job {job_id} is no longer held back", lambda: self.job(job_id).get("Reason") != "BeginTime")

    # -- nodes

    def node_down(self, node: str, noticed: bool = True) -> None:
        """The node loses power: all of its processes are gone at once, and their peers hear nothing of it.

        SLURM would take half a minute to see it, so it is told; with `noticed=False` it is left to find out, and this
        returns before it has (see `until_down`).
        """
        # First the network: the kernel would close the dead processes' connections, and the job's other ranks fail
        # on that at once, as they do not where a machine is off.
        self._link(node, "down")
        self._kill(node)
        if noticed:
            self._tell_down(node)

    def node_given_up(self, node: str) -> None:
        """An operator says that the node is down, which works as before: SLURM ends what runs there."""
        self._tell_down(node)

    def node_up(self, node: str) -> None:
        """The node boots again, after `node_down`."""
        self._link(node, "up")
        self._start_slurmd(node)
        self._until_nodes(f"{node} is up", [node], usable)

    def cut(self, node: str, noticed: bool = True) -> None:
        """Nothing reaches the node any more; what runs on it goes on. `noticed` is as for `node_down`."""
        self._link(node, "down")
        if noticed:
            self._tell_down(node)

    def mend(self, node: str) -> None:
        """The network of a node that was cut is back, and what SLURM had given up there has ended."""
        given_up = "DOWN" in self._node_states()[node]
        if given_up:
            # Else a requeued job may start there before its old self is gone ("Duplicate jobid").
            self.drain(node)
        self._link(node, "up")
        self._register(node)
        if given_up:
            self._until_nodes(f"{node} is back", [node], reachable)
            self._until_without_strays(node)
            self._resume(node)
        self._until_nodes(f"{node} is up", [node], usable)

    def until_down(self, node: str) -> None:
        """Waits until SLURM has found out by itself that a node is gone."""
        self._until_nodes(f"{node} is down", [node], lambda state: "DOWN" in state)

    def drain(self, node: str) -> None:
        self._inside("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=by hand")
        self._until_nodes(f"{node} is drained", [node], lambda state: "DRAIN" in state)

    def undrain(self, node: str) -> None:
        self._resume(node)
        self._until_nodes(f"{node} is up", [node], usable)

    def preempt(self, nodes: Collection[str]) -> str:
        """Takes whole nodes from the jobs in `main`; the taking job's id, once it runs there.

        A job that does not end by itself keeps its nodes for KillWait (15 s) after its SIGTERM.
        """
        words = ["--parsable", "--partition=high", "--exclusive", f"--nodes={len(nodes)}"]
        words += [f"--nodelist={','.join(nodes)}", "--job-name=preemptor", "--output=/dev/null"]
        job_id = self._inside("sbatch", *words, "--wrap=exec sleep infinity").strip()
        self.until_job(job_id, "RUNNING")
        return job_id

    def release(self, job_id: str) -> None:
        """Gives the nodes back that `preempt` took."""
        self._inside("scancel", job_id)
        self.until_job(job_id, "CANCELLED")

    def _tell_down(self, node: str) -> None:
        """Says of a node what SLURM itself says when it does not answer, with the same end for the jobs on it."""
        told = 0.0

        def down() -> bool:
            nonlocal told
            if "DOWN" not in self._node_states()[node]:
                self._inside("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=Not responding")
                told = time.monotonic()
            # an answer that was under way when the network went may bring the node back once more
            return time.monotonic() > told + 0.3

        until(f"{node} is down", down)

    def _resume(self, node: str) -> None:
        self._inside("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _link(self, node: str, state: str) -> None:
        self._inside("ip", "link", "set", node, state)

    def _register(self, node: str) -> None:
        """Has slurmd announce itself; SLURM would ask for it within a minute."""
        for pid, name in self._processes()[node].items():
            if name == "slurmd":
                os.kill(pid, signal.SIGHUP)

    def _until_without_strays(self, node: str) -> None:
        strays: list[str] = []
        asked = time.monotonic()

        def gone() -> bool:
            nonlocal asked
            strays[:] = [name for name in self._processes()[node].values() if name != "slurmd"]
            # one that could not tell the controller of its job's end sleeps long before it tries again
            if set(strays) == {"slurmstepd"}:
                self._kill(node, spared=["slurmd"])
            elif strays and time.monotonic() > asked + 1:  # SLURM ends them when the node registers, not always at once
                self._register(node)
                asked = time.monotonic()
            return not strays

        until(f"what was given up on {node} has ended", gone, facts=strays)

    # -- services

    def stop_controller(self) -> None:
        """SLURM's commands fail, each after trying for 10 s; what runs goes on."""
        self._stop("slurmctld")

    def start_controller(self, *options: str) -> None:
        self._start_slurmctld(*options)
        up, processes = self._inside("ip", "-brief", "link", "show", "up"), self._processes()
        there = [node for node in NODES if f"{node}@" in up and "slurmd" in processes[node].values()]
        for node in there:
            self._register(node)
        self._until_nodes("the controller knows its nodes", there, lambda state: "UNKNOWN" not in state)

    def stop_database(self) -> None:
        """sacct fails (slurmdbd is gone); all else goes on."""
        self._stop("slurmdbd")

    def start_database(self) -> None:
        self._launch("slurmdbd")
        self._until_listening("slurmdbd", DATABASE_PORT)

    def accounting_off(self) -> None:
        """A site without accounting: sacct says that it is disabled."""
        self._change_site(accounting=False)

    def accounting_on(self) -> None:
        self._change_site(accounting=True)

    def forbid_requeue(self) -> None:
        """A site that allows no requeue: SLURM refuses it for every job that is submitted from now on."""
        self._change_site(requeue=False)

    def allow_requeue(self) -> None:
        self._change_site(requeue=True)

    def configure(self, *lines: str) -> None:
        """A site with these lines in its slurm.conf too."""
        (self.folder / "etc/site.conf").write_text(site() + "".join(f"{line}\n" for line in lines))
        self._restart_controller()

    def forget_jobs(self) -> None:
        """A controller that has lost its state: it knows no job, and nodes end those that it does not know.

        So it is with those that have ended after MinJobAge. Accounting knows more.
        """
        self._stop("slurmctld")
        self.start_controller("-c")

    def _change_site(self, **change: bool) -> None:
        write_site(self.folder, **change)
        self._restart_controller()  # the type of accounting is read at its start alone

    def _restart_controller(self) -> None:
        self._stop("slurmctld")
        self.start_controller()

    def _start_slurmctld(self, *options: str) -> None:
        self._launch("slurmctld", *options)
        self._until_listening("slurmctld", CONTROLLER_PORT)

    def _start_slurmd(self, node: str) -> None:
        # By nsenter, not `ip netns exec`, which mounts a /sys of its own over the one where slurmd looks for cgroups.
        # The host name is what torch announces, so each node has one.
        self._launch("unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -N {node}", node=node)

    # -- between tests

    def reset(self) -> None:
        """Ends all jobs and brings back every node, service and setting that a test may have changed."""
        self._inside("ip", "-batch", "-", stdin="".join(f"link set {node} up\n" for node in NODES))
        if not self._listens(DATABASE_PORT):
            self.start_database()
        if (self.folder / "etc/site.conf").read_text() != site():
            self._change_site()
        elif not self._listens(CONTROLLER_PORT):
            self.start_controller()
        states = self._node_states()
        for node, processes in self._processes().items():
            if "slurmd" not in processes.values():
                self._start_slurmd(node)
            elif not reachable(states[node]):
                self._kill(node, spared=["slurmd"])
                self._register(node)
        self._end_jobs()
        self._until_nodes("all nodes are back", NODES, reachable)
        for node, state in self._node_states().items():
            if not usable(state):
                self._resume(node)
        self._until_nodes("all nodes are up", NODES, usable)

    def _end_jobs(self) -> None:
        began = time.monotonic()

        def ended() -> bool:
            jobs = [line.split() for line in self._inside("squeue", "--noheader", "--format=%F %T").splitlines()]
            living = sorted({job for job, state in jobs if state != "COMPLETING"})
            if living:
                self._inside("scancel", "--quiet", *living)
            # SLURM would grant them the time of KillWait. Without its srun a step would take 2 s to see its end.
            patient = time.monotonic() < began + 2
            for node in NODES:
                self._kill(node, spared=["slurmd", "slurmstepd", *(["srun"] if patient else [])])
            return not jobs and all({*names.values()} == {"slurmd"} for names in self._processes().values())

        until("no job is left", ended)

    # -- parts

    def _path(self, inside: str) -> Path:
        """A path inside as the host reaches it."""
        return Path(f"/proc/{self._pid}/root{inside}")

    def _enter(self, *options: str, node: str | None = None) -> list[str]:
        """The words that run a command inside, on the login node or another."""
        net = f"--net={self._path(f'/run/netns/{node}')}" if node else "--net"
        return ["nsenter", "--target", str(self._pid), "--mount", "--uts", net, *options]

    def _inside(self, *command: str, stdin: str = "") -> str:
        """Runs a command as root on the login node, with nothing of this process's environment; its output."""
        words = [*self._enter("--pid"), *command]
        done = subprocess.run(words, env=CLEAN, input=stdin, capture_output=True, text=True, timeout=60, cwd="/")
        if done.returncode != 0:
            raise ClusterProblem(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def _launch(self, *daemon: str, node: str | None = None) -> None:
        """Starts a daemon, which leaves this process by itself."""
        log = self.folder / "log" / f"{node or daemon[0]}.out"
        words = [*self._enter("--pid", node=node), *daemon]
        # to a file: it may keep what it is given as output, and a pipe would then have no end
        with log.open("ab") as out:
            code = subprocess.call(words, env=CLEAN, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/")
        if code != 0:
            raise ClusterProblem(f"{shlex.join(daemon)} does not start: {tail(log)}")

    def _stop(self, daemon: str) -> None:
        try:
            number = int(self._path(f"/run/slurm/{daemon}.pid").read_text())
        except FileNotFoundError:
            return  # it does not run
        self._inside("sh", "-c", f"kill {number}")
        until(f"{daemon} has stopped", lambda: not self._path(f"/proc/{number}").exists())

    def _listens(self, port: int) -> bool:
        """Whether something on the login node listens at a port."""
        lines = Path(f"/proc/{self._pid}/net/tcp").read_text().splitlines()[1:]
        return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in map(str.split, lines))

    def _until_listening(self, daemon: str, port: int) -> None:
        try:
            until(f"{daemon} listens", lambda: self._listens(port))
        except ClusterProblem as problem:
            raise ClusterProblem(f"{problem}: {tail(self.folder / f'log/{daemon}.log')}") from None

    def _processes(self) -> dict[str, dict[int, str]]:
        """For each node the names of its living processes by their numbers on the host: those in its network."""
        names = {f"net:[{self._path(f'/run/netns/{node}').stat().st_ino}]": node for node in NODES}
        found: dict[str, dict[int, str]] = {node: {} for node in NODES}
        for number in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it ended meanwhile
                node = names.get(os.readlink(f"/proc/{number}/ns/net"))
                if node:
                    found[node][int(number)] = Path(f"/proc/{number}/comm").read_text().strip()
        return found

    def _kill(self, node: str, spared: Collection[str] = ()) -> None:
        for pid, name in self._processes()[node].items():
            if name not in spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _node_states(self) -> dict[str, str]:
        text = self._inside("scontrol", "show", "nodes", "--oneliner")
        return dict(re.findall(r"NodeName=(\S+).* State=(\S+)", text))

    def _until_nodes(self, what: str, nodes: Collection[str], condition: Callable[[str], bool]) -> None:
        states: dict[str, str] = {}

        def there() -> bool:
            states.update(self._node_states())
            return all(condition(states[node]) for node in nodes)

        until(what, there, 120, states)

    def _write_commands(self) -> None:
        """Wrappers on the host for SLURM's commands, which run inside in the folder that one stands in.

        They become the command itself, so that signals reach it. Only srun and salloc, which last as long as their
        job and have to end with the cluster, are children in its process namespace; they end with their parent.
        """
        enter = shlex.join(self._enter())
        for command in COMMANDS:
            lasting = " --pid setpriv --pdeathsig TERM" if command in ("srun", "salloc") else ""
            text = f"""\
                #!/bin/sh
                test -e {self._path(f"/run/{self._token}")} || {{ echo "{command}: the cluster is down" >&2; exit 1; }}
                export SLURM_CONF={SLURM_CONF}
                exec {enter} --wdns="$PWD"{lasting} {command} "$@"
                """
            path = self.folder / "bin" / command
            path.write_text(textwrap.dedent(text))
            path.chmod(0o755)


def write_state(folder: Path, prepared: Path, release: str, opened: list[str]) -> None:
    """All that init.py and the daemons read."""
    for name in ("bin", "etc", "home", "log"):
        (folder / name).mkdir()
    for source in (Path(__file__).parent / "etc").iterdir():
        shutil.copyfile(source, folder / "etc" / source.name)
    (folder / "etc/slurmdbd.conf").chmod(0o600)  # slurmdbd insists
    (folder / "etc/cgroup.conf").write_text(packages.RELEASES[release].cgroup)
    write_site(folder)
    write_users(folder)
    hosts = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    (folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{hosts}")
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    setup = {
        "slurm": release,
        "layers": packages.layers(prepared, release),
        "database": str(prepared / "database"),
        "addresses": ADDRESSES,
        "opened": opened,
        "token": f"cluster-{secrets.token_hex(8)}",
    }
    (folder / "setup.json").write_text(json.dumps(setup))


def write_users(folder: Path) -> None:
    """The host's users and groups with ours, who have home folders."""
    users = [f"{name}:x:{number}:{number}::{INSIDE}/home/{name}:/bin/sh\n" for name, number in USERS.items()]
    groups = [f"{name}:x:{number}:\n" for name, number in USERS.items()] + [f"lab:x:{LAB}:{','.join(USERS)}\n"]
    for name, lines in (("passwd", users), ("group", groups)):
        (folder / "etc" / name).write_text(Path("/etc", name).read_text().rstrip("\n") + "\n" + "".join(lines))
    # su, by which SLURM asks for what a user's login shell sets, wants a line for each of them; nobody has a password
    shadow = folder / "etc" / "shadow"
    shadow.touch(0o600)
    names = [line.partition(":")[0] for line in (folder / "etc/passwd").read_text().splitlines()]
    shadow.write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in names))
    for name, number in USERS.items():
        home = folder / "home" / name
        home.mkdir()
        os.chown(home, number, number)


def site(accounting: bool = True, requeue: bool = True) -> str:
    """Lines of slurm.conf for what sites do differently."""
    lines = ["AccountingStorageType=accounting_storage/none"]
    if accounting:
        lines = ["AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=ctl"]
        lines += ["AccountingStoreFlags=job_comment"]
    if not requeue:
        lines += ["JobSubmitPlugins=lua"]
    return "".join(f"{line}\n" for line in lines)


def write_site(folder: Path, accounting: bool = True, requeue: bool = True) -> None:
    (folder / "etc/site.conf").write_text(site(accounting, requeue))


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


def reachable(state: str) -> bool:
    return not {"DOWN", "NOT_RESPONDING", "UNKNOWN"} & {*state.split("+")}


def usable(state: str) -> bool:
    return reachable(state) and "DRAIN" not in state


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


def main(verb: str, release: str) -> None:
    """What `make cluster`, `make cluster-env` and `make cluster-down` do."""
    if release not in packages.RELEASES:
        raise SystemExit(f"SLURM={release}: there are {' and '.join(packages.RELEASES)}")
    folder = PREPARED / f"run-{release}"
    choice = "" if release == packages.OLDEST else f" SLURM={release}"
    try:
        cluster = Cluster(folder)
    except ClusterProblem as problem:
        if verb == "env":
            raise SystemExit(f"{problem}: make cluster{choice} starts one") from None
        shutil.rmtree(folder, ignore_errors=True)  # what one that is gone left
        if verb == "down":
            return
        cluster = Cluster.up(folder, detached=True, release=release)
    if verb == "up":
        print(
            f"SLURM {release} is up with four nodes, n1 to n4, and partitions main and high. For a shell that uses it:"
        )
        print(f'    eval "$(make -s cluster-env{choice})"     # and when you are done: make cluster-down{choice}')
    elif verb == "env":
        print(f"export PATH={shlex.quote(str(cluster.folder / 'bin'))}:$PATH")
        print(f"export SLURM_CONF={shlex.quote(cluster.environ['SLURM_CONF'])}")
    else:
        cluster.down()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
