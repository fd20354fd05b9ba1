"""Optimizer steps are counted, whatever the optimizer is and whoever calls it: saves and stops depend on it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder.checkpoint_names import checkpoint_step, complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


class Plain:
    """An object that can be restored."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ByHand(Plain):
    """A plain object that is an optimizer, as Muon often is."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class Several(Plain):
    """A plain object around others."""

    def __init__(self, *optimizers: Any, scaler: torch.amp.GradScaler | None = None) -> None:
        self.optimizers = optimizers
        self.scaler = scaler

    def step(self) -> None:
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class SkipsWhenInfinite(Several):
    def step(self) -> None:
        if all(p.grad.isfinite().all() for o in self.optimizers for g in o.param_groups for p in g["params"]):
            super().step()


class Nested(torch.optim.SGD):
    """An optimizer that steps another one, and calls its base class's `step`, which is a step of its own to torch."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(list(parameters), lr=0.1)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        return super().step(closure)


class Alternates(Plain):
    """Muon, say, at each update, and AdamW at every second one, and an SGD that is never used."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.by_hand = ByHand(parameters)
        self.adam = torch.optim.AdamW(self.by_hand.param_groups[0]["params"])
        self.unused = torch.optim.SGD(self.by_hand.param_groups[0]["params"])
        self.updates = 0

    def step(self) -> None:
        self.by_hand.step()
        self.updates += 1
        if self.updates % 2 == 0:
            self.adam.step()

    def zero_grad(self) -> None:
        self.by_hand.zero_grad()


class ScalesInside(torch.optim.SGD):
    """An optimizer of torch's that leaves the step to another one, and that to a scaler."""

    def __init__(self, parameters: Iterable[torch.Tensor], scaler: torch.amp.GradScaler) -> None:
        super().__init__(list(parameters), lr=0.1)
        self.several = Several(ByHand(self.param_groups[0]["params"]), scaler=scaler)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.several.step()


def made(kind: str, model: nn.Module) -> tuple[Any, torch.amp.GradScaler]:
    """An optimizer, and the scaler of its gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled="scaled" in kind)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    # the fused one gets the scaler's findings, and skips by itself
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    by_hand = ByHand(model.parameters())
    hides_its_scaler = Several(by_hand)
    scaled = Several(by_hand, scaler=scaler)
    hides_its_scaler.step = lambda: scaled.step()  # type: ignore[method-assign]
    kinds: dict[str, Any] = {
        "torch": sgd,
        "plain": by_hand,
        "pair of torch": Several(sgd, fused),
        "pair": Several(by_hand, fused),
        "nested": Nested(model.parameters()),
        "skips": SkipsWhenInfinite(sgd),
        "scaled": Several(sgd, scaler=scaler),
        "scaled fused": Several(fused, scaler=scaler),
        "scaled plain": Several(by_hand, scaler=scaler),
        "scaled pair": Several(sgd, fused, scaler=scaler),
        "scaled in a closure": hides_its_scaler,
        "scaled in a torch one": ScalesInside(model.parameters(), scaler),
        "with a scaler that is off": Several(sgd, scaler=scaler),
    }
    return kinds[kind], scaler


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("torch", 3),
        ("plain", 3),
        ("pair of torch", 3),
        ("pair", 3),
        ("nested", 3),
        ("skips", 2),
        ("scaled", 2),
        ("scaled fused", 2),
        ("scaled plain", 2),
        ("scaled pair", 2),
        ("scaled in a closure", 2),
        ("scaled in a torch one", 2),
        ("with a scaler that is off", 3),
    ],
)
def test_update_counts_as_one_step_unless_it_is_skipped(kind: str, steps: int, restored: bool, run: Run) -> None:
    model = nn.Linear(1, 1)
    optimizer, scaler = made(kind, model)
    if restored:
        run.restore(**{f"o{n}": o for n, o in enumerate([optimizer, *getattr(optimizer, "optimizers", ())])})
    for scale in (1.0, float("inf"), 1.0):
        run.backward(scaler.scale(model(torch.ones(1, 1)).mean()) * scale)
        run.update(optimizer)
        assert not run._loop_control.has_gradients
    assert run.step == steps


@pytest.mark.parametrize("is_sparse", [False, True])
def test_update_counts_whichever_optimizers_step(is_sparse: bool, run: Run) -> None:
    model = nn.Embedding(2, 1, sparse=is_sparse)
    optimizer = Alternates(model.parameters())
    if is_sparse:
        optimizer.adam = torch.optim.SparseAdam(model.parameters())  # type: ignore[assignment]
    for number in (1, 2, 3, 4):
        run.backward(model(torch.tensor([1])).mean())
        run.update(optimizer)
        assert run.step == number


def test_update_with_large_16_bit_gradients_counts(run: Run) -> None:
    """Their norm overflows 16 bits."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    run.update(Alternates([parameter]))
    assert run.step == 1


