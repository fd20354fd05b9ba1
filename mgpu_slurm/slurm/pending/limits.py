"""Limits of QOSs and associations: which one a job's reason names, its value, and how much of it is in use.

SLURM names a limit by its reason (`QOSMaxGRESPerUser`), `scontrol show assoc_mgr` by a field and a resource
(`MaxTRESPU=gres/gpu=2(1)`, of which 1 is in use), and sacctmgr by a column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.slurm import commands
from mgpu_slurm.slurm.commands import pairs_in

JOBS, SUBMITTED, WALL = "jobs", "submitted", "wall"
"""Resources besides those that SLURM counts by itself (TRES), such as `cpu` and `gres/gpu`."""

# slurm's job_state_reason.c, of 22.05 and 24.11
_REASON = re.compile(
    r"(?P<of>QOS|Assoc|)(?P<kind>Grp|Max|Min)"
    r"(?P<what>BB|Billing|CPU|Cpu|Energy|GRES|Jobs|License|Mem|Memory|Node|SubmitJobs?|Unknown|Wall|WallDuration)"
    r"(?P<time>Minutes|RunMinutes|RunMins|)(?:Per(?P<per>Account|Job|Node|User))?(?:Limit|NotSatisfied)?"
)
_RESOURCES = {
    "BB": "bb/",
    "Billing": "billing",
    "CPU": "cpu",
    "Cpu": "cpu",
    "Energy": "energy",
    "GRES": "gres/",
    "Jobs": JOBS,
    "License": "license/",
    "Mem": "mem",
    "Memory": "mem",
    "Node": "node",
    "SubmitJob": SUBMITTED,
    "SubmitJobs": SUBMITTED,
    "Unknown": "",
    "Wall": WALL,
    "WallDuration": WALL,
}
_THINGS = {
    "cpu": "cores",
    "gres/": "GPUs",
    "mem": "memory",
    "node": "nodes",
    "license/": "licenses",
    JOBS: "running jobs",
    SUBMITTED: "queued and running jobs",
    WALL: "time",
}
_COUNTABLE = {"cpu": "core", "gres/gpu": "GPU", "node": "node", JOBS: "running job", SUBMITTED: "queued or running job"}

# 18 digits, as Python refuses to read a number of thousands of digits
_VALUE = re.compile(
    r"(?P<value>\d{1,18}(?:\.\d{1,6})?)(?P<unit>[KMGTP]?)(?:\((?P<used>\d{1,18})(?:\.\d+)?\))?", re.ASCII
)
_OF_ONE = re.compile(r"(?P<name>[^\s={}]+)=\{(?P<fields>[^{}]*)\}")
"""The limits of one user or account in a QOS."""
_NAME = re.compile(r"(?P<name>.*?)(?:\((?P<number>\d+)\))?")
"""A name and its number, `lab(3)`; 22.05 has only the number of a user in a QOS."""

_COLUMNS = {
    "GrpTRES": "GrpTRES",
    "GrpTRESMins": "GrpTRESMins",
    "GrpJobs": "GrpJobs",
    "GrpSubmitJobs": "GrpSubmitJobs",
    "MaxTRESPerJob": "MaxTRESPJ",
    "MaxTRESPerNode": "MaxTRESPN",
    "MaxTRESMins": "MaxTRESMinsPJ",
    "MaxWall": "MaxWallPJ",
    "MaxTRESPerUser": "MaxTRESPU",
    "MaxJobsPerUser": "MaxJobsPU",
    "MaxSubmitJobsPerUser": "MaxSubmitJobsPU",
    "MaxTRESPerAccount": "MaxTRESPA",
    "MaxJobsPerAccount": "MaxJobsPA",
    "MaxSubmitJobsPerAccount": "MaxSubmitJobsPA",
    "MinTRESPerJob": "MinTRESPJ",
}
"""Columns of sacctmgr, and the fields of `scontrol show assoc_mgr` for them."""
_SCALARS = {"Jobs": JOBS, "SubmitJobs": SUBMITTED, "Wall": WALL}
_FIELD = re.compile(
    r"(?P<kind>Grp|Max|Min)(?P<what>TRES|Jobs|SubmitJobs|Wall)(?P<time>Mins|RunMins|)(?P<per>PJ|PN|PU|PA|)"
)


@dataclass(frozen=True)
class LimitKind:
    """What a limit counts, and of whom."""

    kind: str
    """`Grp` for the sum of all jobs, `Max` or `Min`."""
    resource: str
    """`cpu`, `gres/gpu`, `JOBS`, ...; ends with a slash if the reason does not say which resource of a kind."""
    time: str = ""
    """`Mins` if it is multiplied by the time used, `RunMins` by the time that running jobs still have."""
    per: str = ""
    """`PU` for a user in a QOS, `PA` an account, `PJ` a job, `PN` a node of a job."""

    @property
    def field(self) -> str:
        scalar = {resource: name for name, resource in _SCALARS.items()}.get(self.resource, "TRES")
        return f"{self.kind}{scalar}{self.time}{self.per}"

    @property
    def is_of_a_job(self) -> bool:
        """Whether it is about a single job, which other jobs cannot help to start."""
        return self.per in ("PJ", "PN")


@dataclass(frozen=True)
class NamedLimit(LimitKind):
    """The limit that a reason names."""

    is_of_qos: bool = True

    @property
    def words(self) -> str:
        """Which limit it is, as far as the reason tells."""
        owner = "QOS" if self.is_of_qos else "account"
        things = _THINGS.get(self.resource, self.resource.strip("/") or "resources")
        whom = {"PU": " a user", "PA": " an account"}.get(self.per, "")
        if self.kind == "Min":
            return f"its {owner} requires more {things} of a job"
        if self.is_of_a_job:
            each = "a node of a job" if self.per == "PN" else "a job"
            things += " x time" if self.time else ""
            return f"it asks for more {things} than its {owner} allows {each}"
        if self.time == "Mins" or (self.resource == WALL):
            return f"its {owner} has used up its {'time' if self.resource == WALL else f'{things} x time'}"
        if self.time:
            return f"its {owner} allows{whom} no more {things} x time of running jobs"
        if self.per or (not self.is_of_qos and self.kind == "Max"):
            return f"its {owner} allows{whom or ' you'} no more {things} at the same time"
        return f"its {owner} allows all of its jobs together no more {things}"


@dataclass(frozen=True)
class Limit(LimitKind):
    """A limit that is set, with its value."""

    owner: str = ""
    """`QOS short` or `account lab`."""
    is_of_user: bool = False
    """Whether it is that of the user's own association with an account, not of the account."""
    value: int = 0
    """In minutes for a time, in megabytes for memory."""
    used: int | None = None
    """None if SLURM does not tell, or it is about a single job."""

    @property
    def is_of_one_user(self) -> bool:
        """Whether only the user's own jobs count."""
        return self.per == "PU" or self.is_of_user

    def amount(self, value: int) -> str:
        """Return an amount of its resource: `2 GPUs`, `1:00:00`, `100 core minutes`."""
        return quantity(self.resource, value, bool(self.time))

    def is_in_the_way(self, asked: int) -> bool:
        """Return whether it keeps a job that asks for so much from starting now."""
        return asked < self.value if self.kind == "Min" else (self.used or 0) + asked > self.value

    def sentence(self, asked: int) -> str:
        """Return what it allows, what is in use, and what a job asks for."""
        wants = f"this run asks for {self._plain(asked)}"
        if self.kind == "Min":
            return f"{self.owner} requires at least {self.amount(self.value)} of a job; {wants}"
        allowed = f"{self.owner} allows {self._whom} {self.amount(self.value)}"
        if self.resource in (JOBS, SUBMITTED):
            now = "running" if self.resource == JOBS else "there"
            return allowed if self.used is None else f"{allowed}: {self.used} {'is' if self.used == 1 else 'are'} {now}"
        if self.used is None:
            return f"{allowed}; {wants}"
        return f"{allowed}: {self._plain(self.used)} in use, and {wants}"

    def short(self) -> str:
        """Return what it allows and whom, without what is used."""
        if self.kind == "Min":
            return f"at least {self.amount(self.value)} a job"
        whom = {"you": "", "a job": " a job", "a node of a job": " a node"}.get(self._whom, f" for {self._whom}")
        return f"{self.amount(self.value)}{whom}"

    def _plain(self, value: int) -> str:
        """Return an amount for the end of a sentence that has named the resource."""
        is_counted = self.resource.partition(":")[0] in _COUNTABLE and not self.time
        return str(value) if is_counted else self.amount(value)

    @property
    def _whom(self) -> str:
        if self.per in ("PJ", "PN"):
            return "a node of a job" if self.per == "PN" else "a job"
        if self.per == "PA":
            return "an account"
        return "you" if self.is_of_one_user else "all of its jobs together"


