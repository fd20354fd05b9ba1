"""The resources requested from the cluster, and their names in files and calls, which are sbatch's."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.time_limit import parse_time

Flags: TypeAlias = dict[str, object]
"""Resources as a user has named them, by sbatch's long names (`gpus-per-node`); `resources_from` checks them."""


@dataclass(frozen=True)
class Resources:
    """The resources requested from the cluster, named as in sbatch; None is not sent to SLURM."""

    nodes: int = 1
    ntasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    """As typed, in sbatch's format."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    sbatch: dict[str, str] = field(default_factory=dict)
    """Other options of sbatch by their long names; an empty value is a flag without one."""
    gpu_type: str | None = None
    """The type of the GPUs, as the site names it, such as `a100` or `1g.5gb`, a part of one; None for any."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("ntasks_per_node", 1), ("gpus_per_node", 0), ("cpus_per_task", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {value}: expected a whole number of at least {least}")
        if self.time is not None:
            parse_time(self.time)

    @property
    def time_limit(self) -> int | None:
        """Seconds, or None if no limit was requested."""
        return None if self.time is None else parse_time(self.time)

    @property
    def ranks_per_node(self) -> int:
        """One rank per GPU by default; one without GPUs."""
        return self.ntasks_per_node or self.gpus_per_node or 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def gpus(self) -> int:
        """GPUs of all nodes together; 0 if none were requested."""
        return self.nodes * (self.gpus_per_node or 0)

    @property
    def gpus_as_requested(self) -> str:
        """GPUs per node as sbatch takes them: `2` or `a100:2`."""
        return f"{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else str(self.gpus_per_node)

    def value_of(self, flag: str) -> Any:
        """Return the value of one of `RESOURCE_FLAGS`, as a user may write it."""
        name = flag.replace("-", "_")
        return self.gpus_as_requested if name == "gpus_per_node" and self.gpu_type else getattr(self, name)


RESOURCE_FLAGS = tuple(f.name for f in dataclasses.fields(Resources) if f.name not in ("sbatch", "gpu_type"))


_GPUS = re.compile(r"(?:(?P<type>[A-Za-z0-9][\w.+-]*):)?(?P<count>-?[0-9]{1,9})")


def resources_from(flags: Flags, what: str) -> Resources:
    """Return resources from their names in a YAML file or a call.

    Raises:
        UserError: names the first unknown flag or wrong value.
    """
    values: Config = {}
    for key, value in flags.items():
        name = key.replace("-", "_")
        if name not in RESOURCE_FLAGS and name != "sbatch":
            known = [flag.replace("_", "-") for flag in RESOURCE_FLAGS]
            raise UserError(f"{what}: unknown flag {key!r}{nearest(key, known)}")
        values[name] = str(value) if name in ("time", "mem") and value is not None else value
    if isinstance(gpus := values.get("gpus_per_node"), str):
        match = _GPUS.fullmatch(gpus)
        if match is None:
            raise UserError(f"--gpus-per-node {gpus}: expected a number, or a type with one as in a100:2")
        values |= {"gpu_type": match["type"], "gpus_per_node": int(match["count"])}
    return configs.fill(Resources, values, what)


def sbatch_pairs(items: tuple[str, ...]) -> dict[str, str]:
    """Return `--sbatch KEY=VALUE` options as a mapping; `KEY` alone is a flag without a value."""
    pairs: dict[str, str] = {}
    for item in items:
        key, _, value = item.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise UserError(
                f"--sbatch {item!r}: expected KEY=VALUE with a long option of sbatch, for example mail-type=END"
            )
        own = {name.replace("_", "-") for name in RESOURCE_FLAGS}
        if key in own:
            raise UserError(f"--sbatch {item!r}: write --{key} {value} instead")
        pairs[key] = value
    return pairs
