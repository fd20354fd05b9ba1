"""A run that continues from another one's checkpoint keeps its own learning rate, momentum and schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from mgpu_slurm.checkpoints.state.own_settings import OwnSettings

Schedule = Callable[[Optimizer], LRScheduler]


def made(lr: float, momentum: float = 0.9, schedule: Schedule | None = None) -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=lr, momentum=momentum)
    found: dict[str, object] = {"model": model, "optimizer": optimizer}
    return found if schedule is None else found | {"scheduler": schedule(optimizer)}


def train(objects: dict[str, object], steps: int) -> list[float]:
    """Return the learning rate of each step."""
    model, optimizer, scheduler = objects["model"], objects["optimizer"], objects.get("scheduler")
    assert isinstance(model, torch.nn.Module)
    assert isinstance(optimizer, Optimizer)
    rates = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if isinstance(scheduler, LRScheduler):
            scheduler.step()
    return rates


def continue_from(source: dict[str, object], own: dict[str, object]) -> None:
    settings = OwnSettings(own)
    for name, value in own.items():
        state = source[name].state_dict()  # type: ignore[attr-defined]
        value.load_state_dict(state)  # type: ignore[attr-defined]
    settings.put_back()


def test_next_step_uses_the_own_values_and_the_others_state() -> None:
    source, own = made(0.1, momentum=0.9), made(0.02, momentum=0.5)
    train(source, 3)
    continue_from(source, own)
    (group,) = own["optimizer"].param_groups  # type: ignore[attr-defined]
    assert (group["lr"], group["momentum"]) == (0.02, 0.5)
    model = own["model"]
    assert isinstance(model, torch.nn.Linear)
    before = model.weight.detach().clone()
    buffer = own["optimizer"].state[model.weight]["momentum_buffer"].clone()  # type: ignore[attr-defined]
    train(own, 1)
    gradient = torch.ones(1, 2)
    torch.testing.assert_close(model.weight.detach(), before - 0.02 * (0.5 * buffer + gradient))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=20),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, T_max=20)], [3]
        ),
    ],
    ids=["exponential", "cosine", "lambda", "warm-up and cosine"],
)
@pytest.mark.parametrize("steps", [0, 2, 7])
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_schedule_goes_on_from_where_the_source_was_with_the_own_rate(schedule: Schedule, steps: int) -> None:
    source, own, undisturbed = (made(lr, schedule=schedule) for lr in (0.1, 0.02, 0.02))
    train(source, steps)
    continue_from(source, own)
    assert train(own, 6) == pytest.approx(train(undisturbed, steps + 6)[steps:])


def test_betas_and_weight_decay_are_kept_in_each_group() -> None:
    def optimizer_of(scale: float) -> AdamW:
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1 * scale, "weight_decay": 0.5 * scale},
            {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2 * scale, "betas": (0.5 * scale, 0.9)},
        ]
        return AdamW(groups)

    source, own = optimizer_of(1.0), optimizer_of(0.5)
    continue_from({"optimizer": source}, {"optimizer": own})
    assert [group["lr"] for group in own.param_groups] == [0.05, 0.1]
    assert own.param_groups[0]["weight_decay"] == 0.25
    assert own.param_groups[1]["betas"] == (0.25, 0.9)
