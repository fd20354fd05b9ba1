"""Some rounds of `make chaos` on this machine, and that its checks find what they are there for."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.checkpoint_names import complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from tests.chaos import checks, faults, rounds
from tests.chaos.checks import Result
from tests.chaos.rounds import Here
from tests.chaos.training import LAYOUTS, Training
from tests.on_slurm.cluster import PREPARED
from tests.support import make_project, require, wait_until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """One that nothing came over."""
    training = Training(make_project(tmp_path_factory.mktemp("undisturbed")))
    training.start(pace=0.0)
    training.finish(Here.seconds)
    return training


@pytest.fixture(scope="module")
def expected(trained: Training) -> dict[str, Result]:
    return checks.results(trained)


NEEDS_ROOT = ("connections break", "the disk is full")
NEEDS_PACKAGES = ("the clock jumps",)


class Written:
    """What a training writes down, without one."""

    def __init__(self, path: Path) -> None:
        self.worker = RunFolder(path)
        self.worker.create()

    def parts(self) -> dict[str, Any]:
        return {}

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition)


@pytest.mark.parametrize(("hit_at", "turns", "problems"), [(0, 1, 0), (2, 3, 0), (9, 3, 1)])
def test_round_that_hit_nothing_is_repeated_and_fails_after_three_tries(
    hit_at: int, turns: int, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[str] = []

    def run(site: Any, kind: Any, faults: Any, seed: str, expected: Any) -> rounds.Round:
        seeds.append(seed)
        return rounds.Round(["one"], seed, "here", "training", hit=len(seeds) > hit_at)

    monkeypatch.setattr(rounds, "run", run)
    done = rounds.run_until_hit(Here(), Training, [], "5", {})
    assert (len(set(seeds)), seeds[0], len(done.problems)) == (turns, "5", problems)


def test_later_fault_is_not_hidden_by_the_end_of_the_previous_attempt(tmp_path: Path) -> None:
    """A rank that hangs has not said so yet when the other one would be stopped, too, and nobody is left to say it."""
    struck = []

    def kills(training: Any, at: int, draw: random.Random) -> bool:
        records.record_event(training.worker, "ended", attempt=1)
        return True

    def hangs(training: Any, at: int, draw: random.Random) -> bool:
        training.until(lambda: len(records.events(training.worker)) == 1)
        struck.append(at)
        says = training.worker.logs / "rank-0.log"
        threading.Timer(3 * rounds.TOLD_WITHIN, says.write_text, ["no progress"]).start()
        return True

    both = [faults.Fault("kills", kills, "ended"), faults.Fault("hangs", hangs, "no progress")]
    strikes = rounds.Strikes(both, Written(tmp_path / "run"), "seed")  # type: ignore[arg-type]
    strikes.start()
    strikes.join()
    assert (len(struck), strikes.hit, strikes.problems) == (1, both, [])


def test_fault_without_a_target_strikes_again(tmp_path: Path) -> None:
    """The batch step was killed, and its ranks with it, before one of them could be killed."""
    struck = []

    def finds_one_later(training: Any, at: int, draw: random.Random) -> bool:
        struck.append(at)
        return len(struck) == 2

    fault = faults.Fault("kills", finds_one_later, "")
    strikes = rounds.Strikes([fault], Written(tmp_path / "run"), "seed")  # type: ignore[arg-type]
    strikes.start()
    strikes.join()
    assert (len(struck), strikes.hit, strikes.problems) == (2, [fault], [])


@pytest.mark.parametrize(
    "names",
    [
        ("all processes are killed", "connections break"),
        pytest.param(("the clock jumps",), marks=pytest.mark.long),
        ("the newest checkpoint is damaged", "the disk is full"),
        ("a rank is killed", "a rank hangs"),
    ],
    ids=" and ".join,
)
def test_training_with_faults_ends_like_an_undisturbed_one(names: tuple[str, ...], expected: dict[str, Result]) -> None:
    if os.geteuid() != 0 and set(names) & {*NEEDS_ROOT}:
        require("this round needs root")
    if not (PREPARED / "ready").exists() and set(names) & {*NEEDS_PACKAGES}:
        require("this round needs make cluster-deps")
    chosen = [fault for fault in faults.FAULTS if fault.name in names]
    done = rounds.run(Here(), Training, chosen, "a short selection", expected)
    assert (done.hit, done.problems) == (True, [])


@pytest.mark.parametrize("layout", ["fsdp", "tensor", "pipeline", "pipeline-fsdp"])
@pytest.mark.long
def test_training_under_any_layout_with_faults_ends_like_an_undisturbed_one(layout: str, tmp_path: Path) -> None:
    kind = LAYOUTS[layout]
    expected = rounds.undisturbed(kind, tmp_path)
    (fault,) = [fault for fault in faults.FAULTS if fault.name == "a rank is killed"]
    done = rounds.run(Here(), kind, [fault], "under a layout", expected)
    assert (done.hit, done.problems) == (True, [])


# -- the checks


def other_weights(training: Training) -> None:
    final = training.path / "final-0.pt"
    content = bytearray(final.read_bytes())
    content[len(content) // 2] ^= 1
    final.write_bytes(content)


def a_sample_twice(training: Training) -> None:
    """In the last step of rank 1."""
    (file,) = training.ledger.glob("*/1-1.jsonl")
    *lines, last = file.read_text().splitlines()
    file.write_text("\n".join([*lines, last.replace("[", "[0, ")]) + "\n")


def a_point_of_another_value(training: Training) -> None:
    file = training.submitted.metrics
    file.write_text(re.sub(r'"loss": [^,}]+', '"loss": 0.2', file.read_text(), count=1))


def a_damaged_checkpoint(training: Training) -> None:
    next(complete_checkpoints(training.submitted)[-1].glob("*.safetensors")).write_bytes(b"")


def a_part_of_a_checkpoint(training: Training) -> None:
    (training.submitted.checkpoints / ".step-000000090.of-1-1").mkdir()


def another_best(training: Training) -> None:
    """The link leads to the newest one instead."""
    link = training.submitted.checkpoints / "best"
    others = [path for path in complete_checkpoints(training.submitted) if path != link.resolve()]
    link.unlink()
    link.symlink_to(others[0].name)


def an_attempt_without_an_end(training: Training) -> None:
    file = training.submitted.attempts
    file.write_text(file.read_text().splitlines()[0] + "\n")


def an_attempt_that_began_anew(training: Training) -> None:
    for rank in (0, 1):
        (file,) = training.ledger.glob(f"*/1-{rank}.jsonl")
        shutil.copy(file, file.with_name(f"2-{rank}.jsonl"))


def test_training_that_was_not_resumed_is_detected(trained: Training, expected: dict[str, Result]) -> None:
    found = checks.problems(trained, trained.facts, expected, faults.FAULTS[:1])
    assert found == ["nothing shows that it was resumed from a checkpoint"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (an_attempt_that_began_anew, "attempt 2 began after step 0, and the one before it had come to step 84"),
        (other_weights, "the final weights are others"),
        (a_sample_twice, "other samples in steps [84]"),
        (a_sample_twice, "epoch 12 has not seen each sample once"),
        (a_point_of_another_value, "the curves are others"),
        (a_damaged_checkpoint, "safetensors is damaged"),
        (another_best, "the best checkpoint is"),
        (a_part_of_a_checkpoint, "parts of checkpoints are left"),
        (an_attempt_without_an_end, "of attempts [1] [] have ended"),
    ],
)
def test_each_kind_of_damage_is_detected(
    change: Callable[[Training], None], said: str, trained: Training, expected: dict[str, Result], put_back: None
) -> None:
    facts = trained.facts
    assert checks.problems(trained, facts, expected) == []
    change(trained)
    assert any(said in problem for problem in checks.problems(trained, facts, expected))


@pytest.fixture
def put_back(trained: Training, tmp_path: Path) -> Iterator[None]:
    """The training as it was, after a test."""
    kept = shutil.copytree(trained.project.folder, tmp_path / "kept", symlinks=True)
    yield
    shutil.rmtree(trained.project.folder)
    shutil.copytree(kept, trained.project.folder, symlinks=True)


def test_leftover_process_is_detected(
    trained: Training, expected: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "PATIENCE", 0.1)
    with subprocess.Popen(["sleep", "60"], env=os.environ | {"MGPU_RUN_FOLDER": str(trained.path)}) as process:
        found = checks.problems(trained, trained.facts, expected)
        process.kill()
    assert any("processes are left" in problem for problem in found)


def test_duplicate_tensorboard_point_is_detected(
    trained: Training, expected: dict[str, Result], put_back: None
) -> None:
    """As if a writer had gone back to an earlier step without recording it."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(trained.submitted.tensorboard)) as writer:
        writer.add_scalar("loss", 0.5, 84)
    assert any("TensorBoard shows loss" in each for each in checks.problems(trained, trained.facts, expected))
