"""Ordinary users of the cluster, who share nothing but the group lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.on_slurm.cluster import Cluster
from tests.on_slurm.state import USERS

NO_GPUS = ("--gpus-per-node", "0")


@dataclass(frozen=True)
class User:
    """An ordinary user on the login node, in a project folder at home."""

    cluster: Cluster
    name: str

    @property
    def folder(self) -> Path:
        """As this machine names it."""
        return self.cluster.folder / "home" / self.name / "project"

    def write(self, name: str, text: str) -> None:
        """Writes a file of the project; those of this machine's root are readable by all."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        path.chmod(0o644)

    def call(self, *words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        folder = self.cluster.home(self.name) / "project"
        command = (sys.executable, "-m", "mgpu_slurm", *words)
        # set for tests of a checkout that is not the one that is installed
        environ = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} | environ
        return self.cluster.run(*command, user=self.name, cwd=folder, env=environ, timeout=100)

    def submit(self, *words: str, **environ: str) -> str:
        done = self.call("submit", "--json", *NO_GPUS, *words, **environ)
        assert done.returncode == 0, done.stderr
        name: str = json.loads(done.stdout)["run"]
        return name

    def state(self, name: str | Path, **environ: str) -> str:
        done = self.call("status", "--json", name, **environ)
        assert done.returncode == 0, done.stderr
        state: str = json.loads(done.stdout)[0]["state"]
        return state


def make_user(cluster: Cluster, name: str) -> User:
    user = User(cluster, name)
    if not user.folder.exists():
        user.folder.mkdir()
        os.chown(user.folder, USERS[name], USERS[name])
    return user
