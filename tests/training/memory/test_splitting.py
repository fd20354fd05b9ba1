"""Memory that runs out on one rank: all ranks repeat the step in smaller parts, as if they had always used these.

There is no GPU that could run out of it, so the error that torch would raise is raised at the places where it may be.
"""

from __future__ import annotations

import itertools
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.data.batching.batch_cutting import MicroBatchSize
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.memory import agreement, sharded_exchanges
from mgpu_slurm.training.memory.found_size import FoundSize, is_memory_error
from mgpu_slurm.training.memory.sharded_exchanges import Exchange, ExchangeOrder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import with_long

WIDTH = 600
"""A layer has more parameters than a bucket of DDP."""
AT = 1
"""The step before the one in which memory runs out."""
LEARNED = sharded_exchanges.LEARNED_AFTER
"""The first such step in which ranks know the order of their exchanges."""


class Shortage:
    """Raises an error at the n-th of some places, once."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.is_due = False

    def __call__(self) -> None:
        if self.is_due:
            self._left -= 1
            if self._left == 0:
                self.run_out()

    @staticmethod
    def run_out() -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.dropout = nn.Dropout(0.3)
        self.shortage: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shortage is not None:
            self.shortage()
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Counted(nn.Module):
    """Has a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


@contextmanager
def failing(kind: str, shortage: Shortage) -> Iterator[None]:
    """Let memory run out in one of the allocations that `fully_shard` makes for its exchanges, or right before one of
    the exchanges that are checked."""
    owner: Any = sharded_exchanges._Checked if kind == "allocation" else agreement.Agreement
    name = "allocate" if kind == "allocation" else "check"
    original = getattr(owner, name)

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kind in ("allocation", "check"):
            shortage()
        return original(self, *args, **kwargs)

    with torch_adapter.replaced(owner, **{name: fail}):
        yield


def train(
    run: Run, kind: str, at: int, samples: int | None, step: int = AT, ranks: frozenset[int] | None = None
) -> dict[str, Any]:
    """Train for six steps, with an evaluation after every third.

    Args:
        kind: the place at which memory runs out, in one step.
        at: at which of these places.
        samples: how many a rank computes at once from that step on; None to find out.
        step: the step before that one.
        ranks: those that run out; None for the last.
    """
    run.seed(3, deterministic=True)
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    layers = nn.Sequential(nn.Linear(4, 8), Counted(), *blocks, nn.Linear(8, 1))
    shortage = Shortage(at)
    model = run.wrap(layers, blocks=(Block,), recompute=kind == "recomputation")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    features = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(features, features.sum(1)), batch_size=16, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    if kind in ("block", "recomputation"):
        blocks[1].shortage = shortage
    if kind == "gradient":
        # of a parameter between the buckets of DDP
        blocks[1].up.weight.register_hook(lambda gradient: shortage())

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if kind == "start":
            shortage()
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        if kind == "backward":
            loss.register_hook(lambda gradient: shortage())
        return loss

    losses = []
    with failing(kind, shortage):
        for _ in state.epochs(2):
            for batch in data:
                if run.step == step and samples is not None:
                    run._parts.size.limit = samples
                runs_out = run.rank in (ranks or {run.world_size - 1})
                shortage.is_due = samples is None and run.step == step and runs_out
                if samples is None and run.step == step == LEARNED:
                    known = is_order_known(run)
                    assert known == (run._parts.splitter._layout.strategy in ("zero2", "fsdp"))
                losses.append(run.gradients(loss_of, *batch).item())
                shortage.is_due = False
                run.update(optimizer, clip=1.0)
            with torch.no_grad():
                model.eval()
                losses.append(model(features[:8]).sum().item())
                model.train()
    # all ranks have made the same calls
    run.finish()
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return {
        "samples": run._parts.size.limit,
        "losses": losses,
        "weights": [value for each in whole for value in each.reshape(-1).tolist()],
        "buffers": [value for each in model.buffers() for value in each.reshape(-1).tolist()],
        "drawn": torch.rand(3).tolist(),
    }


