"""The cluster file, `mgpu.yaml`: a site's options and conventions, as data.

The project's file (in the working directory) wins over the user's (`~/.config/mgpu_slurm/mgpu.yaml`); clusters are
merged by name, key by key.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.core.formatting import parse_size
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.container import Container
from mgpu_slurm.request.parallelism import SHARDED, Parallelism, Precision, Strategy
from mgpu_slurm.request.resources import Flags, resources_from
from mgpu_slurm.request.spec import Readers
from mgpu_slurm.request.time_limit import parse_signal

FILE_NAME = "mgpu.yaml"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_FORM = re.compile(r"[a-z][a-z0-9-]*(=.*)?")


@dataclass(frozen=True)
class Cluster:
    """Settings of one cluster; the keys in the file are these names with dashes."""

    name: str | None = None
    """Its key in the file; None for the cluster of a machine without a file."""
    flags: Flags = field(default_factory=dict)
    """Defaults for resources, by sbatch's long names; `sbatch` holds any other option."""
    setup: tuple[str, ...] = ()
    """Shell lines that the batch script executes before the ranks start."""
    rename: dict[str, str | None] = field(default_factory=dict)
    """This site's form of a flag, `{}` being its value (`gpus-per-node: "gres=gpu:{}"`); None to leave it out."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    container: Container | None = None
    """The image that ranks run in, and how this site runs it; an image alone may be given as a text."""
    readable_by: Readers = "owner"
    signal: str = "USR2"
    """The signal before the time limit, optionally with a lead in seconds: `USR2@120`."""
    strategy: Strategy | None = None
    """The default of `--strategy`."""
    shard: int | None = None
    """The default of `--shard`."""
    tensor: int | None = None
    """The default of `--tensor`."""
    pipeline: int | None = None
    """The default of `--pipeline`."""
    precision: Precision | None = None
    """The default of `--precision`."""
    compile: bool | None = None
    """The default of `--compile`."""
    gpu_memory: int | None = None
    """Bytes of memory of each GPU, for `--fit`."""
    stage_to: str | None = None
    """A folder on each node's own disk for `--stage`, such as `/local/$USER`; by default, that of temporary files."""
    sinks: tuple[str, ...] = ()
    """The default of `--sink`."""
    max_requeues: int = 20
    kill_wait: int = 30
    """Seconds between SIGTERM and SIGKILL, locally and in an allocation."""
    snapshot_limit: int = 100_000_000
    """Maximum bytes of code in a snapshot."""

    def __post_init__(self) -> None:
        resources_from(self.flags, "flags")
        if self.shard is not None and self.parallelism.strategy not in SHARDED:
            raise UserError(f"shard {self.shard}: add a strategy that shards the model: {', '.join(SHARDED)}")
        parse_signal(self.signal, limit=sys.maxsize)
        for name, number in (("max-requeues", self.max_requeues), ("kill-wait", self.kill_wait)):
            if number < 0:
                raise UserError(f"{name} {number}: expected 0 or more")
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise UserError(f"environment {name!r}: expected the name of a variable, such as NCCL_DEBUG")
        for flag, form in self.rename.items():
            if not _OPTION.fullmatch(flag) or (form is not None and not _FORM.fullmatch(form)):
                raise UserError(
                    f"rename {flag}: {form!r}: expected options of sbatch without --, such as 'gres=gpu:{{}}'"
                )

    @property
    def parallelism(self) -> Parallelism:
        """Return the defaults for sharing a model over ranks."""
        return Parallelism(self.strategy, self.shard, self.tensor, self.pipeline, self.precision, self.compile)