def quantity(resource: str, value: int, is_times_minutes: bool = False) -> str:
    """Return an amount of a resource."""
    if resource == WALL:
        return clock(value)
    if resource == "mem":
        text = f"{value // 1024}G" if value % 1024 == 0 and value else f"{value}M"
        return f"{text} of memory" + (" x minutes" if is_times_minutes else "")
    kind, _, model = resource.partition(":")
    thing = _COUNTABLE.get(kind)
    if thing is None:
        return f"{value} {resource}" + (" minutes" if is_times_minutes else "")
    of_model = f" of type {model}" if model else ""
    return counted(value, f"{thing} minute" if is_times_minutes else thing) + of_model


def clock(minutes: int) -> str:
    """Return minutes in the form of `--time`: `1:30:00`, `2-00:00:00`."""
    days, left = divmod(minutes, 24 * 60)
    hours, minutes = divmod(left, 60)
    return f"{days}-{hours:02d}:{minutes:02d}:00" if days else f"{hours}:{minutes:02d}:00"


def named_by(reason: str) -> NamedLimit | None:
    """Return the limit that a reason of squeue names; None for other reasons."""
    found = _REASON.fullmatch(reason)
    if found is None:
        return None
    resource, per = _RESOURCES[found["what"]], found["per"]
    is_of_a_job = found["kind"] == "Min" or (resource == WALL and found["kind"] == "Max")
    in_short = "PJ" if is_of_a_job else {None: "", "Account": "PA", "Job": "PJ", "Node": "PN", "User": "PU"}[per]
    time = {"": "", "Minutes": "Mins"}.get(found["time"], "RunMins")
    # only associations have limits without a scope, and those per account or user are all of a QOS
    return NamedLimit(found["kind"], resource, time, in_short, is_of_qos=found["of"] != "Assoc")


