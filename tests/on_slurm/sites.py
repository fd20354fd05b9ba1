"""What sites do differently with one SLURM: their configuration files."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

ETC = Path(__file__).parent / "etc"
HIERARCHIES = ("freezer", "memory")
"""Of cgroups version 1: those that SLURM uses here."""


@dataclass(frozen=True)
class Site:
    """How a cluster is set up. All but the cgroups, which nodes read when they start, can change while it runs."""

    accounting: bool = True
    cgroups: bool = False
    """SLURM finds a step's processes by their cgroup, signals only those that it has started itself, and enforces
    memory limits."""
    step_manager: bool = False
    """The first node of a job, instead of the controller, starts its steps (24.05 and later)."""
    submit_script: str = ""
    """A job_submit plugin, by its name in etc/: it sees each job before it is queued."""
    lines: tuple[str, ...] = ()
    """More lines of slurm.conf."""

    def slurm_conf(self) -> str:
        lines = ["AccountingStorageType=accounting_storage/none"]
        if self.accounting:
            lines = ["AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=ctl"]
            lines += ["AccountingStoreFlags=job_comment"]
        lines += ["ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup"] if self.cgroups else NO_CGROUPS
        if self.step_manager:
            lines += ["SlurmctldParameters=enable_stepmgr", "PrologFlags=Contain"]
        if self.submit_script:
            lines += ["JobSubmitPlugins=lua"]
        return "".join(f"{line}\n" for line in (*lines, *self.lines))

    def write(self, etc: Path) -> None:
        (etc / "site.conf").write_text(self.slurm_conf())
        if self.submit_script:
            shutil.copyfile(ETC / f"{self.submit_script}.lua", etc / "job_submit.lua")


NO_CGROUPS = ["ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none"]
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n"


def has_cgroups() -> bool:
    """Whether SLURM can use cgroups here. Version 2 alone would do on other machines, but where there is version 1 as
    well, its plugin for version 2 ends ("Hybrid mode is not supported")."""
    return all(os.access(f"/sys/fs/cgroup/{name}", os.W_OK) for name in HIERARCHIES)


SITES = {"22.05": Site(), "24.11": Site(cgroups=has_cgroups(), step_manager=True)}
"""How the cluster of each release is set up unless a test asks for something else."""