@dataclass(frozen=True)
class ClusterFile:
    """The project's and the user's cluster file, merged."""

    job: str | None = None
    """The default target."""
    cluster: str | None = None
    """The default cluster."""
    clusters: dict[str, Cluster] = field(default_factory=dict)
    notify: str | None = None
    """The default of `--notify`."""

    def named(self, name: str | None) -> Cluster:
        """Return the cluster of this name; for None the file's default, the only one, or an empty one if there is none.

        Raises:
            UserError: unknown name, or several clusters and no choice.
        """
        chosen = name or self.cluster
        if chosen is not None:
            if chosen not in self.clusters:
                hint = nearest(chosen, list(self.clusters)) or f": there is no `clusters:` in {FILE_NAME}"
                raise UserError(f"unknown cluster {chosen!r}{hint}")
            return self.clusters[chosen]
        if len(self.clusters) > 1:
            known = ", ".join(self.clusters)
            raise UserError(f"several clusters ({known}): choose with --cluster, or with `cluster:` in {FILE_NAME}")
        return next(iter(self.clusters.values()), Cluster())


@dataclass(frozen=True)
class _Keys:
    """The top level of the file, clusters still as plain values."""

    job: str | None = None
    cluster: str | None = None
    notify: str | None = None
    clusters: dict[str, Config | None] = field(default_factory=dict)


def load(cwd: Path) -> ClusterFile:
    """Read the cluster files; return an empty `ClusterFile` if there are none.

    Raises:
        UserError: unknown key or wrong value, with the file; or the project's file belongs to another user.
    """
    merged: Config = {}
    project_file = cwd / FILE_NAME
    if project_file.exists():
        files.refuse_foreign_owner(project_file, "who could use it to run commands as you: use your own copy")
    for path in (user_file(), project_file):
        if path.exists():
            # each file is checked by itself, so that an error names the one to fix
            merged = configs.merge(merged, _plain(configs.read_yaml(path), str(path)))
    return _typed(merged, FILE_NAME)


def user_file() -> Path:
    """Return the path of this user's file for all projects, whether or not it exists."""
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "mgpu_slurm" / FILE_NAME


def _plain(values: Config, source: str) -> Config:
    """Check the file's values, and return them in the form that is merged."""
    keys = configs.fill(_Keys, values, source)
    plain = values | {"clusters": {name: _with_texts(cluster or {}) for name, cluster in keys.clusters.items()}}
    _typed(plain, source)
    return plain


def _with_texts(cluster: Config) -> Config:
    """Return the values with numbers as text, as SLURM and the environment need them; YAML parses them as numbers."""
    flags, environment = cluster.get("flags"), cluster.get("environment")
    changed = dict(cluster)
    if isinstance(flags, dict) and isinstance(flags.get("sbatch"), dict):
        changed["flags"] = flags | {"sbatch": _texts(flags["sbatch"])}
    if isinstance(environment, dict):
        changed["environment"] = _texts(environment)
    return changed


def _texts(values: Config) -> Config:
    return {key: str(value) if type(value) is int else value for key, value in values.items()}


def _typed(values: Config, source: str) -> ClusterFile:
    keys = configs.fill(_Keys, values, source)
    clusters = {
        name: _cluster(name, cluster or {}, f"{source}: cluster {name!r}") for name, cluster in keys.clusters.items()
    }
    return ClusterFile(keys.job, keys.cluster, clusters, keys.notify)


def _cluster(name: str, values: Config, what: str) -> Cluster:
    known = [field.name.replace("_", "-") for field in fields(Cluster) if field.name != "name"]
    for key in values:
        if key not in known:
            raise UserError(f"{what}: unknown key {key!r}{nearest(str(key), known)}")
    given: Config = {key.replace("-", "_"): value for key, value in values.items()}
    if isinstance(given.get("container"), str):
        given["container"] = {"image": given["container"]}
    for size in ("snapshot_limit", "gpu_memory"):
        if size in given:
            try:
                text = str(given[size])
                given[size] = parse_size(text)
                if size == "gpu_memory" and text.isdecimal() and int(text) < 1 << 20:
                    raise UserError(f"{text!r} has no unit: write {text}GiB")
            except UserError as error:
                raise UserError(f"{what}: {size.replace('_', '-')}: {error}") from None
    return configs.fill(Cluster, given | {"name": name}, what)
