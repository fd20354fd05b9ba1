"""Query a site from SLURM: its name and settings, the GPUs of its nodes, its partitions, and the user's limits.

Pure functions build the commands and read their output; `commands.run` runs them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.hostlist import expand
from mgpu_slurm.slurm import commands
from mgpu_slurm.slurm.commands import pairs_in

_GPUS_OF_NODES = re.compile(r"(?P<partition>[^|*]+)(?P<default>\*?)\|(?P<nodes>[0-9]+)\|(?P<gres>[^|]*)")
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Locations of slurm.conf if `SLURM_CONF` does not name one; if it is elsewhere, the controller is asked."""

_CLUSTER_NAME = re.compile(r"""^\s*ClusterName\s*=\s*["']?([^\s#"']+)""", re.IGNORECASE | re.MULTILINE)
_UNUSABLE = re.compile(r"down|drain|fail|maint|unk|no_respond|inval|reboot|planned_down|future")


@dataclass(frozen=True)
class Partition:
    """A partition, as far as it matters to users."""

    name: str
    is_default: bool
    state: str
    """`UP`, or why it takes no jobs."""
    max_time: str | None
    """Maximum time limit, as SLURM prints it; None for no limit."""
    default_time: str | None
    """Time limit of a job that requests none; None for the maximum."""
    max_nodes: int | None
    """Maximum number of nodes of one job."""
    preempt_mode: str
    grace: int
    """Seconds that a preempted job gets before KillWait."""
    nodes: Counter[str] = field(default_factory=Counter)
    """Number of nodes in each state."""
    gpus: tuple[Counter[str], ...] = ()
    """The GPUs of each kind of its nodes, by type as `gpus_in` returns them; fewest first."""

    @property
    def has_gpus(self) -> bool:
        return any(gpus.total() for gpus in self.gpus)

    @property
    def usable_nodes(self) -> int:
        return sum(count for state, count in self.nodes.items() if not is_unusable(state))


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one partition that have the same GPUs."""

    is_default: bool
    gpus_per_node: int


@dataclass(frozen=True)
class Association:
    """A user's right to use an account."""

    account: str
    qos: tuple[str, ...]


@dataclass(frozen=True)
class Reservation:
    """A time for which nodes are kept for others, or for a maintenance."""

    name: str
    start: datetime
    """Local time without a zone, as of the end."""
    end: datetime
    nodes: str
    """A host list; empty if it is not about nodes."""
    is_maintenance: bool

    @property
    def sentence(self) -> str:
        what = "a maintenance" if self.is_maintenance else f"reservation {self.name}"
        return f"{what} from {_minute(self.start)} to {_minute(self.end)} on {self.nodes or 'no nodes'}"

    def shares(self, nodes: str) -> bool:
        """Return whether it has any of the nodes of a host list."""
        return bool({*_expanded(self.nodes)} & {*_expanded(nodes)})

    def has_all(self, nodes: str) -> bool:
        """Return whether it has all nodes of a host list; not of one that is empty."""
        names = {*_expanded(nodes)}
        return bool(names) and names <= {*_expanded(self.nodes)}


def _minute(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M}"


def _expanded(nodes: str) -> list[str]:
    """Return the names in a host list; none if it cannot be read."""
    with contextlib.suppress(UserError):
        return expand(nodes)
    return []


def config_command() -> list[str]:
    return ["scontrol", "show", "config"]


