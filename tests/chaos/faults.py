"""What comes over a training on this machine. Each is the real thing: processes die, a disk is full.

A fault strikes at a step that was drawn for it, and says whether it has hit anything. What a run's record has to say of
it afterwards is a pattern for what `why` and the logs of its ranks tell.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.checkpoint_names import complete_checkpoints
from tests import dying
from tests.chaos.job import EPOCHS, STEPS_OF_EPOCH
from tests.chaos.training import RANKS, Training, send
from tests.on_slurm.cluster import PREPARED

Strike = Callable[[Training, int, random.Random], bool]


@dataclass(frozen=True)
class Fault:
    """One kind of them."""

    name: str
    strike: Strike
    """Waits for a step; whether it has hit something."""
    told: str
    """What the record says of it; empty where it need not leave a trace."""
    words: tuple[str, ...] = ()
    """Of the submission."""
    by_hand: bool = False
    """Whether somebody may have to resume what it has hit."""
    costs_checkpoints: bool = False
    """Whether one may not be written, which may be the best."""
    ends_attempt: bool = True
    """Whether the training has to start again after each hit."""
    config: Callable[[random.Random], Mapping[str, Any]] = lambda draw: {}
    """Of the job."""
    place: Callable[[Path], contextlib.AbstractContextManager[Mapping[str, str]]] = field(
        default=lambda folder: contextlib.nullcontext({})
    )
    """What the project's folder has to be; the variables that the submission gets for it."""


def somewhere(draw: random.Random) -> int:
    """Draw a step after which there is a checkpoint to resume from, and enough left to disturb."""
    return draw.randint(20, STEPS_OF_EPOCH * EPOCHS - 14)


# -- processes


def a_rank_dies(training: Training, at: int, draw: random.Random) -> bool:
    training.until_step(at)
    send([training.rank(draw.randrange(training.world_size))], signal.SIGKILL)
    return True


def any_process_dies(training: Training, at: int, draw: random.Random) -> bool:
    """Also of those that nobody thinks of: supervisor, batch step, loader workers; every second time from the first
    moment on, when there are no ranks yet."""
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0.0, 4.0))
    else:
        training.until_step(at)
    found = training.processes()
    send([draw.choice(found)] if found else [], signal.SIGKILL)
    return bool(found)


def the_power_fails(training: Training, at: int, draw: random.Random) -> bool:
    training.until_step(at)
    _kill_all(training)
    return True


def _kill_all(training: Training) -> None:
    while found := training.processes():
        send(found, signal.SIGKILL)


def a_rank_hangs(training: Training, at: int, draw: random.Random) -> bool:
    training.until_step(at)
    send([training.rank(draw.randrange(training.world_size))], signal.SIGSTOP)
    return True


def dies_in_a_save(training: Training, at: int, draw: random.Random) -> bool:
    """The job does it itself, at the right line."""
    training.until(lambda: any(training.ledger.glob("*/died")))
    return True


def phase_of_a_save(draw: random.Random) -> dict[str, Any]:
    phase = draw.choice(list(dying.PHASES))
    rank = 0 if phase in dying.OF_RANK_0 else draw.randrange(RANKS)
    return {"dies_in": phase, "dying_rank": rank, "dies_at": somewhere(draw)}


# -- who may end it


def it_is_cancelled(training: Training, at: int, draw: random.Random) -> bool:
    training.until_step(at)
    done = training.project.call("cancel", training.path.name)
    return "asked to" in done.stdout


def its_time_is_up(training: Training, at: int, draw: random.Random) -> bool:
    training.until(lambda: any(event.event == "requeued" for event in records.events(training.worker)))
    return True


# -- network, disk, clock


def connections_break(training: Training, at: int, draw: random.Random) -> bool:
    """All of one rank's, as by a switch that restarts."""
    training.until_step(at)
    pid = training.rank(draw.randrange(training.world_size))
    shown = subprocess.run([ss(), "-Htnp", "state", "established"], capture_output=True, text=True, check=True).stdout
    own = [line.split()[2:4] for line in shown.splitlines() if f"pid={pid}," in line]
    for here, there in own:
        subprocess.run([ss(), "-K", "src", here, "dst", there], capture_output=True, check=True)
    return bool(own)


def ss() -> str:
    """Of Debian's iproute2."""
    return shutil.which("ss") or str(PREPARED / "packages/usr/bin/ss")