def with_a_closure(optimizer: torch.optim.Optimizer, model: nn.Module, run: Run) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).square().mean()
        run.backward(loss)
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def scaled_by_hand(optimizer: torch.optim.Optimizer, model: nn.Module, run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for scale in (float("inf"), 1.0):
        scaler.scale(model(torch.ones(1, 1)).mean() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "step", "steps"),
    [
        (torch.optim.SGD, lambda optimizer, *_: optimizer.step(), 1),
        (torch.optim.LBFGS, with_a_closure, 1),
        (torch.optim.SGD, scaled_by_hand, 1),
        (torch.optim.AdamW, scaled_by_hand, 1),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), scaled_by_hand, 1),
        (Nested, lambda optimizer, *_: optimizer.step(), 1),
        (lambda parameters: Several(*(torch.optim.SGD([p], 0.1) for p in parameters)), lambda o, *_: o.step(), 2),
    ],
    ids=["sgd", "closure", "scaled", "scaled adam", "scaled fused", "nested", "two optimizers"],
)
def test_each_manual_step_of_a_torch_optimizer_counts(kind: Any, step: Any, steps: int, run: Run) -> None:
    model = nn.Linear(1, 1)
    optimizer = kind(model.parameters())
    run.restore(model=model)
    for number in (1, 2):
        step(optimizer, model, run)
        assert run.step == number * steps
    run.close()
    step(optimizer, model, run)
    assert run.step == 2 * steps


def test_failed_step_does_not_hide_the_next(run: Run) -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    for attempt in (optimizer.step, lambda: run.update(optimizer)):
        with pytest.raises(TypeError):
            attempt()
    with_a_closure(optimizer, nn.Linear(1, 1), run)
    assert run.step == 1


def test_clip_without_parameter_groups_is_rejected(run: Run) -> None:
    with pytest.raises(UserError, match=r"run.update\(clip=1.0\): a Several has no param_groups"):
        run.update(Several(), clip=1.0)


def trains(run: Run, kind: str, stop_at: int | None) -> tuple[int, int]:
    """Ten steps an epoch with an optimizer that is not restored."""
    run.seed(0)
    model = run.wrap(nn.Linear(1, 1))
    optimizer, _ = made(kind, model)
    data = run.loader(TensorDataset(torch.ones(20, 1)), batch_size=2)
    state = run.restore(model=model, data=data)
    began = state.step
    run.checkpoints(every_steps=4, keep=99)
    for _ in state.epochs(2):
        for (batch,) in data:
            run.backward(model(batch).mean())
            if kind == "torch":
                optimizer.step()
                optimizer.zero_grad()
            else:
                run.update(optimizer)
            if run.step == stop_at:
                run._loop_control.stop.asked = Stop.END
    return began, run.step


@pytest.mark.parametrize("kind", ["torch", "pair"])
def test_run_with_an_unrestored_optimizer_saves_and_stops(kind: str, tmp_path: Path) -> None:
    for stopped in run_ranks(trains, 2, kind, 6, folder=tmp_path):
        assert stopped.startswith("RunStopped")
    found = [checkpoint_step(path) or 0 for path in complete_checkpoints(RunFolder(tmp_path))]
    assert found[0] == 4
    assert found[-1] in (6, 7)
    assert run_ranks(trains, 2, kind, None, folder=tmp_path) == [(found[-1], 20)] * 2
