"""What a pipeline refuses, and what it does besides training, in one stage and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.request.parallelism import Parallelism, Precision
from mgpu_slurm.training.parallel.pipeline import MOST_SCHEDULES
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 1)]


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(1) - targets).square().mean()


def error_and_size(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.stack([(outputs.squeeze(1) - targets).abs().sum(), torch.tensor(float(len(targets)))])


def train_wrongly(run: Run, what: str) -> None:
    options: dict[str, Any] = {"micro_batches": 2}
    layers = make_layers()
    if what == "too few layers":
        layers = [nn.Sequential(*layers), nn.ReLU()]
    elif what == "unknown schedule":
        options["schedule"] = "1f1g"
    elif what == "too few micro-batches":
        options["micro_batches"] = 1
    elif what == "tied":
        linear = [nn.Linear(8, 8) for _ in range(4)]
        linear[3].weight = linear[0].weight
        layers = [*linear]
    elif what == "no micro-batches":
        options["micro_batches"] = 0
    if what == "run.wrap":
        run.wrap(nn.Sequential(*layers))
    pipe = run.pipeline(layers, loss_of, **options)
    if what == "frozen later":
        pipe.requires_grad_(False)
    if what == "called":
        pipe(torch.ones(4, 4))
    pipe.gradients(torch.ones(3, 4), torch.ones(3))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("too few layers", "run.pipeline: 1 layers with parameters cannot form 2 stages: use --pipeline 1 or less"),
        ("unknown schedule", "run.pipeline: schedule='1f1g': expected '1f1b' or 'gpipe' (did you mean '1f1b'?)"),
        ("too few micro-batches", "run.pipeline: micro_batches=1 with --pipeline 2: 1f1b needs at least as many micro"),
        ("no micro-batches", "run.pipeline: micro_batches=0: expected at least 1"),
        ("tied", "run.pipeline: '0.weight' and '3.weight' are one parameter, but in different stages: untie them,"),
        ("run.wrap", "--pipeline 2 needs run.pipeline(layers, ...) in place of run.wrap"),
        ("called", "this model is in several stages: call its `gradients` to train, and `evaluate` otherwise"),
        (
            "frozen later",
            "run.pipeline: a stage with parameters to train must keep at least one, and a stage without",
        ),
        ("uneven", "run.pipeline: this rank's batch of 3 is not a multiple of micro_batches=2: choose another batch s"),
    ],
)
def test_wrong_use_is_an_error_on_all_ranks(what: str, error: str) -> None:
    layout = Parallelism(pipeline=2).layout(2, 2)
    for answer in run_ranks(train_wrongly, 2, what, may_fail=True, layout=layout):
        assert answer.startswith(f"UserError: {error}")


def evaluate(run: Run) -> dict[str, Any]:
    """Train for two epochs, and evaluate with batches of different sizes, and without samples."""
    run.seed(0)
    pipe = run.pipeline(make_layers(), loss_of, micro_batches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    features = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(features, features.sum(1))
    data = run.loader(dataset, batch_size=8, drop_last=True)
    for _ in range(2):
        for inputs, targets in data:
            pipe.gradients(inputs, targets)
            run.update(optimizer)
    pipe.eval()
    # run.shard sets the buffers of the copies of a stage to those of the first
    found = [pipe.evaluate(inputs, targets, error_and_size) for inputs, targets in run.shard(dataset, batch_size=5)]
    before = [buffer.clone() for buffer in pipe.buffers()]
    loss = float(pipe.evaluate(features, features.sum(1)))
    empty = float(pipe.evaluate(features[:0], features[:0, 0]))
    unchanged = all(torch.equal(old, new) for old, new in zip(before, pipe.buffers(), strict=True))
    total, count = torch.stack(found).sum(0).tolist()
    return {"error": run.mean(total, count), "loss": loss, "empty": empty, "unchanged": unchanged}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "options"), [(2, {"pipeline": 2}), (4, {"pipeline": 2, "strategy": "fsdp"})])
def test_evaluation_equals_that_without_stages(ranks: int, options: dict[str, Any], precision: Precision) -> None:
    # with as many parts of each batch, as batch norm computes the statistics of each part
    alone, *_ = run_ranks(evaluate, ranks // 2)
    layout = Parallelism(**options, precision=precision).layout(ranks, ranks)
    for found in run_ranks(evaluate, ranks, layout=layout):
        close = 1e-5 if precision == "fp32" else 0.02
        assert found["error"] == pytest.approx(alone["error"], rel=close)
        assert found["loss"] == pytest.approx(alone["loss"], rel=close)
        assert found["empty"] == 0
        assert found["unchanged"]


def train_frozen(run: Run, frozen: list[int], epochs: int = 3) -> list[float]:
    layers = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)]
    torch.manual_seed(0)
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.3)
    for index in frozen:
        layers[index].requires_grad_(False)
    pipe = run.pipeline(layers, loss_of, micro_batches=2)
    # some stages have no parameters to train
    trained = [each for each in pipe.parameters() if each.requires_grad]
    weights, biases = ([each for each in trained if each.dim() == dimensions] for dimensions in (2, 1))
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = run.loader(TensorDataset(torch.arange(32.0).reshape(8, 4) / 32, torch.ones(8)), batch_size=8)
    losses = run.meter("loss")
    run.checkpoints(every_steps=1)
    state = run.restore(model=pipe, optimizer=optimizer, schedule=schedule, data=data)
    found = []
    for epoch in state.epochs(epochs):
        for inputs, targets in data:
            losses.add(pipe.gradients(inputs, targets))
            run.update(optimizer, clip=1.0)
        schedule.step()
        found.append(losses.mean())
        run.report(epoch, loss=found[-1])
    return found


@pytest.mark.parametrize("frozen", [[0], [0, 1], [2, 3], [1]])
@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_layers_stay_and_the_others_train(ranks: int, frozen: list[int]) -> None:
    (alone,) = run_ranks(train_frozen, 1, frozen)
    assert alone[0] > alone[2]
    for found in run_ranks(train_frozen, ranks, frozen, layout=Parallelism(pipeline=2).layout(ranks, ranks)):
        assert found == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("frozen", [[0, 1], [2, 3]])
@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (2, 1), (1, 2)])
def test_optimizer_without_parameters_in_a_stage_resumes(
    saved: int, resumed: int, frozen: list[int], tmp_path: Path
) -> None:
    def train(stages: int, epochs: int, folder: Path) -> list[float]:
        found: list[float]
        layout = Parallelism(pipeline=stages).layout(stages, stages)
        found, *others = run_ranks(train_frozen, stages, frozen, epochs, layout=layout, folder=folder)
        assert others == [found] * (stages - 1)
        return found

    uncut = train(1, 4, tmp_path / "uncut")
    train(saved, 2, tmp_path)
    assert train(resumed, 4, tmp_path) == pytest.approx(uncut[2:], abs=1e-6)


def mix_parameters(run: Run) -> None:
    layers = make_layers()
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    pipe = run.pipeline(layers, loss_of, micro_batches=2)
    scale = nn.ParameterList([nn.Parameter(torch.ones(()))])
    trained = [each for each in (*pipe.parameters(), *scale) if each.requires_grad]
    run.restore(model=pipe, scale=scale, optimizer=torch.optim.SGD(trained, lr=0.1))


def test_optimizer_with_parameters_of_some_stages_only_and_others_is_refused() -> None:
    answers = run_ranks(mix_parameters, 2, may_fail=True, layout=Parallelism(pipeline=2).layout(2, 2))
    error = "run.restore(optimizer=...): on some ranks only, it has parameters of a pipeline: create a separate SGD for"
    assert [answer.startswith(f"UserError: {error}") for answer in answers] == [True] * 2, answers


def clip_another_model(run: Run) -> float:
    """Clip the gradient of a model that is not divided, next to one that is; return its norm after the step."""
    pipe = run.pipeline(make_layers(), loss_of, micro_batches=2)
    pipe.gradients(torch.ones(4, 4), torch.ones(4))
    run.update(torch.optim.SGD(pipe.parameters(), lr=0.1), clip=1.0)
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.full((4,), 3.0)
    run.update(optimizer, clip=1.0)
    return float(weight.detach().norm())


def test_gradients_of_another_model_are_clipped_by_their_own_norm() -> None:
    assert run_ranks(clip_another_model, 2, layout=Parallelism(pipeline=2).layout(2, 2)) == [pytest.approx(1.0)] * 2


def restore_wrongly(run: Run, what: str) -> None:
    pipe = run.pipeline(make_layers(), loss_of, micro_batches=2)
    if what == "around":
        run.restore(model=nn.ModuleDict({"pipe": pipe}))
    run.restore(optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("around", "run.restore(model=...): it contains a pipeline: pass the pipeline itself"),
        ("alone", "run.restore(optimizer=...): pass the pipeline of this optimizer, too"),
    ],
)
def test_what_could_not_be_restored_is_refused_before_it_is_saved(what: str, error: str) -> None:
    answers = run_ranks(restore_wrongly, 2, what, may_fail=True, layout=Parallelism(pipeline=2).layout(2, 2))
    assert answers == [f"UserError: {error}"] * 2


def unfreeze_within_a_stage(run: Run) -> list[float]:
    layers = make_layers()
    layers[0].requires_grad_(False)
    pipe = run.pipeline(layers, loss_of, micro_batches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    features = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        if step == 2:
            layers[0].requires_grad_(True)
        losses = pipe.gradients(features, features.sum(1))
        run.update(optimizer)
    return [losses.item(), *layers[0].weight.reshape(-1).tolist()]


def test_layers_are_unfrozen_within_a_stage_that_is_trained() -> None:
    alone = run_ranks(unfreeze_within_a_stage, 1)[0]
    first, last = run_ranks(unfreeze_within_a_stage, 2, layout=Parallelism(pipeline=2).layout(2, 2))
    assert first == pytest.approx(alone, abs=1e-6)
    assert last[0] == first[0]


class InTuple(nn.Linear):
    def forward(self, inputs: Any) -> Any:
        return (super().forward(inputs),)


def train_with_a_tuple(run: Run) -> None:
    pipe = run.pipeline([InTuple(4, 8), nn.Linear(8, 1)], loss_of, micro_batches=2)
    pipe.gradients(torch.ones(4, 4), torch.ones(4))


def test_tuple_of_one_between_stages_is_refused() -> None:
    told, _ = run_ranks(train_with_a_tuple, 2, may_fail=True, layout=Parallelism(pipeline=2).layout(2, 2))
    assert told.startswith("UserError: run.pipeline: the InTuple, the last layer of a stage, returns a tuple of one,")


def evaluate_many_sizes(run: Run) -> list[float]:
    layers = make_layers()
    layers[1].eval()
    pipe = run.pipeline(layers, loss_of, micro_batches=2)
    found = [pipe.evaluate(torch.ones(size, 4), torch.ones(size)).item() for size in (*range(1, 12), 1, 2)]
    if pipe._transport is not None:
        assert len(pipe._transport._schedules) == MOST_SCHEDULES
    return found


def test_buffers_of_a_limited_number_of_input_shapes_are_kept() -> None:
    alone = run_ranks(evaluate_many_sizes, 1)[0]
    for found in run_ranks(evaluate_many_sizes, 2, layout=Parallelism(pipeline=2).layout(2, 2)):
        assert found == pytest.approx(alone, abs=1e-6)


def names_of_compiled(run: Run) -> list[str]:
    layers: list[Any] = [torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 1)]
    return run.pipeline(layers, loss_of, micro_batches=2).parameter_names


def test_names_are_those_of_layers_that_are_not_compiled() -> None:
    for names in run_ranks(names_of_compiled, 2, layout=Parallelism(pipeline=2).layout(2, 2)):
        assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


class Failing(nn.Module):
    """A layer that fails in one of the passes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(4, 4), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward" and x.device.type != "meta":
            raise ValueError("as requested")
        out: torch.Tensor = self.linear(x)
        if self.where == "backward" and out.requires_grad and x.device.type != "meta":
            out.register_hook(self.fail)
        return out

    def fail(self, grad: torch.Tensor) -> None:
        raise ValueError("as requested")