def show_command(user: str, qos: Sequence[str]) -> list[str]:
    """Return the command that shows the limits of a user's associations and of some QOSs, and what is used of them.

    The controller answers also if the site hides others' jobs, but then not for the accounts above the user.
    """
    chosen = [f"qos={','.join(qos)}"] if qos else []
    flags = "flags=assoc,qos" if qos else "flags=assoc"
    return ["scontrol", "show", "assoc_mgr", "--oneliner", flags, f"users={user}", *chosen]


def parse_shown(output: str, user: str, uid: str, account: str | None = None) -> list[Limit]:
    """Return the limits that are set.

    Args:
        user: the limits of others in a QOS are skipped.
        account: skip those of other accounts in a QOS; None for all.
    """
    found: list[Limit] = []
    for line in output.splitlines():
        head, _, rest = line.partition(" Account Limits=")
        pairs = pairs_in(head)
        if "QOS" in pairs:
            owner = f"QOS {_name(pairs['QOS'])}"
            found += _limits(pairs, owner)
            accounts, _, users = rest.partition(" User Limits=")
            for one in _OF_ONE.finditer(accounts):
                if account in (None, one["name"]):
                    found += _limits(pairs_in(one["fields"]), owner)
            for one in _OF_ONE.finditer(users):
                name = _NAME.fullmatch(one["name"])
                if name is not None and (name["number"] or name["name"]) == uid:
                    found += _limits(pairs_in(one["fields"]), owner)
        elif "UserName" in pairs and "Account" in pairs:
            of_user = _name(pairs["UserName"])
            if of_user in ("", user):
                owner, is_of_user = f"account {pairs['Account']}", bool(of_user)
                limits = _limits(pairs, owner, is_of_user)
                # an account's limits for each of its users are in these users' associations, too
                found += [limit for limit in limits if is_of_user or limit.kind == "Grp"]
    return found