def is_order_known(run: Run) -> bool:
    """Return whether the ranks know the order of the exchanges of any kind of pass."""
    return any(order.is_known for order in run._parts.splitter._agreement._order._orders.values())


LAYOUTS = {
    "one": (1, Parallelism()),
    "ddp": (2, Parallelism()),
    "ddp of three": (3, Parallelism()),
    "zero2": (2, Parallelism("zero2")),
    "fsdp": (2, Parallelism("fsdp")),
    "fsdp of three": (3, Parallelism("fsdp")),
    "hsdp": (4, Parallelism("hsdp", shard=2)),
}


@pytest.fixture(autouse=True)
def repeats_sharded(request: pytest.FixtureRequest) -> None:
    """Passes of sharded models are repeated from torch 2.13 on."""
    layout = str(getattr(request.node, "callspec", None) and request.node.callspec.params.get("layout"))
    if layout.startswith(("fsdp", "hsdp", "zero2")) and not torch_versions.can_repeat_passes():
        pytest.skip("needs torch 2.13")


PLACES = {"start": 1, "block": 1, "backward": 1, "gradient": 1, "recomputation": 2}
# fully_shard calls no hooks of parameters
SHARDED_PLACES = [place for place in PLACES if place != "gradient"]
CASES = [
    *[(layout, place, AT) for layout in ("one", "ddp") for place in PLACES],
    *[("fsdp", place, step) for place in SHARDED_PLACES for step in (AT, LEARNED)],
    *[(layout, place, AT) for layout in ("ddp of three", "hsdp") for place in ("start", "recomputation")],
    *[(layout, "block", step) for layout in ("zero2", "fsdp of three") for step in (AT, LEARNED)],
    ("hsdp", "block", LEARNED),
]