def parse_config(output: str) -> dict[str, str]:
    """Return SLURM's own settings by name, such as `MaxArraySize`."""
    pairs = (line.partition("=") for line in output.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def cluster_name() -> str | None:
    """Return the cluster that SLURM's commands use here; None if that cannot be determined.

    Read from the configuration file if there is one, because the name is needed whenever runs are listed.
    """
    named = os.environ.get("SLURM_CONF")
    try:
        return _cluster_name((named,) if named else _CONFIGURATIONS)
    except ClusterError:
        return None


@functools.cache
def _cluster_name(configurations: Sequence[str]) -> str | None:
    """Return the name; an error is not cached, so that the next call asks again."""
    for path in configurations:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if found := _CLUSTER_NAME.search(file.read()):
                # as SLURM itself reads it
                return found[1].lower()
    return parse_config(commands.run(config_command(), commands.SQUEUE_TAKES)).get("ClusterName")


def max_array_size() -> int:
    """Return SLURM's MaxArraySize; all task numbers of an array are below it.

    Raises:
        ClusterError: the controller does not answer.
    """
    return array_size_in(commands.run(config_command()))


def array_size_in(output: str) -> int:
    """Return the MaxArraySize in SLURM's settings.

    Raises:
        ClusterError: it is not among them.
    """
    size = commands.number_of(parse_config(output).get("MaxArraySize", ""))
    if size is None:
        raise ClusterError("`scontrol show config` shows no MaxArraySize: try again later")
    return size


def parse_ports(text: str) -> range | None:
    """Return the ports of a SrunPortRange; None for `0-0`, an empty range."""
    low, _, high = text.partition("-")
    first, last = commands.number_of(low), commands.number_of(high)
    return range(first, last + 1) if first and last is not None else None


def srun_ports() -> range | None:
    """Return the ports on which the site's nodes reach the machine where srun runs; None if none are configured.

    Raises:
        ClusterError: the controller does not answer.
    """
    return parse_ports(parse_config(commands.run(config_command())).get("SrunPortRange", ""))


def sinfo_command(partition: str | None) -> list[str]:
    """Return the command that lists the GPUs of the nodes of a partition (or several, by commas), or of all."""
    # sinfo refuses the two together; a named partition is shown even if it is hidden
    chosen = "--all" if partition is None else f"--partition={partition}"
    return ["sinfo", "--noheader", chosen, "-o", "%P|%D|%G"]


def parse_sinfo(output: str) -> list[NodeGroup]:
    found = [_GPUS_OF_NODES.fullmatch(line.strip()) for line in output.splitlines()]
    return [NodeGroup(line["default"] == "*", gpus_in(line["gres"]).total()) for line in found if line is not None]


def gpus_in(gres: str) -> Counter[str]:
    """Return the GPUs in a node's generic resources, such as `gpu:a100:4(S:0-1),nvme:1`, by type.

    The type is an empty string if the site names none.
    """
    found: Counter[str] = Counter()
    # text in parentheses may contain commas, and `(null)` means none
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = part.split(":")
        if name == "gpu":
            count = commands.number_of(words[-1]) if words else None
            types = words if count is None else words[:-1]
            found[":".join(word for word in types if word != "no_consume")] += 1 if count is None else count
    return found


def gpus_of(groups: Sequence[NodeGroup], partition: str | None) -> int:
    """Return the GPUs per node that every GPU node of a partition has: the minimum over these; 0 without GPUs.

    Args:
        groups: the node groups of the partition, or of all if the job goes to the default one.
        partition: as the job names it; None for the cluster's default.
    """
    counts = [group.gpus_per_node for group in groups if partition is not None or group.is_default]
    return min((count for count in counts if count > 0), default=0)


def gpus_per_node(partition: str | None) -> int:
    """Query the cluster and return the result of `gpus_of`.

    Raises:
        ClusterError: the cluster does not answer, or has no such partition.
    """
    groups = parse_sinfo(commands.run(sinfo_command(partition)))
    if partition is not None and not groups:
        raise no_such_partition(partition)
    return gpus_of(groups, partition)


def no_such_partition(partition: str) -> ClusterError:
    """Return the error for a partition that does not exist; it names those that do.

    Raises:
        ClusterError: the cluster does not answer.
    """
    names = dict.fromkeys(commands.run(["sinfo", "--noheader", "--all", "-o", "%R"]).split())
    return ClusterError(f"--partition {partition}: no such partition; there are {', '.join(names) or 'none'}")


def version_command() -> list[str]:
    return ["sinfo", "--version"]


def parse_version(output: str) -> tuple[int, ...]:
    """Return `(22, 5, 8)` for `slurm 22.05.8`, also in the forms of distributions; empty if there is no version."""
    match = re.search(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?", output)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()


def ping_command() -> list[str]:
    return ["scontrol", "ping"]


def partitions_command() -> list[str]:
    return ["scontrol", "show", "partition", "--oneliner"]


def nodes_command() -> list[str]:
    """Return the command that lists the nodes of all partitions, one line for those of equal state and GPUs."""
    return ["sinfo", "--noheader", "--all", "-o", "%R|%D|%T|%G"]


def parse_partitions(output: str, nodes: str) -> list[Partition]:
    """Return the partitions that accept jobs of ordinary users.

    Args:
        output: the output of `partitions_command`.
        nodes: the output of `nodes_command`.
    """
    by_state: dict[str, Counter[str]] = {}
    gpus: dict[str, list[Counter[str]]] = {}
    for line in nodes.splitlines():
        if not re.fullmatch(r"[^|]+\|[0-9]{1,18}\|[^|]+\|[^|]*", line):
            # a site's banner
            continue
        name, count, state, gres = line.split("|")
        by_state.setdefault(name, Counter())[state] += int(count)
        if (of_nodes := gpus_in(gres)) not in gpus.setdefault(name, []):
            gpus[name].append(of_nodes)
    found = []
    for line in output.splitlines():
        pairs = pairs_in(line)
        if "PartitionName" in pairs and pairs.get("RootOnly") != "YES":
            name = pairs["PartitionName"]
            found.append(_partition(pairs, by_state.get(name, Counter()), gpus.get(name, [])))
    return found


def _partition(pairs: dict[str, str], nodes: Counter[str], gpus: Sequence[Counter[str]]) -> Partition:
    return Partition(
        name=pairs["PartitionName"],
        is_default=pairs.get("Default") == "YES",
        state=pairs.get("State", "UP"),
        max_time=_limit(pairs.get("MaxTime", "")),
        default_time=_limit(pairs.get("DefaultTime", "")),
        max_nodes=commands.number_of(pairs.get("MaxNodes", "")),
        preempt_mode=pairs.get("PreemptMode", "OFF"),
        grace=commands.number_of(pairs.get("GraceTime", "")) or 0,
        nodes=nodes,
        gpus=tuple(sorted(gpus, key=lambda of_nodes: (of_nodes.total(), sorted(of_nodes)))),
    )


def _limit(text: str) -> str | None:
    return None if text in ("", "NONE", "UNLIMITED", "INFINITE") else text


def is_unusable(state: str) -> bool:
    """Return whether a node in this state, as sinfo prints it (`down*`, `drained`, `idle`), gets no jobs."""
    return state.endswith("*") or _UNUSABLE.search(state.lower()) is not None


def accounting_command() -> list[str]:
    """Return the cheapest query to accounting: this user's jobs from now on."""
    return ["sacct", "--noheader", "-P", "-X", "-o", "JobID", "--starttime=now"]


def associations_command(user: str) -> list[str]:
    fields = "format=Account,QOS"
    return ["sacctmgr", "--noheader", "--parsable2", "show", "association", "where", f"user={user}", fields]


def parse_associations(output: str) -> list[Association]:
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 1]
    return [Association(account, tuple(filter(None, qos.split(",")))) for account, qos in rows]


def reservations_command() -> list[str]:
    return ["scontrol", "show", "reservation", "--oneliner"]


def parse_reservations(output: str) -> list[Reservation]:
    """Return the reservations that have not ended, by their start; a site may hide all but one's own."""
    found = []
    for line in output.splitlines():
        pairs = pairs_in(line)
        start, end = (commands.time_of(pairs.get(name, "")) for name in ("StartTime", "EndTime"))
        if "ReservationName" in pairs and start is not None and end is not None:
            times = datetime.fromisoformat(start), datetime.fromisoformat(end)
            nodes = commands.value_of(pairs.get("Nodes", "")) or ""
            is_maintenance = "MAINT" in pairs.get("Flags", "").split(",")
            found.append(Reservation(pairs["ReservationName"], *times, nodes, is_maintenance))
    return sorted(found, key=lambda each: each.start)


def partition_command(name: str) -> list[str]:
    return ["scontrol", "show", "partition", "--oneliner", name]


def may_be_requeued(output: str) -> bool | None:
    """Return whether SLURM would requeue a job, from the output of `jobs.show_command`; None if not stated."""
    match = re.search(r"\bRequeue=([01])\b", output)
    return None if match is None else match[1] == "1"