def _name(text: str) -> str:
    match = _NAME.fullmatch(text)
    return text if match is None else match["name"]


def qos_command() -> list[str]:
    """Return the command that lists the limits of all QOSs, also those that the user has no jobs in."""
    return ["sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format=Name,{','.join(_COLUMNS)}"]


def parse_qos(output: str) -> dict[str, list[Limit]]:
    """Return the limits of each QOS by its name."""
    found: dict[str, list[Limit]] = {}
    for line in output.splitlines():
        name, *values = line.split("|")
        if len(values) == len(_COLUMNS):
            pairs = dict(zip(_COLUMNS.values(), values, strict=True))
            seconds = commands.parse_time_left(pairs["MaxWallPJ"])
            pairs["MaxWallPJ"] = "" if seconds is None else str(seconds // 60)
            found[name] = list(_limits(pairs, f"QOS {name}"))
    return found


def _limits(pairs: Mapping[str, str], owner: str, is_of_user: bool = False) -> Iterator[Limit]:
    for name, text in pairs.items():
        field = _FIELD.fullmatch(name)
        if field is None:
            continue
        scalar = _SCALARS.get(field["what"])
        # `cpu=4(1),gres/gpu=2(0)`, or `4(1)`
        parts = {scalar: text} if scalar else dict(part.partition("=")[::2] for part in text.split(","))
        for resource, part in parts.items():
            if (amount := _VALUE.fullmatch(part)) is not None:
                used = int(amount["used"]) if amount["used"] is not None else None
                value = _value(resource, amount)
                yield Limit(field["kind"], resource, field["time"], field["per"], owner, is_of_user, value, used)


def _value(resource: str, amount: re.Match[str]) -> int:
    """Return an amount in whole units, of memory in megabytes."""
    factor = commands.MEGABYTES[amount["unit"]] if resource == "mem" else 1
    return int(float(amount["value"]) * factor)


def of_reason(found: Sequence[Limit], named: NamedLimit, asked: Mapping[str, int]) -> list[Limit]:
    """Return the limits among these that a reason can mean: those in the way of the job, if any are.

    Args:
        asked: see `asked_of`.
    """
    of = "QOS " if named.is_of_qos else "account "
    meant = [
        limit
        for limit in found
        if limit.owner.startswith(of) and limit.field == named.field and _may_be(limit.resource, named.resource)
    ]
    return [limit for limit in meant if limit.is_in_the_way(amount_of(limit, asked))] or meant


def _may_be(resource: str, named: str) -> bool:
    """Return whether a reason means a resource; it may only tell its kind (`gres/`), or nothing."""
    return resource.startswith(named) if named[-1:] in ("", "/") else resource == named


def amount_of(kind: LimitKind, asked: Mapping[str, int]) -> int:
    """Return what a job asks for of a limit's resource."""
    amount = asked.get(kind.resource, 0)
    if kind.per == "PN":
        # nodes may differ; SLURM's own share of each is not known before the start
        amount = -(-amount // max(1, asked.get("node", 1)))
    return amount * asked.get(WALL, 0) if kind.time else amount


def asked_of(job: Mapping[str, str]) -> dict[str, int]:
    """Return what a job asks for, by resource, from `scontrol show job`.

    Args:
        job: its fields; `TRES` until 23.02, later `ReqTRES`.
    """
    asked = {JOBS: 1, SUBMITTED: 1}
    for part in job.get("ReqTRES", job.get("TRES", "")).split(","):
        resource, _, text = part.partition("=")
        if (amount := _VALUE.fullmatch(text)) is not None:
            asked[resource] = _value(resource, amount)
    seconds = commands.parse_time_left(job.get("TimeLimit", ""))
    return asked if seconds is None else asked | {WALL: seconds // 60}