@pytest.mark.parametrize(("layout", "place", "step"), with_long(CASES, CASES[::5]))
def test_step_is_repeated_in_smaller_parts_on_all_ranks(layout: str, place: str, step: int) -> None:
    ranks, parallelism = LAYOUTS[layout]
    found = run_ranks(train, ranks, place, PLACES[place], None, step, layout=parallelism.layout(ranks, ranks))
    # half of a rank's largest share of the 16 samples of a batch
    samples = -(-16 // ranks) // 2
    assert {each["samples"] for each in found} == {samples}
    expected = run_ranks(train, ranks, place, PLACES[place], samples, step, layout=parallelism.layout(ranks, ranks))
    assert found == expected


@pytest.mark.parametrize("layout", with_long(["ddp", "zero2", "fsdp", "hsdp"], {"fsdp"}))
def test_first_step_is_repeated_if_memory_runs_out_before_the_model_is_called(layout: str) -> None:
    count, parallelism = LAYOUTS[layout]
    layout_of_all = parallelism.layout(count, count)
    for ranks in (frozenset({0}), frozenset(range(count))):
        found = run_ranks(train, count, "start", 1, None, 0, ranks, layout=layout_of_all)
        samples = found[0]["samples"]
        assert samples is not None
        assert found == run_ranks(train, count, "start", 1, samples, 0, ranks, layout=layout_of_all)


@pytest.mark.parametrize(
    ("layout", "step", "stride"),
    with_long(
        [("fsdp", AT, 4), ("zero2", LEARNED, 3), ("fsdp", AT, 1), ("fsdp", LEARNED, 1), ("hsdp", AT, 3)],
        [("fsdp", AT, 4)],
    ),
)
def test_step_is_repeated_after_any_allocation_of_an_exchange(layout: str, step: int, stride: int) -> None:
    ranks, parallelism = LAYOUTS[layout]
    of_all = parallelism.layout(ranks, ranks)
    expected = run_ranks(train, ranks, "allocation", 1, 16 // ranks // 2, step, layout=of_all)
    places = 0
    for at in itertools.count(1, stride):
        found = run_ranks(train, ranks, "allocation", at, None, step, layout=of_all)
        if found[0]["samples"] is None:
            break
        assert found == expected
        places += 1
    # gathers and scatters of the two blocks and the rest
    assert places * stride >= 8


EXCHANGES = {"ddp": 1, "ddp of three": 1, "zero2": 6, "fsdp": 8, "hsdp": 8}
"""Number of exchanges in a pass, at least."""


@st.composite
def shortages(draw: st.DrawFn) -> tuple[str, str, int, int, frozenset[int]]:
    """Layout, place, number of that place, step and ranks of memory that runs out."""
    layout = draw(st.sampled_from([*EXCHANGES]))
    is_sharded = "ddp" not in layout
    place = draw(st.sampled_from([*(SHARDED_PLACES if is_sharded else PLACES), "check"] + ["allocation"] * is_sharded))
    most = EXCHANGES[layout] if place in ("check", "allocation") else PLACES[place]
    ranks = draw(st.frozensets(st.integers(0, LAYOUTS[layout][0] - 1), min_size=1))
    return layout, place, draw(st.integers(1, most)), draw(st.integers(0, 5)), ranks


@pytest.mark.needs_torch("2.13")
@given(shortages())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_step_is_repeated_wherever_memory_runs_out(shortage: tuple[str, str, int, int, frozenset[int]]) -> None:
    layout, place, at, step, ranks = shortage
    count, parallelism = LAYOUTS[layout]
    found = run_ranks(train, count, place, at, None, step, ranks, layout=parallelism.layout(count, count))
    samples = found[0]["samples"]
    assert samples is not None, "memory did not run out"
    assert found == run_ranks(train, count, place, at, samples, step, ranks, layout=parallelism.layout(count, count))


def count_what_is_left(run: Run, step: int) -> tuple[int, int]:
    """Return how many activations of the pass that failed there are, and how many of them are left when the step is
    repeated."""
    blocks = [Block(), Block()]
    model = run.wrap(nn.Sequential(*blocks, nn.Linear(8, 1)), blocks=(Block,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    activations: list[weakref.ref[torch.Tensor]] = []
    counts = []
    blocks[0].register_forward_hook(lambda module, inputs, output: activations.append(weakref.ref(output)))
    # on one rank in the forward pass, after which the others come to the end of theirs
    shortage = blocks[1].shortage = Shortage(1)

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        counts.append((len(activations), sum(each() is not None for each in activations)))
        loss: torch.Tensor = model(inputs).square().mean()
        return loss

    for _ in range(step + 1):
        activations.clear()
        counts.clear()
        shortage.is_due = run.step == step and run.is_main
        run.gradients(loss_of, torch.ones(8, 8))
        run.update(optimizer)
    # before the first pass, and before both parts of the repeated one
    assert len(counts) == 3
    return counts[1]


@pytest.mark.parametrize(("layout", "step"), [("one", AT), ("ddp", AT), ("fsdp", AT), ("fsdp", LEARNED)])
def test_memory_of_the_failed_pass_is_released_on_all_ranks(layout: str, step: int) -> None:
    count, parallelism = LAYOUTS[layout]
    assert run_ranks(count_what_is_left, count, step, layout=parallelism.layout(count, count)) == [(1, 0)] * count


def train_in_changing_order(run: Run, noted: Path) -> None:
    """Leave out a block in the step in which memory runs out, so that exchanges are not those of earlier steps."""
    first, second = Block(), Block()
    model: Any = run.wrap(nn.Sequential(first, second), blocks=(Block,))
    model.forward = lambda x: second(x if run.step == LEARNED else first(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(LEARNED + 1):
        second.shortage = Shortage(1)
        second.shortage.is_due = run.step == LEARNED and run.rank == 1
        try:
            run.gradients(lambda x: model(x).mean(), torch.ones(8, 8))
        except torch.OutOfMemoryError as error:
            noted.write_text(str(error))
            # ranks that fail end without waiting for others
            os.kill(os.getpid(), signal.SIGKILL)
        run.update(optimizer)


@pytest.mark.needs_torch("2.13")
def test_rank_whose_exchanges_are_not_those_of_earlier_steps_fails(tmp_path: Path) -> None:
    _, layout = LAYOUTS["fsdp"]
    noted = tmp_path / "noted"
    run_ranks(train_in_changing_order, 2, noted, layout=layout.layout(2, 2), may_fail=True)
    assert noted.read_text().startswith("CUDA out of memory")


def train_with_changes(run: Run, change: str, samples: int | None) -> list[float]:
    """Train a sharded model whose outermost module has no parameters, and let memory run out right after a change."""
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    blocks[0].requires_grad_(change != "unfrozen")
    model = run.wrap(nn.Sequential(*blocks), blocks=(Block,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(run.rank))

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(part).square().mean()
        return loss

    def other_loss_of(part: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = blocks[1](part).square().mean() + blocks[0](part).mean()
        return loss

    for step in range(LEARNED + 3):
        is_changed = step >= LEARNED + 1
        if is_changed and samples is not None:
            run._parts.size.limit = samples
        if is_changed and change == "unfrozen":
            blocks[0].requires_grad_()
        # a part cannot be called before the whole was
        if step and change in ("evaluation", "part evaluated"):
            with torch.no_grad():
                (model if change == "evaluation" else blocks[0])(inputs)
        blocks[1].shortage = Shortage(1)
        blocks[1].shortage.is_due = samples is None and step == LEARNED + 1 and run.is_main
        assert samples is not None or step != LEARNED + 1 or is_order_known(run)
        run.gradients(other_loss_of if is_changed and change == "other loss" else loss_of, inputs)
        run.update(optimizer)
    whole = [each.full_tensor() for each in model.parameters()]  # type: ignore[operator]
    return [float(run._parts.size.limit or 0), *(value for each in whole for value in each.reshape(-1).tolist())]


@pytest.mark.needs_torch("2.13")
@pytest.mark.parametrize("change", ["evaluation", "part evaluated", "unfrozen", "other loss"])
def test_memory_may_run_out_after_any_change(change: str) -> None:
    layout = Parallelism("fsdp").layout(2, 2)
    found = run_ranks(train_with_changes, 2, change, None, layout=layout)
    assert found[0][0] == 4
    assert found == run_ranks(train_with_changes, 2, change, 4, layout=layout)


def exchanges_in_other_ways(run: Run, kind: str) -> bool:
    model: Any = run.wrap(nn.Sequential(Block(), nn.Linear(8, 1)), blocks=(Block,))
    if kind == "hook of the job":
        model.set_all_reduce_hook(lambda gradients: None)
    if kind == "exchange of its own":
        model.set_custom_all_gather(Mock())
        return not sharded_exchanges.check_before_exchange(model, Mock(), Mock())
    if kind == "parameter of its own":
        model.register_parameter("scale", nn.Parameter(torch.ones(())))
    for root in sharded_exchanges.roots_of(model):
        sharded_exchanges.begin_anew(root)
    return sharded_exchanges.has_other_exchanges(model)


@pytest.mark.parametrize(
    ("layout", "kind", "expected"),
    [
        ("fsdp", "none", False),
        ("zero2", "none", False),
        ("hsdp", "none", True),
        ("ddp", "none", True),
        ("fsdp", "hook of the job", True),
        ("fsdp", "parameter of its own", True),
        ("fsdp", "exchange of its own", True),
    ],
)
def test_order_is_learned_only_if_all_exchanges_are_known(layout: str, kind: str, expected: bool) -> None:
    count, parallelism = LAYOUTS[layout]
    found = run_ranks(exchanges_in_other_ways, count, kind, layout=parallelism.layout(count, count))
    assert found == [expected] * count


GROUP = Mock(size=lambda: 2)


def exchange(sent: int) -> Exchange:
    return Exchange(None, GROUP, sent, 2 * sent, torch.float32, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("passes", "is_known"),
    [
        ([[1, 2]] * LEARNED, True),
        ([[1], *[[1, 2]] * (LEARNED - 1)], True),
        ([[1, 2]] * (LEARNED - 1), False),
        ([*[[1, 2]] * (LEARNED - 1), [2, 1]], False),
        # it is looked for anew, for twice as long
        ([*[[1, 2]] * (LEARNED - 1), [2, 1], *[[1, 2]] * (2 * LEARNED - 1)], False),
        ([*[[1, 2]] * (LEARNED - 1), [2, 1], *[[1, 2]] * (2 * LEARNED)], True),
        ([*[[1, 2]] * LEARNED, [2, 1]], False),
        ([*[[1, 2]] * LEARNED, [2, 1], *[[1, 2]] * (2 * LEARNED - 2)], False),
        ([*[[1, 2]] * LEARNED, [2, 1], *[[1, 2]] * (2 * LEARNED - 1)], True),
    ],
)
def test_order_of_exchanges_is_known_if_passes_are_alike(passes: list[list[int]], is_known: bool) -> None:
    order = ExchangeOrder(2)
    for sizes in passes:
        order.begin_pass()
        for size in sizes:
            order.note(exchange(size))
        order.end_pass(1, lambda is_so: is_so)
    assert order.is_known(1) == is_known
    assert not order.is_known(2)


@pytest.mark.parametrize(("ranks", "others_know"), [(2, False), (4, True)])
def test_order_of_exchanges_is_known_only_if_all_ranks_take_part_and_know_it(ranks: int, others_know: bool) -> None:
    order = ExchangeOrder(ranks)
    for _ in range(LEARNED):
        order.begin_pass()
        order.note(exchange(1))
        order.end_pass(1, lambda is_so: is_so or not others_know)
    assert not order.is_known(1)


def train_without_a_split(run: Run, how: str) -> list[float]:
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(features, features.sum(1)), batch_size=8)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (model(inputs).squeeze(1) - targets).square().mean()

    if how == "split":
        run._parts.size.limit = 1
    losses = []
    for batch in data:
        if how == "backward":
            loss = loss_of(*batch)
            run.backward(loss)
        else:
            loss = run.gradients(loss_of, *batch)
            assert not loss.requires_grad
        losses.append(loss.item())
        run.update(optimizer)
    return [*losses, *(value for each in model.parameters() for value in each.reshape(-1).tolist())]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_equal_those_of_backward(ranks: int) -> None:
    expected = run_ranks(train_without_a_split, ranks, "backward")
    assert run_ranks(train_without_a_split, ranks, "whole") == expected
    for found, wanted in zip(run_ranks(train_without_a_split, ranks, "split"), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def run_out(run: Run, kind: str) -> None:
    model: Any = run.wrap(nn.Sequential(nn.Linear(4, 1)), blocks=(nn.Linear,))
    if kind == "hook of the job":
        model.register_comm_hook(None, allreduce_hook)

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        if run.rank == 0 and kind == "other error":
            raise ValueError("a mistake of the job")
        if run.rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        mean: torch.Tensor = model(inputs).mean()
        return mean

    if kind == "optimizer":
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: Shortage.run_out())
        run.gradients(lambda inputs: model(inputs).mean(), torch.ones(8, 4))
        run.update(optimizer)
    if kind == "backward of its own":
        torch.autograd.backward(model(torch.ones(8, 4)).mean())
    if kind == "in a step":
        run.backward(model(torch.ones(8, 4)).mean())
    run.gradients(loss_of, torch.ones(1 if kind == "one sample" else 8, 4))


@pytest.mark.parametrize(
    ("ranks", "kind", "error"),
    [
        (
            2,
            "one sample",
            "UserError: out of memory with a single sample: use --strategy fsdp on more GPUs, run.wrap(r",
        ),
        (2, "until one sample is left", "UserError: out of memory with a single sample"),
        (1, "other error", "ValueError: a mistake of the job"),
        # smaller parts would not help
        (1, "optimizer", "OutOfMemoryError: CUDA out of memory"),
        # nothing could be repeated
        (1, "in a step", "OutOfMemoryError: CUDA out of memory"),
        (2, "hook of the job", "OutOfMemoryError: CUDA out of memory"),
        (2, "backward of its own", "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_what_cannot_be_repeated_is_an_error(ranks: int, kind: str, error: str) -> None:
    assert run_ranks(run_out, ranks, kind, may_fail=True)[0].startswith(error)


@pytest.mark.needs_torch("2.13")
def test_advice_for_a_single_sample_fits_the_strategy() -> None:
    layout = Parallelism("fsdp").layout(2, 2)
    answer = run_ranks(run_out, 2, "one sample", may_fail=True, layout=layout)[0]
    assert answer.startswith(
        "UserError: out of memory with a single sample: use run.wrap(recompute=True, offload=True)"
    )


def test_size_of_another_device_or_layout_is_not_used(tmp_path: Path) -> None:
    def found(layout: Parallelism, device: str = "cpu") -> FoundSize:
        return FoundSize(MicroBatchSize(), layout.layout(2, 2), torch.device(device), RunFolder(tmp_path), 1, 0)

    first = found(Parallelism())
    first._size.current = 8
    first.halve()
    state = first.state_dict()
    assert state is not None
    for layout, device, limit in (
        (Parallelism(), "cpu", 4),
        (Parallelism("fsdp"), "cpu", None),
        (Parallelism(precision="bf16"), "cpu", None),
        (Parallelism(), "meta", None),
    ):
        other = found(layout, device)
        other.load_state_dict(state)
        assert other._size.limit == limit


def train_and_stop(run: Run, stop: bool) -> dict[str, Any]:
    """Train six steps, the second of which finds a size, and stop after three."""
    run.seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(features, features.sum(1)), batch_size=8, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    sizes = []

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sizes.append(len(inputs))
        if run.step == 1 and len(inputs) > 2 and run.is_main:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (model(inputs).squeeze(1) - targets).square().mean()

    try:
        for _ in state.epochs(1):
            for batch in data:
                run.gradients(loss_of, *batch)
                run.update(optimizer)
                if stop and run.step == 3:
                    run._loop_control.stop.asked = Stop.END
    except RunStopped:
        pass
    weights = [value for each in model.parameters() for value in each.reshape(-1).tolist()]
    return {"step": run.step, "first": sizes[0], "weights": weights}


def test_size_is_kept_in_checkpoints(tmp_path: Path) -> None:
    expected = run_ranks(train_and_stop, 2, False, folder=tmp_path / "whole")
    stopped = run_ranks(train_and_stop, 2, True, folder=tmp_path / "stopped")
    resumed = run_ranks(train_and_stop, 2, False, folder=tmp_path / "stopped")
    assert [(each["step"], each["first"]) for each in (*stopped, *resumed)] == [(3, 4), (3, 4), (6, 2), (6, 2)]
    assert [each["weights"] for each in resumed] == [each["weights"] for each in expected]


@pytest.mark.parametrize(("seconds", "is_quiet"), [(0.0, True), (3600.0, False)])
def test_ranks_stop_telling_each_other_if_it_takes_too_long(seconds: float, is_quiet: bool) -> None:
    asked = []

    def any_rank(is_so: bool) -> bool:
        asked.append(is_so)
        return is_so

    agreed = agreement.Agreement(any_rank, MicroBatchSize())
    with agreed.during_pass(kind=None):
        for number in range(agreement.SETTLED_AFTER + 1):
            assert not agreed.is_quiet
            agreed.check()
            agreed.settle(at=number * seconds)
    assert agreed.is_quiet == is_quiet
    assert asked == [*[False] * (agreement.SETTLED_AFTER + 1), is_quiet]


def test_step_of_a_model_whose_layers_exchange_anything_is_not_repeated() -> None:
    agreed = agreement.Agreement(Mock(), MicroBatchSize())
    assert not agreed.watch([nn.Sequential(nn.Linear(4, 1), nn.SyncBatchNorm(1))])


def test_errors_that_say_memory_ran_out_are_recognized() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_memory_error(raised.value)
    assert is_memory_error(torch.OutOfMemoryError())
    assert not is_memory_error(RuntimeError("shape mismatch"))
    assert not is_memory_error(ValueError("out of memory"))