def the_disk_fills(training: Training, at: int, draw: random.Random) -> bool:
    # early: what the job writes at its own end is not to fail
    training.until_step(draw.randint(1, 20))
    ballast = training.path.parent / "ballast"
    end = time.monotonic() + draw.uniform(0.5, 2.0)
    try:
        with open(ballast, "wb", buffering=0) as file:
            # takes also what others make room for
            while time.monotonic() < end:
                for size in (1 << 20, 1):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(size))
                time.sleep(0.001)
    finally:
        ballast.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[dict[str, str]]:
    """Of 24 MB, for the runs."""
    runs = folder / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", runs], check=True)
    try:
        yield {}
    finally:
        kept = folder / "kept"
        shutil.copytree(runs, kept, symlinks=True)
        subprocess.run(["umount", "--lazy", runs], check=True)


def the_clock_jumps(training: Training, at: int, draw: random.Random) -> bool:
    training.until_step(at)
    for _ in range(draw.randint(1, 2)):
        seconds = draw.choice([-86400, -3600, -60, 60, 3600, 86400])
        _set_clock(training.project.folder / "clock", seconds)
        time.sleep(draw.uniform(0.1, 0.5))
    # what is reported from now on is of another time
    training.until(lambda: any(_is_off(record["time"]) for record in read_jsonl(training.current().folder.metrics)))
    return True


def _is_off(at: str) -> bool:
    return abs(datetime.fromisoformat(at).timestamp() - time.time()) > 45


def _set_clock(file: Path, seconds: int) -> None:
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:+d}\n")
    os.replace(new, file)


SLEEP = "import select, time; time.sleep = lambda seconds: select.select([], [], [], max(0, seconds))"
"""Until a time of the monotonic clock, as Python sleeps, libfaketime 0.9.10 takes it for one of the day."""


@contextlib.contextmanager
def movable_clock(folder: Path) -> Iterator[dict[str, str]]:
    """For the run's processes: libfaketime reads from a file by how much the time of day is off. The monotonic clock
    does not jump, as it does not when a machine's time is set."""
    (library,) = PREPARED.glob("packages/usr/lib/*/faketime/libfaketime.so.1")
    _set_clock(folder / "clock", 0)
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text(SLEEP)
    yield {
        "PYTHONPATH": str(folder / "own"),
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


# -- what was kept


def the_newest_checkpoint_is_damaged(training: Training, at: int, draw: random.Random) -> bool:
    """While the training stands still, and then its ranks die."""
    training.until_step(at)
    ranks = training.ranks()
    send(ranks.values(), signal.SIGSTOP)
    run = training.current().folder
    found = complete_checkpoints(run)
    # what is whole already gets its name when the training goes on
    whole = [path for path in sorted(run.checkpoints.glob(".step-*")) if checkpoints.is_whole(path)]
    if whole:
        damage(draw.choice(sorted(whole[-1].glob("*.safetensors"))), draw)
    elif len(found) >= 2:
        damage(draw.choice(sorted(found[-1].glob("rank-*"))), draw)
    send(ranks.values(), signal.SIGKILL)
    return bool(whole or len(found) >= 2)


def damage(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    how = draw.choice(["a bit", "cut", "empty", "gone"])
    if how == "a bit":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[draw.randrange(len(content)) :]
    elif how == "empty":
        content.clear()
    file.unlink()
    if how != "gone":
        file.write_bytes(content)


FAULTS = (
    Fault("a rank is killed", a_rank_dies, "SIGKILL"),
    Fault("any process is killed", any_process_dies, "", by_hand=True, ends_attempt=False),
    Fault("all processes are killed", the_power_fails, "killed", by_hand=True),
    Fault("killed in a phase of a save", dies_in_a_save, "SIGKILL", config=phase_of_a_save),
    Fault("a rank hangs", a_rank_hangs, "stopped responding|no progress", words=("--stuck-after", "0.1")),
    Fault("cancelled", it_is_cancelled, "CANCELLED", by_hand=True),
    Fault(
        "its time is up",
        its_time_is_up,
        "it stopped before its time limit to be requeued|left before the time limit",
        words=("--time", "0:09", "--signal", "USR2@5"),
        config=lambda draw: {"pace": draw.uniform(0.08, 0.12)},
    ),
    Fault("connections break", connections_break, "[Cc]onnection|gloo"),
    Fault(
        "the disk is full",
        the_disk_fills,
        "could not write|are kept in memory",
        costs_checkpoints=True,
        ends_attempt=False,
        place=small_disk,
    ),
    Fault("the newest checkpoint is damaged", the_newest_checkpoint_is_damaged, "is damaged"),
    Fault("the clock jumps", the_clock_jumps, "", ends_attempt=False, place=movable_clock),
)


def told(fault: Fault, text: str) -> bool:
    return re.search(fault.told, text) is not None
