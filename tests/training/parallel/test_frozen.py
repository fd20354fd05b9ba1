"""Parameters that are frozen and unfrozen after `run.wrap`, and models that it never got."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 34, 8, 4
"""The last batch of an epoch has two samples: with three ranks, one has none."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def data_of(run: Run) -> Any:
    features = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return run.loader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)


def whole(tensor: Any) -> list[float]:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    values: list[float] = found.detach().reshape(-1).tolist()
    return values


def weights_of(answers: list[list[float]]) -> list[float]:
    """Return the weights, which all ranks must agree on exactly."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def unfreeze_by_layer(run: Run) -> list[float]:
    """Train the head; then one more layer; then all; then all but the head."""
    run.seed(0, deterministic=True)
    layers = make_model()
    layers[:4].requires_grad_(False)
    model = run.wrap(layers, blocks=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = data_of(run)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    for _ in state.epochs(EPOCHS):
        for batch in data:
            for inputs, targets in run.accumulate(batch, 2):
                loss = nn.functional.mse_loss(model(inputs), targets)
                run.backward(loss)
            run.update(optimizer, clip=0.5)
            if run.step == 3:
                layers[2].requires_grad_(True)
            if run.step == 7:
                layers[0].requires_grad_(True)
            if run.step == 13:
                layers[4].requires_grad_(False)
    return [value for each in model.parameters() for value in whole(each)]


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [(2, Parallelism()), (3, Parallelism()), (2, Parallelism("fsdp")), (2, Parallelism("zero2"))],
    ids=["ddp", "ddp of three", "fsdp", "zero2"],
)
def test_layers_unfrozen_later_are_trained_as_in_one_process(ranks: int, parallelism: Parallelism) -> None:
    found = weights_of(run_ranks(unfreeze_by_layer, ranks, layout=parallelism.layout(ranks, ranks)))
    alone = weights_of(run_ranks(unfreeze_by_layer, 1))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=1e-6, rtol=0)


def alternate(run: Run) -> list[float]:
    """Train a generator through a frozen discriminator, then the discriminator, in each step."""
    torch.manual_seed(0)
    generator = run.wrap(nn.Linear(6, 6))
    discriminator = run.wrap(nn.Linear(6, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, discriminator)]
    features = torch.randn(8, 6, generator=torch.Generator().manual_seed(run.rank))
    for _ in range(3):
        discriminator.requires_grad_(False)
        run.backward(discriminator(generator(features)).square().mean())
        run.update(optimizers[0])
        discriminator.requires_grad_(True)
        run.backward((discriminator(features) - discriminator(generator(features).detach())).square().mean())
        run.update(optimizers[1])
    return [value for model in (generator, discriminator) for each in model.parameters() for value in whole(each)]


def test_discriminator_frozen_in_each_step_stays_equal_on_all_ranks() -> None:
    weights_of(run_ranks(alternate, 2))


def train_with_a_hook(run: Run) -> list[float]:
    """Train with gradients that a hook of the job exchanges, before and after more layers are unfrozen."""
    layers = make_model()
    layers[0].requires_grad_(False)
    model: Any = run.wrap(layers)
    calls = []

    def exchange(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        dist.all_reduce(bucket.buffer())
        done.set_result(bucket.buffer() / run.world_size)
        return done

    # DDP does not accept those that are text
    exchange.__annotations__.clear()
    model.register_comm_hook(None, exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            layers[0].requires_grad_(True)
            calls.clear()
        run.backward(model(torch.full((2, 6), run.rank + 1.0)).mean())
        run.update(optimizer)
    assert calls
    return [value for each in model.parameters() for value in whole(each)]


def test_hook_that_exchanges_gradients_is_kept() -> None:
    weights_of(run_ranks(train_with_a_hook, 2))


def train(run: Run, kind: str) -> None:
    """Train for two steps, and meet the other ranks."""
    model: nn.Module = make_model()
    head = nn.Linear(1, 1)
    if kind == "frozen":
        model.requires_grad_(False)
        model = run.wrap(model).requires_grad_(True)
    elif kind == "in DDP of the job":
        model = DistributedDataParallel(model)
    elif kind in ("head", "called in part"):
        model = run.wrap(model)
    elif kind == "differently frozen":
        model = run.wrap(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = torch.optim.SGD([*model.parameters(), *(head.parameters() if kind == "head" else [])], lr=0.1)
    for step in range(2):
        if kind == "differently frozen":
            model.get_submodule(str(run.rank)).requires_grad_(step == 0)
        called = model[0] if kind == "called in part" else model  # type: ignore[operator]
        outputs = called(torch.full((2, 6), run.rank + 1.0))
        run.backward((head(outputs) if kind == "head" and step == 1 else outputs).mean())
        if kind == "exchanged by the job":
            for each in model.parameters():
                dist.all_reduce(each.grad)
        if kind == "step":
            optimizer.step()
        elif kind != "on one rank" or run.is_main:
            run.update(optimizer)
    run.finish()


@pytest.mark.parametrize("kind", ["in DDP of the job", "exchanged by the job", "step"])
def test_models_that_the_job_itself_keeps_equal_or_not_are_left_alone(kind: str) -> None:
    run_ranks(train, 2, kind)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (
            "not wrapped",
            "run.update: gradients of 6 of the SGD's 6 parameters differ between ranks, because their model was not"
            " returned by run.wrap: wrap it, or exchange its gradients before run.update (if each rank is to train"
            " another model, call optimizer.step())",
        ),
        # it has no gradients in the first step
        ("head", "run.update: gradients of 2 of the SGD's 8 parameters differ between ranks, because their model was"),
        ("on one rank", "run.update: gradients of 6 of the SGD's 6 parameters differ between ranks"),
        (
            "called in part",
            "run.update: gradients of a Sequential differ between ranks, because only parts of it were called: ranks"
            " exchange gradients when the model itself is called, so compute the loss from its outputs",
        ),
        (
            "frozen",
            "run.update: the Sequential was entirely frozen when it was passed to run.wrap, so ranks do not exchange"
            " its gradients: freeze it after run.wrap, and unfreeze it later",
        ),
        (
            "differently frozen",
            "run.wrap: ranks have frozen different parameters of a model: freeze and unfreeze the same ones at the same"
            " step on all ranks",
        ),
    ],
)
def test_ranks_that_train_different_models_fail_when_they_meet(kind: str, error: str) -> None:
    told = run_ranks(train, 2, kind, may_fail=True)
    assert told[0].startswith(f"UserError: {error}")
    assert all(each.startswith("UserError: run.") for each in told)


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        (Parallelism(pipeline=2), "--pipeline 2 has no effect: no model was passed to run.pipeline"),
        (Parallelism(tensor=2), "--tensor 2 has no effect: no model was passed to run.wrap"),
        (Parallelism("fsdp"), "--strategy fsdp has no effect: no model was passed to run.wrap"),
        (
            Parallelism(precision="bf16", tensor=2),
            "--tensor 2 --precision bf16 have no effect: no model was passed to run.wrap",
        ),
    ],
    ids=["pipeline", "tensor", "fsdp", "bf16"],
)
def test_model_that_is_to_be_divided_but_was_not_passed_on_is_refused(layout: Parallelism, error: str) -> None:
    told = run_ranks(train, 2, "not wrapped", may_fail=True, layout=layout.layout(2, 2))
    assert told == 2 * [f"UserError: {error}"]


def compute_without_gradients(run: Run) -> None:
    model = run.wrap(make_model().requires_grad_(False))
    run.backward(model(torch.ones(2, 6)).mean())


def test_loss_without_trained_parameters_is_an_error() -> None:
    (told,) = run_ranks(compute_without_gradients, 1, may_fail=True)
    assert told == (
        "UserError: run.backward: the loss depends on no trained parameter: unfreeze one, and compute the loss without"
        " torch.no_grad()"
    )


def train_a_frozen_pipeline(run: Run) -> None:
    pipe = run.pipeline([*make_model().requires_grad_(False)], nn.functional.mse_loss, micro_batches=2)
    pipe.requires_grad_(True)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.gradients(torch.full((2, 6), run.rank + 1.0), torch.ones(2, 1))
    run.update(optimizer)
    run.finish()


def test_pipeline_of_one_stage_that_was_entirely_frozen_is_refused() -> None:
    for told in run_ranks(train_a_frozen_pipeline, 2, may_fail=True):
        assert told.startswith("UserError: run.update: the Pipeline was entirely frozen when it was passed to run.pipe")


def train_a_parameter_of_the_loss(run: Run) -> None:
    """Train one that only the last stage has."""
    scale = nn.Parameter(torch.ones(()))
    pipe = run.pipeline([*make_model()], lambda outputs, _: (scale * outputs).mean(), micro_batches=2)
    own = [scale] if run.rank == 1 else []
    optimizer = torch.optim.SGD([*pipe.parameters(), *own], lr=0.1)
    pipe.gradients(torch.ones(2, 6), torch.ones(2, 1))
    run.update(optimizer)
    run.finish()
    assert (scale.item() != 1) == (run.rank == 1)


def test_parameter_of_one_stage_only_is_trained() -> None:
    run_ranks(train_a_parameter_of_the_loss, 2, layout=Parallelism(pipeline=2).layout(2, 2))


def leave_out_parameters(run: Run) -> None:
    """Train parts of a model alternately, of which one is in the graph of neither."""
    layers = nn.ModuleDict({"generator": nn.Linear(6, 6), "discriminator": nn.Linear(6, 1)})
    layers.forward = lambda x: layers["discriminator"](layers["generator"](x).detach())
    model = run.wrap(layers)
    for is_trained in (True, False):
        layers["discriminator"].requires_grad_(True)
        layers["generator"].requires_grad_(is_trained)
        run.backward(model(torch.ones(2, 6)).mean())


def test_parameters_without_gradients_are_reported_before_others_are_frozen() -> None:
    for told in run_ranks(leave_out_parameters, 2, may_fail=True):
        assert told.startswith("RuntimeError: Expected to have finished reduction in the prior iteration")
