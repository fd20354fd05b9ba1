"""One round: a training, what comes over it, and what is wrong in the end. All of it follows from the round's seed."""

from __future__ import annotations

import math
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

from mgpu_slurm.run_folder import records
from tests.chaos import checks
from tests.chaos.checks import Result
from tests.chaos.faults import FAULTS, Fault, somewhere, told
from tests.chaos.training import Over, Training, send
from tests.support import Project, make_project

PAIRS_EVERY = 4
"""Rounds, of which one has two faults at once."""

MOST_TRIES = 3
"""Of a round whose faults do not hit."""

MOST_STRIKES = 3
"""Of one fault that is hidden by another."""

TOLD_WITHIN = 1.0
"""Seconds in which the record tells of a fault, at the latest after the end of an attempt."""


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
    """Whether all faults came in time."""
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
    """A sweep has its own way with time limits; tests/on_slurm/test_sweeps.py and tests/end_to_end/test_sweeps.py."""
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


def run_until_hit(
    site: Site, kind: type[Training], faults: Sequence[Fault], seed: str, expected: dict[str, Result]
) -> Round:
    """Return a round in which every fault has hit: one that a training was too quick for says nothing."""
    for again in range(MOST_TRIES):
        done = run(site, kind, faults, f"{seed}.{again}" if again else seed, expected)
        if done.hit or done.problems:
            return done
    done.problems.append(f"in {MOST_TRIES} tries not all of its faults have hit")
    return done


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
        begin(training, faults, site.pace * len(faults), random.Random(seed), stack)
        strikes = Strikes(faults, training, seed)
        strikes.start()
        try:
            facts = training.finish(site.seconds, lambda: site.look_after(training))
            strikes.join()
            done.problems += checks.problems(training, facts, expected, strikes.hit)
            done.attempts = facts["attempts"]
        except (AssertionError, TimeoutError) as error:
            done.problems.append(str(error))
        done.problems += strikes.problems
        record = record_of(training)
        if training.resumed and not any(fault.by_hand for fault in strikes.hit):
            done.problems.append(f"it was resumed by hand {training.resumed} times: {record}")
        for fault in strikes.hit:
            if not told(fault, record):
                done.problems.append(f"its record does not tell of {fault.name!r}: {record}")
        done.hit = set(strikes.hit) == set(faults)
    done.resumed, done.seconds = training.resumed, round(time.monotonic() - began, 1)
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


class Strikes(threading.Thread):
    """All faults of a round at once, and again those that another one has hidden or come before.

    A rank that hangs next to one that is killed ends with it, and nobody hears that it hung. So what the record does
    not tell of strikes once more, while the training recovers from the other; and so does what found no process any
    more, as the other had ended them all.
    """

    def __init__(self, faults: Sequence[Fault], training: Training, seed: str) -> None:
        super().__init__(name="strikes", daemon=True)
        self.hit: list[Fault] = []
        self._missed: list[Fault] = []
        """What found nothing to hit in this turn."""
        self._ended_before: dict[Fault, int] = {}
        """Attempts that had ended when a fault struck last."""
        self.problems: list[str] = []
        self._faults = faults
        self._training = training
        self._seed = seed

    def run(self) -> None:
        to_strike = list(self._faults)
        for turn in range(MOST_STRIKES):
            at = somewhere(random.Random(f"{self._seed} strike"))
            self._missed = []
            striking = [threading.Thread(target=self._strike, args=(fault, at, turn)) for fault in to_strike]
            for thread in striking:
                thread.start()
            for thread in striking:
                thread.join()
            hidden = [fault for fault in to_strike if fault in self.hit and self._is_hidden(fault)]
            to_strike = [*self._missed, *(fault for fault in hidden if fault not in self._missed)]

    def _is_hidden(self, fault: Fault) -> bool:
        """Wait until the record tells of a fault, or cannot any more; return whether it does not, and may yet."""
        ended = self._ended_before[fault]
        give_up = time.monotonic() + (math.inf if fault.ends_attempt else TOLD_WITHIN)
        try:
            self._training.until(lambda: self._is_told(fault) or self._ended() > ended or time.monotonic() >= give_up)
        except (Over, AssertionError):
            return False
        # the logs of an attempt that has ended are whole in a moment
        time.sleep(TOLD_WITHIN)
        return not self._is_told(fault)

    def _ended(self) -> int:
        return sum(event.event == "ended" for event in records.events(self._training.worker))

    def _strike(self, fault: Fault, at: int, turn: int) -> None:
        try:
            draw = random.Random(f"{self._seed} {fault.name}{turn or ''}")
            if fault.strike(self._training, at, draw):
                # not before: it may have waited for its step in a later attempt
                self._ended_before[fault] = self._ended()
                if fault not in self.hit:
                    self.hit.append(fault)
            else:
                self._missed.append(fault)
        except Over:
            pass
        except Exception as error:
            self.problems.append(f"{fault.name}: {type(error).__name__}: {error}")

    def _is_told(self, fault: Fault) -> bool:
        return told(fault, logs_of(self._training))


def record_of(training: Training) -> str:
    """Return what there is to read of a training: `why`, the logs of its ranks, and the history of its parts."""
    # of a sweep, only the worker's tells of attempts
    why = [training.project.call("why", name) for name in {training.path.name, training.worker.run}]
    return "\n".join([*(each.stdout + each.stderr for each in why), logs_of(training)])


def logs_of(training: Training) -> str:
    """Return what can be read at any time: a training that may go on has no cause of a failure yet."""
    folders = [training.worker, *(part.folder for part in training.parts().values())]
    files = [file for folder in folders for file in (*folder.logs.glob("*.log"), folder.attempts) if file.exists()]
    return "\n".join(file.read_text(errors="replace") for file in files)
