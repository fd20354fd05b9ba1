"""Every loader of a job continues where it was, and the position in the epoch with it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints import folder
from mgpu_slurm.checkpoints.rank_record import LoaderRecord
from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.data.loader_positions import LoaderPlace
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

EPOCHS, STEPS = 3, 4
AT_ONCE = 0

Seen = tuple[int, int, list[int], list[int], float]
"""Epoch, position in it, the samples of the loader that drives the loop and of another one, and the weight then."""


class Job:
    """What the loops below have in common."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.seed(3)
        self.model = run.wrap(nn.Linear(1, 1, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = self.loader(4 * STEPS, 4)

    def loader(self, samples: int, batch_size: int) -> Any:
        return self.run.loader(TensorDataset(torch.arange(samples)), batch_size=batch_size, shuffle=True)

    def restore(self) -> Any:
        return self.run.restore(model=self.model, optimizer=self.optimizer, data=self.data)

    def step(self, a: list[torch.Tensor], b: list[torch.Tensor]) -> Seen:
        self.run.backward(self.model(a[0].float().unsqueeze(1)).square().mean() * 1e-3, a)
        self.run.update(self.optimizer)
        (weight,) = self.model.parameters()
        return self.run._position.epoch or 0, self.data.batch, a[0].tolist(), b[0].tolist(), weight.item()


def zipped(job: Job) -> Iterator[Seen]:
    others = job.loader(22, 4)
    for _ in job.restore().epochs(EPOCHS):
        for a, b in zip(job.data, others, strict=False):
            yield job.step(a, b)


def zipped_the_other_way(job: Job) -> Iterator[Seen]:
    others = job.loader(22, 4)
    for _ in job.restore().epochs(EPOCHS):
        for b, a in zip(others, job.data, strict=False):
            yield job.step(a, b)


def of_equal_sizes(job: Job) -> Iterator[Seen]:
    """And with another one that does nothing, and one for evaluations that is made anew each time."""
    idle, others = job.loader(4 * STEPS, 4), job.loader(4 * STEPS, 4)
    for _ in job.restore().epochs(EPOCHS):
        for a, b in zip(job.data, others, strict=True):
            yield job.step(a, b)
        list(job.loader(4 * STEPS, 4))
    assert len(idle) == STEPS


def again_and_again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def a_shorter_one_again_and_again(job: Job) -> Iterator[Seen]:
    others = again_and_again(job.loader(9, 3))
    for _ in job.restore().epochs(EPOCHS):
        for a in job.data:
            yield job.step(a, next(others))


def zipped_with_a_shorter_one_again_and_again(job: Job) -> Iterator[Seen]:
    others = again_and_again(job.loader(9, 3))
    for _ in job.restore().epochs(EPOCHS):
        for b, a in zip(others, job.data, strict=False):
            yield job.step(a, b)


def made_in_each_epoch(job: Job) -> Iterator[Seen]:
    for _ in job.restore().epochs(EPOCHS):
        for a, b in zip(job.data, job.loader(22, 4), strict=False):
            yield job.step(a, b)
            list(job.loader(10, 5))


def two_of_equal_sizes_made_in_each_epoch(job: Job) -> Iterator[Seen]:
    for _ in job.restore().epochs(EPOCHS):
        for a, (b,), (c,) in zip(job.data, job.loader(22, 4), job.loader(22, 4), strict=False):
            yield job.step(a, [torch.cat([b, c])])


def made_in_each_pass_without_epochs(job: Job) -> Iterator[Seen]:
    job.restore()
    while job.run.step < EPOCHS * STEPS:
        others = job.loader(22, 4)
        for a, b in zip(job.data, others, strict=False):
            yield job.step(a, b)
        list(job.loader(22, 5))


def around_the_driver(job: Job) -> Iterator[Seen]:
    others = job.loader(EPOCHS * 2, 2)
    job.restore()
    for b in others:
        for a in job.data:
            yield job.step(a, b)


def evaluated_on_its_own_batches(job: Job) -> Iterator[Seen]:
    for _ in job.restore().epochs(EPOCHS):
        for a in job.data:
            seen = job.step(a, a)
            with torch.no_grad():
                assert len(list(job.data)) == STEPS
            yield seen


def run_check(job: Job) -> Iterator[Seen]:
    """In each pass, and one batch is still held in the middle of it."""
    job.restore()
    while job.run.step < EPOCHS * STEPS:
        held = iter(job.data)
        assert next(held)[0].shape == (4,)
        for a in job.data:
            yield job.step(a, a)
            held = iter(())
        assert list(held) == []


def looked_at_in_each_epoch(job: Job) -> Iterator[Seen]:
    for _ in job.restore().epochs(EPOCHS):
        next(iter(job.data))
        for a in job.data:
            yield job.step(a, a)


def looked_at_before_the_epochs(job: Job) -> Iterator[Seen]:
    """And random numbers are drawn after that, as by a module that is made of what a batch looks like."""
    state = job.restore()
    next(iter(job.data))
    torch.rand(7)
    for _ in state.epochs(EPOCHS):
        for a in job.data:
            yield job.step(a, [torch.rand(1)])


def read_before_the_epochs(job: Job) -> Iterator[Seen]:
    """Some of one loader, all of another one, and the one that drives the loop is still held."""
    others, third = job.loader(22, 4), job.loader(23, 4)
    state = job.restore()
    held = iter(job.data)
    assert len(list(islice(held, 2))) == 2
    assert len(list(islice(others, 2))) == 2
    assert sorted(torch.cat([batch for (batch,) in third]).tolist()) == list(range(23))
    for _ in state.epochs(EPOCHS):
        for a, (b,), (c,) in zip(job.data, others, third, strict=False):
            yield job.step(a, [torch.cat([b, c])])


def fetched_ahead_since_before_the_epochs(job: Job) -> Iterator[Seen]:
    others = again_and_again(job.loader(9, 3))
    state = job.restore()
    following = next(others)
    for _ in state.epochs(EPOCHS):
        for a in job.data:
            b, following = following, next(others)
            yield job.step(a, b)


def fetched_ahead_also_after_each_pass(job: Job) -> Iterator[Seen]:
    """And passes of the other loader begin anew there."""
    others = again_and_again(job.loader(4 * 5, 4))
    state = job.restore()
    following = next(others)
    for _ in state.epochs(EPOCHS):
        for a in job.data:
            b, following = following, next(others)
            seen = job.step(a, b)
            if job.data.batch < STEPS - 1:
                yield seen
        following = next(others)
        yield seen


def fetched_before_each_pass(job: Job) -> Iterator[Seen]:
    others = again_and_again(job.loader(8, 4))
    for _ in job.restore().epochs(EPOCHS):
        b = next(others)
        for a in job.data:
            yield job.step(a, b)


def fetched_after_each_pass(job: Job) -> Iterator[Seen]:
    others = again_and_again(job.loader(20, 4))
    for _ in job.restore().epochs(EPOCHS):
        for a in job.data:
            seen = job.step(a, a)
            if job.data.batch < STEPS - 1:
                yield seen
        yield *seen[:3], torch.cat([next(others)[0], next(others)[0]]).tolist(), seen[4]


LOOPS: list[Callable[[Job], Iterator[Seen]]] = [
    zipped,
    zipped_the_other_way,
    of_equal_sizes,
    a_shorter_one_again_and_again,
    zipped_with_a_shorter_one_again_and_again,
    made_in_each_epoch,
    two_of_equal_sizes_made_in_each_epoch,
    made_in_each_pass_without_epochs,
    around_the_driver,
    evaluated_on_its_own_batches,
    run_check,
    looked_at_in_each_epoch,
    looked_at_before_the_epochs,
    read_before_the_epochs,
    fetched_ahead_since_before_the_epochs,
    fetched_ahead_also_after_each_pass,
    fetched_before_each_pass,
    fetched_after_each_pass,
]


def goes_through(run: Run, loop: int, stop_at: int | None) -> list[Seen]:
    seen = []
    if stop_at == AT_ONCE:
        run._loop_control.stop.asked = Stop.END
    with contextlib.suppress(RunStopped):
        for each in LOOPS[loop](Job(run)):
            seen.append(each)
            if run.step == stop_at:
                run._loop_control.stop.asked = Stop.END
    return seen


@pytest.mark.parametrize("loop", range(len(LOOPS)), ids=[loop.__name__ for loop in LOOPS])
def test_every_loader_resumes_in_the_middle_of_an_epoch(loop: int, tmp_path: Path) -> None:
    (whole,) = run_ranks(goes_through, 1, loop, None, folder=tmp_path / "whole")
    assert len(whole) == EPOCHS * STEPS
    (begun,) = run_ranks(goes_through, 1, loop, 6, folder=tmp_path / "parts")
    # stopped again at the first place for it, where a loader may not have begun to continue
    assert run_ranks(goes_through, 1, loop, AT_ONCE, folder=tmp_path / "parts") == [[]]
    (rest,) = run_ranks(goes_through, 1, loop, None, folder=tmp_path / "parts")
    assert (len(begun), len(rest)) == (6, len(whole) - 6)
    # where `enumerate` would say 0
    assert rest[0][1] == 2
    assert begun + rest == whole


def without_a_driver(job: Job) -> Iterator[Seen]:
    """And batches of another one are fetched ahead."""
    data, others = again_and_again(job.loader(20, 4)), again_and_again(job.loader(22, 4))
    state = job.run.restore(model=job.model, optimizer=job.optimizer)
    following = next(others)
    for _ in state.epochs(EPOCHS):
        for _ in range(STEPS):
            b, following = following, next(others)
            yield job.step(next(data), b)


LOOPS_OF_EPOCHS = [
    without_a_driver,
    *(loop for loop in LOOPS if loop not in (made_in_each_pass_without_epochs, around_the_driver, run_check)),
]


def goes_through_epochs(run: Run, loop: int, most: int | None) -> list[Seen]:
    seen = list(islice(LOOPS_OF_EPOCHS[loop](Job(run)), most))
    run.await_save()
    return seen


@pytest.mark.parametrize("loop", range(len(LOOPS_OF_EPOCHS)), ids=[loop.__name__ for loop in LOOPS_OF_EPOCHS])
def test_every_loader_resumes_at_the_end_of_an_epoch(loop: int, tmp_path: Path) -> None:
    (whole,) = run_ranks(goes_through_epochs, 1, loop, None, folder=tmp_path / "whole")
    assert len(whole) == EPOCHS * STEPS
    # ends in the middle of the last epoch, and with it what was done since the checkpoint
    (begun,) = run_ranks(goes_through_epochs, 1, loop, 2 * STEPS + 1, folder=tmp_path / "parts")
    (rest,) = run_ranks(goes_through_epochs, 1, loop, None, folder=tmp_path / "parts")
    assert len(rest) == STEPS
    assert begun[:-1] + rest == whole


@pytest.mark.parametrize(
    "loop", [zipped, looked_at_before_the_epochs, fetched_after_each_pass], ids=lambda loop: loop.__name__
)
def test_two_ranks_resume_with_their_own_shares(loop: Callable[[Job], Iterator[Seen]], tmp_path: Path) -> None:
    number = LOOPS.index(loop)
    whole = run_ranks(goes_through, 2, number, None, folder=tmp_path / "whole")
    begun = run_ranks(goes_through, 2, number, 7, folder=tmp_path / "parts")
    rest = run_ranks(goes_through, 2, number, None, folder=tmp_path / "parts")
    for one, first, second in zip(whole, begun, rest, strict=True):
        assert len(first) < len(one)
        assert first + second == one
    assert whole[0] != whole[1]


def lasts_for_epochs(run: Run) -> None:
    job = Job(run)
    data = again_and_again(job.data)
    for _ in job.restore().epochs(EPOCHS):
        for _ in range(STEPS - 1):
            batch = next(data)
            job.step(batch, batch)


def test_pass_lasting_into_the_next_epoch_is_rejected() -> None:
    """A restarted run would lose the rest of it."""
    for answer in run_ranks(lasts_for_epochs, 2, may_fail=True):
        assert answer.startswith("UserError: run.loader: a loop over 'data' lasted from epoch 1 to epoch 2")


def test_pass_in_a_new_epoch_starts_over_even_without_a_step() -> None:
    place = LoaderPlace(8, 2)
    place.resume_from(LoaderRecord(8, 2, outside=False, active=True, batch=3, epoch=2, passes=1, order=None))
    assert (place.begin_pass(2, step=7), place.epoch) == (3, 2)
    place.come_to(3)
    assert (place.begin_pass(3, step=7), place.epoch) == (0, 3)


def test_only_one_pass_without_steps_counts_as_a_peek() -> None:
    place = LoaderPlace(8, 2)
    place.resume_from(LoaderRecord(8, 2, outside=False, active=True, batch=3, epoch=2, passes=1, order=None))
    assert [(place.begin_pass(None, step=7), place.epoch, place.passes) for _ in range(3)] == [
        (3, 2, 2),
        (3, 2, 2),
        (0, 3, 3),
    ]


def goes_on_after(run: Run, how: str) -> str:
    workers = {"num_workers": 1, "persistent_workers": True} if how == "persistent workers" else {}
    data = run.loader(TensorDataset(torch.arange(4)), batch_size=2, **workers)
    with torch.set_grad_enabled(how == "gradients"):
        for _ in data:
            for _ in data:
                break
    return "went on"


@pytest.mark.parametrize("how", ["gradients", "persistent workers", "evaluation"])
def test_nested_loop_over_one_loader_is_allowed_only_for_evaluation(how: str) -> None:
    (answer,) = run_ranks(goes_on_after, 1, how, may_fail=how != "evaluation")
    if how == "evaluation":
        assert answer == "went on"
    else:
        assert answer.startswith("UserError: run.loader: a loop continues after its body has started another loop")


def as_v01_saved(run: Path) -> None:
    """Leaves the place of one loader in the newest checkpoint."""
    newest = newest_checkpoint(RunFolder(run))
    assert newest is not None
    file = newest / "rank-00000.json"
    record = json.loads(file.read_text())
    del record["shared"]["facts"]["loaders"]
    del record["checksum"]
    file.write_text(json.dumps(record | {"checksum": folder._checksum(record)}))


def test_version_0_1_checkpoint_with_one_loader_position_loads(tmp_path: Path) -> None:
    (whole,) = run_ranks(goes_through, 1, 0, None, folder=tmp_path / "whole")
    run_ranks(goes_through, 1, 0, 6, folder=tmp_path / "parts")
    as_v01_saved(tmp_path / "parts")
    (rest,) = run_ranks(goes_through, 1, 0, None, folder=tmp_path / "parts")
    assert [each[:3] for each in rest] == [each[:3] for each in whole[6:]]


def what_it_prints(run: Run, loop: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        goes_through(run, loop, None)
    return printed.getvalue()


def test_loader_missing_after_a_restart_is_reported(tmp_path: Path) -> None:
    run_ranks(goes_through, 1, 0, 6, folder=tmp_path)
    (printed,) = run_ranks(what_it_prints, 1, LOOPS.index(a_shorter_one_again_and_again), folder=tmp_path)
    assert "WARNING: the checkpoint was saved in the middle of a run.loader of 22 samples in batches of 4" in printed


def evaluates(run: Run, how: str) -> tuple[str, float]:
    """Takes the mean of five samples, of which the last batch has one."""
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = run.meter("mean")
    values = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0]).unsqueeze(1)
    total = count = 0.0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(2):
            for (batch,) in run.loader(TensorDataset(values), batch_size=2):
                total, count = total + batch.sum().item(), count + len(batch)
                if how == "evaluates":
                    model(batch)
                elif how == "trains":
                    run.backward(model(batch).mean())
                elif how == "trains by hand":
                    model(batch).mean().backward()
                    optimizer.step()
                elif how == "meters":
                    meter.add(batch.mean())
    return printed.getvalue(), run.mean(total, count) if how == "evaluates" else meter.mean()


@pytest.mark.parametrize("how", ["evaluates", "trains", "trains by hand", "meters"])
def test_evaluation_counting_a_sample_twice_is_warned_about_once(how: str) -> None:
    (printed, mean), (_, _) = run_ranks(evaluates, 2, how)
    if how == "evaluates":
        line = evaluates.__code__.co_firstlineno + 9
        assert printed.count("WARNING") == 1
        assert f"WARNING: {__file__}:{line}: an evaluation with run.loader counts a sample twice" in printed
        assert "use run.shard(dataset, batch_size) instead" in printed
        assert mean != 4.0
    else:
        assert printed == ""
        assert how != "meters" or mean == 4.0


def trains_on_a_list(run: Run) -> tuple[str, float]:
    model = run.wrap(nn.Linear(1, 1, bias=False))
    (weight,) = model.parameters()
    nn.init.ones_(weight)
    values = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0]).unsqueeze(1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        batches = list(run.loader(TensorDataset(values), batch_size=2))
        for (batch,) in batches:
            run.backward(model(batch).mean())
    assert weight.grad is not None
    return printed.getvalue(), weight.grad.item()


def test_training_on_a_list_of_batches_is_not_taken_for_evaluation() -> None:
    assert run_ranks(trains_on_a_list, 2) == [("", 2.5 + 4.5 + 6.0)] * 2


def trains_in_two_phases(run: Run, stop_at: int | None) -> list[tuple[int, int]]:
    """Leaves the epochs in the first phase, and does not come back to them."""
    job, seen = Job(run), []
    state = job.restore()
    with contextlib.suppress(RunStopped):
        if state.step == 0:
            for _ in state.epochs(EPOCHS):
                break
        while run.step < EPOCHS * STEPS:
            for a in job.data:
                _, at, *_ = job.step(a, a)
                seen.append((run.step, at))
                if run.step == stop_at:
                    run._loop_control.stop.asked = Stop.END
    return seen


def test_loop_after_abandoned_epochs_resumes_without_them(tmp_path: Path) -> None:
    (begun,) = run_ranks(trains_in_two_phases, 1, 6, folder=tmp_path)
    (rest,) = run_ranks(trains_in_two_phases, 1, None, folder=tmp_path)
    assert begun + rest == [(step + 1, step % STEPS) for step in range(EPOCHS * STEPS)]