def train_failing(run: Run, where: str) -> None:
    pipe = run.pipeline([nn.Linear(4, 4), Failing(where), nn.Linear(4, 1)], loss_of, micro_batches=2)
    pipe.gradients(torch.ones(4, 4), torch.ones(4))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_error_of_a_layer_is_raised_as_it_is(where: str) -> None:
    answers = run_ranks(train_failing, 2, where, may_fail=True, layout=Parallelism(pipeline=2).layout(2, 2))
    assert "ValueError: as requested" in answers
    # the other rank loses its connection
    assert all(answer.startswith(("ValueError", "RuntimeError: [")) for answer in answers)


class Scaled(nn.Module):
    """A layer whose output depends on a value, which the meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).T.contiguous().T * (2.0 if x.sum().item() > 0 else 1.0)


def train_value_dependent(run: Run) -> list[float]:
    torch.manual_seed(0)
    pipe = run.pipeline([Scaled(), Scaled(), nn.Linear(4, 1)], loss_of, micro_batches=2)
    torch.manual_seed(1)
    return [float(pipe.gradients(torch.randn(4, 4), torch.zeros(4))) for _ in range(2)]


def test_layer_whose_shape_must_be_found_by_running_it_works() -> None:
    (alone,) = run_ranks(train_value_dependent, 1)
    for found in run_ranks(train_value_dependent, 2, layout=Parallelism(pipeline=2).layout(2, 2)):
        assert found == pytest.approx(alone)
