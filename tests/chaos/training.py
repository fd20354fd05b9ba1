"""The training that faults are tried on, as one sees it from outside, and what can be done to its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.api import Handle
from mgpu_slurm.core import processes
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from tests import dying
from tests.chaos import job
from tests.support import Project, processes_of, wait_until

RANKS = 2

MOST_RESUMES = 4


class Over(Exception):
    """The training completed before the fault came to it."""


@dataclass(frozen=True)
class Trained:
    """What one run of `job` has left."""

    path: Path
    ledger: Path
    """What its ranks have written down."""
    world_size: int = RANKS

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    def attempts(self) -> list[int]:
        """Those in which rank 0 has begun to train."""
        return sorted(int(path.name.partition("-")[0]) for path in self.ledger.glob("*-0.jsonl"))

    def seen(self, attempt: int, rank: int) -> list[dict[str, Any]]:
        """What a rank has written down; its first line is of the rank itself."""
        path = self.ledger / f"{attempt}-{rank}.jsonl"
        # what a killed rank has begun to write is no line
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def starts(self) -> dict[int, int]:
        """Return the step after which each attempt but the first has begun."""
        return {attempt: self.seen(attempt, 0)[0]["start"] for attempt in self.attempts()[1:] if self.seen(attempt, 0)}

    def steps(self) -> int:
        """How far the newest attempt has come."""
        lines = [line for attempt in self.attempts()[-1:] for line in self.seen(attempt, 0)[1:]]
        return int(lines[-1]["step"]) if lines else 0


class Training:
    """One run of `job`, while it goes on."""

    what = "training"
    world_size = RANKS
    options: Sequence[str] = ()
    """Of the submission."""
    layout = ""
    """As the job's config has it."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.ledger = project.folder / "ledger"
        self.ledger.mkdir()
        project.write("train.py", Path(job.__file__).read_text())
        project.write("dying.py", Path(dying.__file__).read_text())
        # the last bits of the weights depend on it
        project.environ["OMP_NUM_THREADS"] = "1"
        self.path = self.project.runs / "not there yet"
        self.resumed = 0
        """How often a person had to say so."""

    def start(self, words: Sequence[str] = (), **config: Any) -> None:
        values = [
            f"{name}={value}" for name, value in ({"ledger": self.ledger, "layout": self.layout} | config).items()
        ]
        words = ("--nodes", str(self.world_size), "--gpus-per-node", "0", *self.options, *words)
        self.path = self.project.submit("train", *words, *values)

    # -- seeing

    @property
    def submitted(self) -> RunFolder:
        """Of what was submitted."""
        return RunFolder(self.path)

    @property
    def worker(self) -> RunFolder:
        """Of what has the processes."""
        return self.submitted

    def parts(self) -> dict[str, Trained]:
        """What it is to leave, by names that are the same each time."""
        return {"": self.current()}

    def current(self) -> Trained:
        """What trains now, or has last."""
        return Trained(self.path, self.ledger / self.path.name, self.world_size)

    @property
    def facts(self) -> dict[str, Any]:
        """What `status` shows."""
        return Handle(self.submitted).facts

    def has_resumed(self, facts: dict[str, Any]) -> bool:
        """Return whether an attempt has begun at a checkpoint."""
        return any(start > 0 for start in self.current().starts().values())

    def step(self) -> int:
        """How far it has come."""
        return self.current().steps()

    def until(self, condition: Callable[[], bool]) -> None:
        """
        Raises:
            Over: the training completed before.
        """
        looks = 0

        def is_so() -> bool:
            nonlocal looks
            looks += 1
            if condition():
                return True
            # asked less often: on a cluster SLURM answers it
            if looks % 50 == 0 and self.facts["state"] == states.COMPLETED:
                raise Over
            return False

        wait_until(is_so, seconds=120)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step)

    def finish(self, seconds: float, look_after: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Sees it to its end, and resumes what needs a person for that; how it ended.

        Args:
            look_after: is called now and then meanwhile.

        Raises:
            TimeoutError: it has not ended by then.
        """
        give_up = time.monotonic() + seconds
        refused = ""
        while time.monotonic() < give_up:
            facts = self.facts
            if not states.is_alive(facts["state"]):
                if facts["state"] == states.COMPLETED or self.resumed == MOST_RESUMES:
                    return facts
                done = self.project.call("resume", self.path.name)
                # another fault may be at work, such as a full disk
                refused = done.stderr
                self.resumed += done.returncode == 0
            look_after()
            time.sleep(0.1)
        facts = self.facts
        waiting = self.show_stacks()
        raise TimeoutError(f"after {seconds:g} s it still is {facts} {refused}; where its processes wait: {waiting}")

    def show_stacks(self) -> list[str]:
        """Ends ranks and their loaders' workers in a way in which each writes its stack into its rank's log; returns
        where in the kernel each thread has waited, such as in `__refrigerator` of a frozen cgroup."""
        below = processes.children()
        found: list[str] = []
        for rank in self.ranks().values():
            for pid in (*below.get(rank, []), rank):
                with suppress(OSError):
                    threads = sorted(Path(f"/proc/{pid}/task").iterdir())
                    found.append(f"{pid}: {' '.join((each / 'wchan').read_text() for each in threads)}")
                    os.kill(pid, signal.SIGABRT)
        return found

    # -- its processes, by their numbers on this machine

    def processes(self) -> list[int]:
        """Also those that were told of it only by their words, as the batch step."""
        path = str(self.submitted.path)
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        named = [pid for pid in pids if any(word.startswith(path) for word in words_of(pid))]
        return sorted({*processes_of(self.submitted.path), *processes_of(self.worker.path), *named})

    def ranks(self) -> dict[int, int]:
        """The living processes of the newest attempt's ranks; the job knows itself by its number inside of its node."""
        current = self.current()
        first = [(rank, lines[0]) for attempt in current.attempts()[-1:] for rank in range(self.world_size)
                 if (lines := current.seen(attempt, rank))]  # fmt: skip
        outside = {_number_inside(pid): pid for pid in self.processes()} if first else {}
        return {rank: outside[line["pid"]] for rank, line in first if line["pid"] in outside}

    def rank(self, rank: int) -> int:
        """Waits until it lives."""
        found: dict[int, int] = {}

        def is_there() -> bool:
            found.update(self.ranks())
            return rank in found

        self.until(is_there)
        return found[rank]


def _under(what: str, options: str, world_size: int = RANKS, layout: str = "") -> type[Training]:
    """
    Args:
        layout: `tensor` or `pipeline` if several ranks work on the same batch.
    """
    values = {"what": what, "options": options.split(), "world_size": world_size, "layout": layout}
    return type(what, (Training,), values)


LAYOUTS: dict[str, type[Training]] = {
    kind.what: kind
    for kind in (
        _under("fsdp", "--strategy fsdp"),
        _under("tensor", "--tensor 2", layout="tensor"),
        _under("pipeline", "--pipeline 2", layout="pipeline"),
        _under("zero2", "--strategy zero2"),
        _under("hsdp", "--strategy hsdp --shard 2", world_size=4),
        _under("fsdp-tensor", "--strategy fsdp --tensor 2", world_size=4, layout="tensor"),
        _under("pipeline-ddp", "--pipeline 2", world_size=4, layout="pipeline"),
        _under("pipeline-fsdp", "--strategy fsdp --pipeline 2", world_size=4, layout="pipeline"),
    )
}
"""Trainings whose ranks share the model in another way than by copies."""


def send(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        # it may have ended meanwhile
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def words_of(pid: int) -> list[str]:
    """Of its command."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:  # it has ended
        return []


def _number_inside(pid: int) -> int:
    try:
        match = re.search(r"^NSpid:.*?(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else pid
