"""A real SLURM of four nodes on this machine, in namespaces of its own.

`Cluster.up(folder)` starts it and its verbs disturb it as a real one is disturbed; each returns when SLURM shows the
effect. Nothing of the host changes: no mount, interface, user, service or line of a file, so several may run side by
side. It needs root and what `make cluster-deps` prepares, and only the standard library.

    ctl        10.77.0.1      controller, accounting and login
    n1 ... n4  10.77.0.11-14  four cores, 8 GB and two GPUs each (as SLURM believes), those of n4 of type a100

Partition `main` is the default; jobs in `high` preempt those in `main`, which are requeued. As in any SLURM a job is
started up to a second after its submission, and sacct hears of it up to five seconds after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.on_slurm import packages
from tests.on_slurm.machine import CLEAN, INSIDE, SLURM_CONF, ClusterProblem, Machine, start_init, tail, until
from tests.on_slurm.sites import HIERARCHIES, SITES, Site
from tests.on_slurm.state import write_state

REPOSITORY = Path(__file__).resolve().parents[2]
PREPARED = REPOSITORY / ".cluster"
CONTROLLER_PORT, DATABASE_PORT = 6817, 6819
COMMANDS = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo", "sprio"),
    *("squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
)


class Cluster:
    """One running cluster with its state folder."""

    def __init__(self, folder: Path) -> None:
        """The cluster that runs in a state folder; raises ClusterProblem where none does."""
        self.folder = folder.resolve()
        try:
            pid = int((self.folder / "pid").read_text())
            setup = json.loads((self.folder / "setup.json").read_text())
        except FileNotFoundError:
            raise ClusterProblem(f"no cluster runs in {folder}") from None
        self.slurm: str = setup["slurm"]
        self.site = SITES[self.slurm]
        self._token: str = setup["token"]
        _, *self.nodes = setup["addresses"]
        self._machine = Machine(self.folder, pid, self._token, self.nodes)
        self._holder: subprocess.Popen[bytes] | None = None
        self._slowed: set[str] = set()
        if not self._machine.alive():
            raise ClusterProblem(f"no cluster runs in {folder}")

    # -- life

    @classmethod
    def up(
        cls,
        folder: Path,
        prepared: Path = PREPARED,
        detached: bool = False,
        release: str = packages.OLDEST,
        large_nodes: int = 0,
    ) -> Cluster:
        """Starts a cluster with its state in `folder`, which has to be empty or missing.

        It ends with the calling thread, however that ends; a detached one goes on until `down`. Where this checkout
        or its Python lie below a folder that is closed to others (as /root), ordinary users reach them all the
        same, but then what is later made directly in such a folder is not seen inside. A detached cluster, in
        which people work with new folders, therefore does without. One that is killed leaves empty cgroups behind.

        Args:
            large_nodes: how many nodes of eight cores and no GPU it has besides: n5, n6, ...
        """
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        folder.chmod(0o755)  # everyone's commands read the configuration
        opened = [] if detached else [str(REPOSITORY), sys.prefix, sys.base_prefix]
        write_state(folder, prepared, release, SITES[release], opened, large_nodes)
        holder = start_init(folder, detached)
        try:
            until("the namespaces are made", lambda: (folder / "pid").exists() or holder.poll() is not None)
            if holder.poll() is not None:
                raise ClusterProblem(f"the namespaces cannot be made: {tail(folder / 'log/init.log')}")
            cluster = cls(folder)
            cluster._holder = holder
            cluster._write_commands()
            cluster.start_database()
            cluster._machine.run("sacctmgr", "--immediate", "add", "cluster", "testbed")
            cluster._start_slurmctld()
            for node in cluster.nodes:
                cluster._start_slurmd(node)
            cluster._until_nodes("all nodes are up", cluster.nodes, usable)
            until("a first step has run", cluster._runs_steps)
        except BaseException:
            holder.kill()
            holder.wait()
            raise
        return cluster

    def down(self) -> None:
        """Ends the cluster and all that runs in it; its logs and the users' homes stay."""
        shutil.rmtree(self.folder / "bin", ignore_errors=True)
        first = Path(f"/proc/{self._machine.pid}")
        if self._machine.alive():
            os.kill(self._machine.pid, signal.SIGKILL)
            if self._holder is not None:
                self._holder.wait()
            # the kernel lets it go only after all others inside
            until("the cluster has ended", lambda: not first.exists())
        remove_cgroups(self._token)
        (self.folder / "pid").unlink(missing_ok=True)

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
        words = self._machine.enter("--pid", f"--wdns={cwd or (self.home(user) if user else Path.cwd())}")
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

    def description(self) -> str:
        """Its jobs, its nodes and the last lines of the controller's log."""
        asked = (["scontrol", "show", "job", "--oneliner"], ["sinfo", "--all", "--Node", "--long"])
        lines = (self.folder / "log/slurmctld.log").read_text(errors="replace").splitlines()[-20:]
        return "\n".join([*(self.run(*words, timeout=10).stdout.strip() for words in asked), *lines])

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
            if facts.get("Restarts", "0") == "0" or facts["JobState"] == "COMPLETING":
                return False
            # SLURM 24.11 does not wait for its own step of the last start, whose end may take the new one's with it
            return facts["JobState"] != "PENDING" or not self._is_on_nodes(facts["JobId"])

        until(f"job {job_id} is requeued", requeued)
        # Nodes refuse a credential from the second in which the last one was revoked, and the job would fail.
        revoked = int(time.time())
        until("the next second has come", lambda: int(time.time()) > revoked)
        # its reason may be another, such as the node that it waits for
        facts = self.job(job_id)
        if facts["JobState"] == "PENDING" and facts["EligibleTime"] > time.strftime("%Y-%m-%dT%H:%M:%S"):
            self._machine.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
            until(f"job {job_id} is no longer held back", lambda: self.job(job_id).get("Reason") != "BeginTime")

    def _is_on_nodes(self, job_id: str) -> bool:
        """Whether nodes that SLURM can reach still have steps of a job, those of SLURM itself included."""
        states, title = self._node_states(), f"slurmstepd: [{job_id}."
        reached = [found for node, found in self._machine.processes().items() if reachable(states[node])]
        steps = [pid for found in reached for pid, name in found.items() if name == "slurmstepd"]
        for pid in steps:
            with contextlib.suppress(OSError):  # it ended meanwhile
                if Path(f"/proc/{pid}/cmdline").read_text(errors="replace").startswith(title):
                    return True
        return False

    # -- nodes

    def node_down(self, node: str, noticed: bool = True) -> None:
        """The node loses power: all of its processes are gone at once, and their peers hear nothing of it.

        SLURM would take half a minute to see it, so it is told; with `noticed=False` it is left to find out, and this
        returns before it has (see `until_down`).
        """
        # First the network: the kernel would close the dead processes' connections, and the job's other ranks fail
        # on that at once, as they do not where a machine is off.
        self._machine.link(node, "down")
        self._machine.kill(node)
        if noticed:
            self._tell_down(node)

    def node_given_up(self, node: str) -> None:
        """An operator says that the node is down, which works as before: SLURM ends what runs there."""
        self._tell_down(node)

    def node_up(self, node: str) -> None:
        """The node boots again, after `node_down`."""
        self._machine.link(node, "up")
        self._start_slurmd(node)
        self._until_nodes(f"{node} is up", [node], usable)

    def cut(self, node: str, noticed: bool = True) -> None:
        """Nothing reaches the node any more; what runs on it goes on. `noticed` is as for `node_down`."""
        self._machine.link(node, "down")
        if noticed:
            self._tell_down(node)

    def reconnect(self, node: str) -> None:
        """A node that was cut or given up is back, and what SLURM had given up there has ended."""
        given_up = "DOWN" in self._node_states()[node]
        if given_up:
            # Else a requeued job may start there before its old self is gone ("Duplicate jobid").
            self.drain(node)
        self._machine.link(node, "up")
        self._register(node)
        if given_up:
            self._until_nodes(f"{node} is back", [node], reachable)
            self._until_without_strays(node)
            self._resume(node)
        self._until_nodes(f"{node} is up", [node], usable)

    def slow_down(self, node: str, rate: str) -> None:
        """The node receives at a lower rate, as by a link that has fallen back; tc(8) says how it is written."""
        self._machine.run(
            "tc", "qdisc", "add", "dev", node, "root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"
        )
        self._slowed.add(node)

    def until_down(self, node: str) -> None:
        """Waits until SLURM has found out by itself that a node is gone."""
        self._until_nodes(f"{node} is down", [node], lambda state: "DOWN" in state)

    def drain(self, node: str) -> None:
        self._machine.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=by hand")
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
        job_id = self._machine.run("sbatch", *words, "--wrap=exec sleep infinity").strip()
        self.until_job(job_id, "RUNNING")
        return job_id

    def release(self, job_id: str) -> None:
        """Gives the nodes back that `preempt` took."""
        self._machine.run("scancel", job_id)
        self.until_job(job_id, "CANCELLED")

    def _tell_down(self, node: str) -> None:
        """Says of a node what SLURM itself says when it does not answer, with the same end for the jobs on it."""
        told = 0.0

        def down() -> bool:
            nonlocal told
            if "DOWN" not in self._node_states()[node]:
                self._machine.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=Not responding")
                told = time.monotonic()
            # an answer that was under way when the network went may bring the node back once more
            return time.monotonic() > told + packages.RELEASES[self.slurm].answers_within

        until(f"{node} is down", down)

    def _resume(self, node: str) -> None:
        self._machine.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _register(self, node: str) -> None:
        """Has slurmd announce itself; SLURM would ask for it within a minute."""
        for pid, name in self._machine.processes()[node].items():
            if name == "slurmd":
                os.kill(pid, signal.SIGHUP)

    def _until_without_strays(self, node: str) -> None:
        strays: list[str] = []
        asked = time.monotonic()

        def gone() -> bool:
            nonlocal asked
            strays[:] = [name for name in self._machine.processes()[node].values() if name != "slurmd"]
            # one that could not tell the controller of its job's end sleeps long before it tries again
            if set(strays) == {"slurmstepd"}:
                self._machine.kill(node, spared=["slurmd"])
            elif strays and time.monotonic() > asked + 1:  # SLURM ends them when the node registers, not always at once
                self._register(node)
                asked = time.monotonic()
            return not strays

        until(f"what was given up on {node} has ended", gone, facts=strays)

    # -- services

    def stop_controller(self) -> None:
        """SLURM's commands fail, each after trying for 10 s; what runs goes on."""
        self._machine.stop("slurmctld")

    def start_controller(self, *options: str) -> None:
        self._start_slurmctld(*options)
        up, processes = self._machine.run("ip", "-brief", "link", "show", "up"), self._machine.processes()
        there = [node for node in self.nodes if f"{node}@" in up and "slurmd" in processes[node].values()]
        for node in there:
            self._register(node)
        self._until_nodes("the controller knows its nodes", there, lambda state: "UNKNOWN" not in state)

    def stop_database(self) -> None:
        """sacct fails (slurmdbd is gone); all else goes on."""
        self._machine.stop("slurmdbd")

    def start_database(self) -> None:
        self._machine.launch("slurmdbd")
        self._machine.until_listening("slurmdbd", DATABASE_PORT)

    def change_site(self, **change: Any) -> None:
        """The site is as it was, but for these fields of `Site`."""
        self._become(replace(self.site, **change))

    def forget_jobs(self) -> None:
        """A controller that has lost its state: it knows no job, and nodes end those that it does not know.

        So it is with those that have ended after MinJobAge. Accounting knows more.
        """
        self._machine.stop("slurmctld")
        self.start_controller("-c")

    def _become(self, site: Site) -> None:
        self.site = site
        site.write(self.folder / "etc")
        # much of it is read only when the controller starts
        self._machine.stop("slurmctld")
        self.start_controller()

    def _start_slurmctld(self, *options: str) -> None:
        self._machine.launch("slurmctld", *options)
        self._machine.until_listening("slurmctld", CONTROLLER_PORT)

    def _start_slurmd(self, node: str) -> None:
        # By nsenter, not `ip netns exec`, which mounts a /sys of its own over the one where slurmd looks for cgroups.
        # The host name is what torch announces, so each node has one.
        self._machine.launch("unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -N {node}", node=node)

    # -- between tests

    def reset(self) -> None:
        """Ends all jobs and brings back every node, service and setting that a test may have changed."""
        self._machine.run("ip", "-batch", "-", stdin="".join(f"link set {node} up\n" for node in self.nodes))
        while self._slowed:
            self._machine.run("tc", "qdisc", "del", "dev", self._slowed.pop(), "root")
        if not self._machine.listens(DATABASE_PORT):
            self.start_database()
        if self.site != SITES[self.slurm]:
            self._become(SITES[self.slurm])
        elif not self._machine.listens(CONTROLLER_PORT):
            self.start_controller()
        states = self._node_states()
        for node, processes in self._machine.processes().items():
            if "slurmd" not in processes.values():
                self._start_slurmd(node)
            elif not reachable(states[node]):
                self._machine.kill(node, spared=["slurmd"])
                self._register(node)
        self._end_jobs()
        self._until_nodes("all nodes are back", self.nodes, reachable)
        for node, state in self._node_states().items():
            if not usable(state):
                self._resume(node)
        self._until_nodes("all nodes are up", self.nodes, usable)

    def _end_jobs(self) -> None:
        began = time.monotonic()

        def ended() -> bool:
            jobs = [line.split() for line in self._machine.run("squeue", "--noheader", "--format=%F %T").splitlines()]
            living = sorted({job for job, state in jobs if state != "COMPLETING"})
            if living:
                self._machine.run("scancel", "--quiet", *living)
            # SLURM would grant them the time of KillWait. Without its srun a step would take 2 s to see its end.
            patient = time.monotonic() < began + 2
            for node in self.nodes:
                self._machine.kill(node, spared=["slurmd", "slurmstepd", *(["srun"] if patient else [])])
            return not jobs and all({*names.values()} == {"slurmd"} for names in self._machine.processes().values())

        until("no job is left", ended)

    # -- parts

    def _node_states(self) -> dict[str, str]:
        text = self._machine.run("scontrol", "show", "nodes", "--oneliner")
        return dict(re.findall(r"NodeName=(\S+).* State=(\S+)", text))

    def _until_nodes(self, what: str, nodes: Collection[str], condition: Callable[[str], bool]) -> None:
        states: dict[str, str] = {}

        def there() -> bool:
            states.update(self._node_states())
            return all(condition(states[node]) for node in nodes)

        until(what, there, 120, states)

    def _runs_steps(self) -> bool:
        """Run a step on all nodes. The first one with a step manager may fail: srun does not wait for that to start."""
        return self.run("srun", f"--nodes={len(self.nodes)}", "--quiet", "true").returncode == 0

    def _write_commands(self) -> None:
        """Wrappers on the host for SLURM's commands, which run inside in the folder that one stands in.

        They become the command itself, so that signals reach it. Only srun and salloc, which last as long as their
        job and have to end with the cluster, are children in its process namespace; they end with their parent.
        """
        enter = shlex.join(self._machine.enter())
        for command in COMMANDS:
            lasting = " --pid setpriv --pdeathsig TERM" if command in ("srun", "salloc") else ""
            text = f"""\
                #!/bin/sh
                test -e {self._machine.mark} || {{ echo "{command}: the cluster is down" >&2; exit 1; }}
                export SLURM_CONF={SLURM_CONF}
                exec {enter} --wdns="$PWD"{lasting} {command} "$@"
                """
            path = self.folder / "bin" / command
            path.write_text(textwrap.dedent(text))
            path.chmod(0o755)


def reachable(state: str) -> bool:
    return not {"DOWN", "NOT_RESPONDING", "UNKNOWN"} & {*state.split("+")}


def usable(state: str) -> bool:
    return reachable(state) and "DRAIN" not in state


def remove_cgroups(token: str) -> None:
    for name in HIERARCHIES:
        for folder, _, _ in os.walk(f"/sys/fs/cgroup/{name}/{token}", topdown=False):
            os.rmdir(folder)


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
