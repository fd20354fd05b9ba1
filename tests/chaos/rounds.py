"""One round: a training, what comes over it, and what is wrong in the end. All of it follows from the round's seed."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.chaos import checks
from tests.chaos.checks import Result
from tests.chaos.faults import FAULTS, Fault, somewhere, told
from tests.chaos.training import Over, Training, send
from tests.support import Project, make_project

PAIRS_EVERY = 4
"""Rounds, of which one has two faults at once."""


class Site(Protocol):
    """Where rounds are done."""

    name: str
    seconds: float
    """That a round may take."""
    pace: float
    """Seconds of a step, so that a training lasts longer than it takes to strike it."""
    faults: tuple[Fault, ...]

    def pair(self, draw: random.Random) -> tuple[Fault, ...]:
        """Two that can come at once."""

    def project(self, folder: Path) -> Project:
        """For a training."""

    def look_after(self, training: Training) -> None:
        """Does now and then what a person there would."""

    def tidy(self) -> None:
        """After a round."""


class Here:
    """This machine, with the local executor."""

    name = "local"
    seconds = 150.0
    pace = 0.03
    faults = FAULTS

    def pair(self, draw: random.Random) -> tuple[Fault, ...]:
        return tuple(draw.sample(self.faults, 2))

    def project(self, folder: Path) -> Project:
        return make_project(folder)

    def look_after(self, training: Training) -> None:
        pass

    def tidy(self) -> None:
        pass


@dataclass
class Round:
    """What was done, and what came of it."""

    faults: list[str]
    seed: str
    where: str = "local"
    what: str = "training"
    hit: bool = False
    """Whether a fault came in time."""
    attempts: int = 0
    resumed: int = 0
    """How often a person had to start it again."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        return " and ".join(self.faults)


def drawn(site: Site, turn: int, seed: str) -> tuple[Fault, ...]:
    """The faults of a site's round: each in its turn, and now and then two at once."""
    if turn % PAIRS_EVERY == PAIRS_EVERY - 1:
        return site.pair(random.Random(f"{seed} pair"))
    return (site.faults[(turn - turn // PAIRS_EVERY) % len(site.faults)],)


def fit_for_sweeps(faults: Sequence[Fault]) -> bool:
    """A sweep has its own way with time limits; tests/slurm/test_sweeps.py and tests/end_to_end/test_sweeps.py."""
    return not any("--time" in fault.words for fault in faults)


def undisturbed(kind: type[Training], folder: Path) -> dict[str, Result]:
    """What it comes to where nothing comes over it."""
    training = kind(make_project(folder))
    training.start(pace=0.0)
    facts = training.finish(Here.seconds)
    assert facts["state"] == "COMPLETED", facts
    results = checks.results(training)
    assert results
    assert all(result.weights and result.samples and result.curves and result.best for result in results.values())
    return results


def run(site: Site, kind: type[Training], faults: Sequence[Fault], seed: str, expected: dict[str, Result]) -> Round:
    """One round."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    done = Round([fault.name for fault in faults], seed, site.name, kind.what)
    began = time.monotonic()
    with ExitStack() as stack:
        stack.callback(site.tidy)
        training = kind(site.project(folder))
        # who is interrupted leaves none behind
        stack.callback(lambda: send(training.processes(), signal.SIGKILL))
        begin(training, faults, site.pace, random.Random(seed), stack)
        hit, done.problems = strike(faults, training, seed)
        try:
            facts = training.finish(site.seconds, lambda: site.look_after(training))
            has_cost = any(fault.costs_checkpoints for fault in faults)
            done.problems += checks.problems(training, facts, expected, has_cost)
            done.attempts = facts["attempts"]
        except (AssertionError, TimeoutError) as error:
            done.problems.append(str(error))
        record = record_of(training)
        if training.resumed and not any(fault.by_hand for fault in hit):
            done.problems.append(f"it was resumed by hand {training.resumed} times: {record}")
        if hit and not any(told(fault, record) for fault in hit):
            done.problems.append(f"its record does not tell of it: {record}")
    done.hit, done.resumed, done.seconds = bool(hit), training.resumed, round(time.monotonic() - began, 1)
    if done.problems:
        done.problems.append(f"see {folder}")
    else:
        shutil.rmtree(folder)
    return done


def begin(training: Training, faults: Sequence[Fault], pace: float, draw: random.Random, stack: ExitStack) -> None:
    """Starts it with what its faults want of it."""
    config: dict[str, Any] = {"workers": draw.choice([0, 0, 1]), "pace": pace}
    for fault in faults:
        training.project.environ |= stack.enter_context(fault.place(training.project.folder))
        config |= fault.config(draw)
    training.start([word for fault in faults for word in fault.words], **config)


def strike(faults: Sequence[Fault], training: Training, seed: str) -> tuple[list[Fault], list[str]]:
    """All of them at once; those that have hit something, and what went wrong with that."""
    hit: list[Fault] = []
    problems: list[str] = []
    at = somewhere(random.Random(f"{seed} strike"))

    def one(fault: Fault) -> None:
        try:
            if fault.strike(training, at, random.Random(f"{seed} {fault.name}")):
                hit.append(fault)
        except Over:
            pass
        except Exception as error:
            problems.append(f"{fault.name}: {type(error).__name__}: {error}")

    striking = [threading.Thread(target=one, args=(fault,)) for fault in faults]
    for thread in striking:
        thread.start()
    for thread in striking:
        thread.join()
    return hit, problems


def record_of(training: Training) -> str:
    """What there is to read of it: `why`, the logs of its ranks, and the history of its parts."""
    why = training.project.call("why", training.path.name)
    folders = [training.worker, *(part.folder for part in training.parts().values())]
    files = [file for folder in folders for file in (*folder.logs.glob("*.log"), folder.attempts) if file.exists()]
    return "\n".join([why.stdout, why.stderr, *(file.read_text(errors="replace") for file in files)])
