"""The state folder of a cluster: what `init.py` and SLURM's daemons read."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

from tests.on_slurm import packages
from tests.on_slurm.machine import INSIDE, NODES
from tests.on_slurm.sites import CGROUP_CONF, ETC, HIERARCHIES, Site

ADDRESSES = {"ctl": "10.77.0.1"} | {node: f"10.77.0.1{number}" for number, node in enumerate(NODES, 1)}
LARGE_NODE = "NodeName={name} NodeAddr={address} CPUs=8 RealMemory=16000\n"
USERS = {"student": 20001, "colleague": 20003}  # ordinary ones, both in the group lab
LAB = 20002


def write_state(
    folder: Path, prepared: Path, release: str, site: Site, opened: list[str], large_nodes: int = 0
) -> None:
    large = {f"n{number}": f"10.77.0.{100 + number}" for number in range(len(NODES) + 1, len(NODES) + 1 + large_nodes)}
    addresses = ADDRESSES | large
    for name in ("bin", "etc", "home", "log"):
        (folder / name).mkdir()
    for source in ETC.glob("*.conf"):
        shutil.copyfile(source, folder / "etc" / source.name)
    (folder / "etc/slurmdbd.conf").chmod(0o600)  # slurmdbd insists
    cgroup = CGROUP_CONF if site.cgroups else packages.RELEASES[release].no_cgroups
    (folder / "etc/cgroup.conf").write_text(cgroup)
    site.write(folder / "etc")
    nodes = "".join(LARGE_NODE.format(name=name, address=address) for name, address in large.items())
    # SLURM's commands complain of an empty file
    (folder / "etc/large_nodes.conf").write_text(f"# {len(large)} nodes\n{nodes}")
    write_users(folder)
    hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{hosts}")
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    setup = {
        "slurm": release,
        "layers": packages.layers(prepared, release),
        "database": str(prepared / "database"),
        "addresses": addresses,
        "cgroups": HIERARCHIES if site.cgroups else [],
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
