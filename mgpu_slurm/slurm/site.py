"""What SLURM tells of a site: its version, partitions, nodes, and what the user may do there.

Pure functions build the commands and read their output; `commands.run` runs them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from mgpu_slurm.slurm.commands import gpus_in, pairs_in

_UNUSABLE = re.compile(r"down|drain|fail|maint|unk|no_respond|inval|reboot|planned_down|future")


@dataclass(frozen=True)
class Partition:
    """One partition, as a user meets it."""

    name: str
    is_default: bool
    state: str
    """`UP`, or why it takes no jobs."""
    max_time: str | None
    """As SLURM writes it; None for no limit."""
    default_time: str | None
    """What a job gets that asks for none; None for the limit."""
    max_nodes: int | None
    """Of one job."""
    preempt_mode: str
    grace: int
    """Seconds that a preempted job gets before KillWait."""
    nodes: Counter[str] = field(default_factory=Counter)
    """How many there are in each state."""
    gpus_per_node: tuple[int, ...] = ()
    """Each number that occurs, rising."""

    @property
    def usable_nodes(self) -> int:
        return sum(count for state, count in self.nodes.items() if not is_unusable(state))


@dataclass(frozen=True)
class Association:
    """A user's right to use an account, with its limits."""

    account: str
    max_jobs: int | None
    max_submitted: int | None
    qos: tuple[str, ...]


def version_command() -> list[str]:
    return ["sinfo", "--version"]


def parse_version(output: str) -> tuple[int, ...]:
    """`(22, 5, 8)` of `slurm 22.05.8`, also as distributions write it; empty where there is none."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", output)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()


def ping_command() -> list[str]:
    return ["scontrol", "ping"]


def partitions_command() -> list[str]:
    return ["scontrol", "show", "partition", "--oneliner"]


def nodes_command() -> list[str]:
    """The nodes of all partitions, as many as have the same state and GPUs on one line."""
    return ["sinfo", "--noheader", "--all", "-o", "%R|%D|%T|%G"]


def parse_partitions(output: str, nodes: str) -> list[Partition]:
    """Partitions that take jobs of ordinary users.

    Args:
        output: of `partitions_command`.
        nodes: the output of `nodes_command`.
    """
    by_state: dict[str, Counter[str]] = {}
    gpus: dict[str, set[int]] = {}
    for line in nodes.splitlines():
        if not re.fullmatch(r"[^|]+\|\d+\|[^|]+\|[^|]*", line):
            # a site's banner
            continue
        name, count, state, gres = line.split("|")
        by_state.setdefault(name, Counter())[state] += int(count)
        gpus.setdefault(name, set()).add(gpus_in(gres))
    found = []
    for line in output.splitlines():
        pairs = pairs_in(line)
        if "PartitionName" in pairs and pairs.get("RootOnly") != "YES":
            name = pairs["PartitionName"]
            found.append(_partition(pairs, by_state.get(name, Counter()), tuple(sorted(gpus.get(name, ())))))
    return found


def _partition(pairs: dict[str, str], nodes: Counter[str], gpus: tuple[int, ...]) -> Partition:
    return Partition(
        name=pairs["PartitionName"],
        is_default=pairs.get("Default") == "YES",
        state=pairs.get("State", "UP"),
        max_time=_limit(pairs.get("MaxTime", "")),
        default_time=_limit(pairs.get("DefaultTime", "")),
        max_nodes=_number(pairs.get("MaxNodes", "")),
        preempt_mode=pairs.get("PreemptMode", "OFF"),
        grace=_number(pairs.get("GraceTime", "")) or 0,
        nodes=nodes,
        gpus_per_node=gpus,
    )


def _limit(text: str) -> str | None:
    return None if text in ("", "NONE", "UNLIMITED", "INFINITE") else text


def is_unusable(state: str) -> bool:
    """Whether a node in this state, as sinfo writes it (`down*`, `drained`, `idle`), gets no jobs."""
    return state.endswith("*") or _UNUSABLE.search(state.lower()) is not None


def accounting_command() -> list[str]:
    """The cheapest question to accounting: this user's jobs from now on."""
    return ["sacct", "--noheader", "-P", "-X", "-o", "JobID", "--starttime=now"]


def associations_command(user: str) -> list[str]:
    fields = "format=Account,MaxJobs,MaxSubmitJobs,QOS"
    return ["sacctmgr", "--noheader", "--parsable2", "show", "association", "where", f"user={user}", fields]


def parse_associations(output: str) -> list[Association]:
    found = []
    for line in output.splitlines():
        if line.count("|") != 3:
            continue
        account, max_jobs, max_submitted, qos = line.split("|")
        found.append(
            Association(account, _number(max_jobs), _number(max_submitted), tuple(filter(None, qos.split(","))))
        )
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def may_be_requeued(output: str) -> bool | None:
    """Whether SLURM would requeue a job, from the output of `jobs.show_command`; None where it does not say."""
    match = re.search(r"\bRequeue=([01])\b", output)
    return None if match is None else match[1] == "1"
