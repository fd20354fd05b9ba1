"""Rounds of processes that a job starts itself: pools, executors, terminated and daemon children, with each start
method of multiprocessing, in a job function and in a script that attaches."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from tests import children
from tests.chaos.training import send
from tests.support import Project, make_project, processes_of

LONGEST_WAIT = 120.0
"""Seconds that one child may take, before it counts as one that does not end."""


@dataclass
class Way:
    """What came of the rounds of one way to run them."""

    name: str
    rounds: int
    problem: str = ""

    @property
    def line(self) -> str:
        return f"children  {self.name}: {self.rounds} rounds: {self.problem or 'all ended'}"


def run(count: int, folder: Path) -> list[Way]:
    """Do those rounds that are not written down in the folder, and return what came of all."""
    ways = {"function": ["children.py", f"rounds={count}"], "script": ["--", "python", "children.py", f"{count}"]}
    return [_known(folder / f"children-{name}-{count}.json") or _done(folder, name, count, ways[name]) for name in ways]


def _known(file: Path) -> Way | None:
    return Way(**json.loads(file.read_text())) if file.exists() else None


def _done(folder: Path, name: str, count: int, words: list[str]) -> Way:
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    project = make_project(base)
    project.write("children.py", Path(children.__file__).read_text())
    way = Way(name, count, _watched(project, project.submit(*words)))
    if way.problem:
        way.problem += f"; see {base}"
    else:
        shutil.rmtree(base)
    (folder / f"children-{name}-{count}.json").write_text(json.dumps(asdict(way)) + "\n")
    return way


def _watched(project: Project, run: Path) -> str:
    """Wait for the end of the run; what is wrong with it."""
    at, since = "", time.monotonic()
    while states.is_alive(records.read_state(RunFolder(run)).state):
        record = run / "children-0"
        now = record.read_text() if record.exists() else ""
        if now != at:
            at, since = now, time.monotonic()
        if time.monotonic() - since > LONGEST_WAIT:
            send(processes_of(run), signal.SIGKILL)
            return f"no child has ended for {LONGEST_WAIT:g} s: {at}"
        time.sleep(0.5)
    facts = project.finish(run)
    left = processes_of(run)
    if facts["state"] != states.COMPLETED or left:
        return f"{facts['state']} {facts['reason']} {at}; processes that are left: {left}"
    return ""
