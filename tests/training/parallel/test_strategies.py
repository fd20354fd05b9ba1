"""Each strategy trains like one process, and resumes from its own checkpoints and from those of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints import reader
from mgpu_slurm.checkpoints.state import optimizer_state
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.request.parallelism import Parallelism, Strategy
from mgpu_slurm.training.parallel.pipeline import Schedule
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import with_long

SAMPLES, BATCH, EPOCHS = 26, 8, 4
"""The last batch of an epoch has two samples: with four ranks, two have none."""
STEPS = 16
SAMPLES_OF_PIPELINES = 34
"""Pipelines drop the last batch, which cannot be divided into micro-batches."""
PLAN = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))


def make_model(rank: int, dropout: float) -> nn.Sequential:
    # rank 0's values count
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(6, 16), Block(16, dropout), Block(16, dropout), nn.Linear(16, 1))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.mean(1) - targets).square().mean()


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def train(
    run: Run, kind: str, schedule: Schedule | None, stop_at: int | None = None, dropout: float = 0.0, parts: int = 2
) -> dict[str, Any]:
    """Train with clipping, accumulation and uneven last batches; stop after a step if requested.

    Args:
        schedule: that of a pipeline; None for a model that is wrapped.
    """
    run.seed(3, deterministic=True)
    layers = make_model(run.rank, dropout)
    samples = SAMPLES if schedule is None else SAMPLES_OF_PIPELINES
    pipe = None
    model: nn.Module
    if schedule is None:
        model = run.wrap(layers, blocks=(Block,), plan=PLAN)
    else:
        model = pipe = run.pipeline([*layers], loss_of, micro_batches=4, schedule=schedule)
    optimizer: torch.optim.Optimizer
    # the order of the groups is not that of the parameters
    groups = [[each for each in model.parameters() if each.ndim == dimensions] for dimensions in (2, 1)]
    if kind == "one group":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    elif kind == "sgd":
        optimizer = torch.optim.SGD([{"params": groups[0]}, {"params": groups[1], "lr": 0.04}], lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01)
    features = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(features, features.sum(1))
    data = run.loader(dataset, batch_size=BATCH, shuffle=True, drop_last=schedule is not None)
    losses = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, data=data)
    began = state.step
    try:
        for epoch in state.epochs(EPOCHS):
            for inputs, targets in data:
                if pipe is not None:
                    losses.add(pipe.gradients(inputs, targets))
                else:
                    for part, target in run.accumulate((inputs, targets), parts):
                        loss = loss_of(model(part), target)
                        run.backward(loss)
                        losses.add(loss)
                run.update(optimizer, clip=0.5)
                if run.step == stop_at and run.rank == run.world_size - 1:
                    run._loop_control.stop.asked = Stop.END
            run.report(epoch, loss=losses.mean())
    except BaseException as stopped:
        if type(stopped).__name__ != "RunStopped":
            raise
    held = {name: whole(each).reshape(-1).tolist() for name, each in model.named_parameters()}
    return {
        "began": began,
        "step": run.step,
        "loss": run.last_metrics.get("loss"),
        "held": {name.removeprefix("module."): values for name, values in held.items()},
        "local": sum(getattr(each, "_local_tensor", each).numel() for each in model.parameters()),
    }


def weights_of(answers: list[dict[str, Any]]) -> list[float]:
    """Return the weights of the whole model; all ranks that hold a parameter must agree exactly."""
    found: dict[str, list[float]] = {}
    for answer in answers:
        for name, values in answer["held"].items():
            assert found.setdefault(name, values) == values, name
    return [value for name in sorted(found) for value in found[name]]


LAYOUTS: dict[str, tuple[int, Parallelism]] = {
    "one": (1, Parallelism()),
    "ddp2": (2, Parallelism("ddp")),
    "zero2x2": (2, Parallelism("zero2")),
    "fsdp2": (2, Parallelism("fsdp")),
    "fsdp3": (3, Parallelism("fsdp")),
    "fsdp4": (4, Parallelism("fsdp")),
    "hsdp4": (4, Parallelism("hsdp", shard=2)),
    "tensor2": (2, Parallelism(tensor=2)),
    "fsdp2 x tensor2": (4, Parallelism("fsdp", tensor=2)),
    "hsdp2x2 x tensor2": (8, Parallelism("hsdp", shard=2, tensor=2)),
    "pipeline1": (1, Parallelism()),
    "pipeline1 x ddp2": (2, Parallelism()),
    "pipeline2": (2, Parallelism(pipeline=2)),
    "pipeline4": (4, Parallelism(pipeline=4)),
    "pipeline2 x ddp2": (4, Parallelism(pipeline=2)),
    "pipeline2 x fsdp2": (4, Parallelism("fsdp", pipeline=2)),
    "pipeline4 x ddp2": (8, Parallelism(pipeline=4)),
    "pipeline4 x fsdp2": (8, Parallelism("fsdp", pipeline=4)),
}
"""Number of ranks, and options. A name that begins with `pipeline` trains through `run.pipeline`."""

PARTS = {"ddp2": 1, "zero2x2": 2, "fsdp2": 2, "fsdp3": 3, "fsdp4": 4, "hsdp4": 2}
"""How many ranks hold a parameter together."""


def is_pipeline(name: str) -> bool:
    return name.startswith("pipeline")


def run_named(name: str, kind: str, *arguments: Any, folder: Path, schedule: Schedule = "1f1b") -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    ranks, options = LAYOUTS[name]
    given = (kind, schedule if is_pipeline(name) else None, *arguments)
    found: list[dict[str, Any]] = run_ranks(train, ranks, *given, folder=folder, layout=options.layout(ranks, ranks))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[list[float], float]]:
    """The weights and the last loss of one process, by optimizer, and whether as a pipeline of one stage."""
    found = {}
    for kind in ("sgd", "adamw"):
        for name in ("one", "pipeline1"):
            answers = run_named(name, kind, folder=tmp_path_factory.mktemp(f"{kind}-{name}"))
            found[kind, is_pipeline(name)] = weights_of(answers), answers[0]["loss"]
    return found


LARGE = {"fsdp4", "pipeline4 x ddp2", "pipeline4 x fsdp2", "hsdp2x2 x tensor2"}
"""Of which there are smaller ones of the same kind."""
OF_SEVERAL = [name for name in LAYOUTS if name not in ("one", "pipeline1")]


@pytest.mark.parametrize(
    ("name", "kind"),
    with_long(
        [(name, kind) for name in OF_SEVERAL for kind in ("sgd", "adamw")],
        [*((name, "sgd") for name in OF_SEVERAL if name not in LARGE), ("zero2x2", "adamw")],
    ),
)
def test_strategy_trains_like_one_process(
    name: str, kind: str, alone: dict[tuple[str, bool], tuple[list[float], float]], tmp_path: Path
) -> None:
    tolerance = 1e-6 if kind == "sgd" else 2e-5
    answers = run_named(name, kind, folder=tmp_path)
    assert {answer["step"] for answer in answers} == {STEPS}
    weights, loss = alone[kind, is_pipeline(name)]
    assert weights_of(answers) == pytest.approx(weights, rel=0, abs=tolerance)
    assert [answer["loss"] for answer in answers] == pytest.approx([loss] * len(answers), abs=1e-5)
    if name in PARTS:
        # rows are divided unevenly if there are not enough
        assert max(answer["local"] for answer in answers) <= len(weights) / PARTS[name] * 1.2


@pytest.mark.parametrize(
    "name",
    with_long(["pipeline2", "pipeline4", "pipeline2 x ddp2", "pipeline2 x fsdp2"], {"pipeline2", "pipeline2 x ddp2"}),
)
def test_gpipe_trains_like_one_process(
    name: str, alone: dict[tuple[str, bool], tuple[list[float], float]], tmp_path: Path
) -> None:
    answers = run_named(name, "sgd", folder=tmp_path, schedule="gpipe")
    assert weights_of(answers) == pytest.approx(alone["sgd", True][0], rel=0, abs=1e-6)


@pytest.mark.parametrize(
    "name",
    with_long(
        [
            "ddp2",
            "zero2x2",
            "fsdp2",
            "fsdp4",
            "hsdp4",
            "tensor2",
            "fsdp2 x tensor2",
            "pipeline2",
            "pipeline4",
            "pipeline2 x ddp2",
            "pipeline2 x fsdp2",
        ],
        {"ddp2", "zero2x2", "fsdp2", "tensor2", "pipeline2", "pipeline2 x fsdp2"},
    ),
)
def test_strategy_stops_and_resumes_bit_for_bit_in_the_middle_of_an_epoch(name: str, tmp_path: Path) -> None:
    undisturbed = run_named(name, "adamw", None, 0.2, folder=tmp_path / "whole")
    begun = run_named(name, "adamw", 6, 0.2, folder=tmp_path / "parts")
    rest = run_named(name, "adamw", None, 0.2, folder=tmp_path / "parts")
    assert {answer["began"] for answer in rest} <= {6, 7}
    # one rank was asked, and all stop at the same step
    assert {answer["step"] for answer in begun} in ({6}, {7})
    for one, other in zip(undisturbed, rest, strict=True):
        assert one["held"] == other["held"]
        assert one["loss"] == other["loss"]


PAIRS = [
    ("fsdp4", "fsdp2"),
    ("fsdp2", "fsdp4"),
    ("fsdp2", "one"),
    ("one", "fsdp2"),
    ("ddp2", "fsdp4"),
    ("fsdp4", "ddp2"),
    ("fsdp2", "ddp2"),
    ("ddp2", "fsdp2"),
    ("hsdp4", "fsdp2"),
    ("fsdp2", "hsdp4"),
    ("zero2x2", "fsdp3"),
    ("tensor2", "fsdp2"),
    ("fsdp2", "tensor2"),
    ("ddp2", "tensor2"),
    ("tensor2", "one"),
    ("fsdp2 x tensor2", "one"),
    ("one", "fsdp2 x tensor2"),
    ("fsdp4", "fsdp2 x tensor2"),
    ("fsdp2 x tensor2", "fsdp4"),
    ("pipeline2", "pipeline4"),
    ("pipeline4", "pipeline2"),
    ("pipeline2 x ddp2", "pipeline2"),
    ("pipeline2", "pipeline2 x fsdp2"),
    ("pipeline1 x ddp2", "pipeline2"),
    ("pipeline2", "pipeline1"),
]


@pytest.mark.parametrize(("before", "after"), with_long(PAIRS, PAIRS[::3]))
def test_strategy_resumes_from_checkpoints_of_another(
    before: str, after: str, alone: dict[tuple[str, bool], tuple[list[float], float]], tmp_path: Path
) -> None:
    kind = "adamw" if "tensor" in before + after or is_pipeline(before) else "sgd"
    run_named(before, kind, 6, folder=tmp_path)
    rest = run_named(after, kind, folder=tmp_path)
    assert {answer["began"] for answer in rest} <= {6, 7}
    weights, loss = alone[kind, is_pipeline(after)]
    assert weights_of(rest) == pytest.approx(weights, rel=0, abs=1e-6 if kind == "sgd" else 2e-5)
    # of an epoch that has been continued
    assert rest[0]["loss"] == pytest.approx(loss, abs=1e-5)


def test_tensor_parallel_ranks_draw_the_same_after_another_layout(tmp_path: Path) -> None:
    run_named("fsdp2", "adamw", 6, 0.2, folder=tmp_path)
    # parameters that all ranks hold would drift apart, which `weights_of` finds
    weights_of(run_named("tensor2", "adamw", None, 0.2, folder=tmp_path))


class Counter:
    """A state that differs between ranks."""

    def __init__(self, rank: int) -> None:
        self.count = rank

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train_with_counter(run: Run, steps: int) -> tuple[int, dict[str, list[float]]]:
    pipe = run.pipeline([*make_model(0, 0.0)], loss_of, micro_batches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    counter = Counter(run.rank)
    run.restore(model=pipe, optimizer=optimizer, counter=counter)
    while run.step < steps:
        pipe.gradients(torch.ones(4, 6), torch.ones(4))
        run.update(optimizer)
    run.save()
    run.finish()
    return counter.count, {name: each.tolist() for name, each in pipe.named_parameters()}


def test_own_state_of_a_rank_is_restored_next_to_stages(tmp_path: Path) -> None:
    saved = run_ranks(train_with_counter, 2, 2, folder=tmp_path, layout=Parallelism(pipeline=2).layout(2, 2))
    whole = saved[0][1] | saved[1][1]
    # without stages now, on as many ranks
    for rank, (count, weights) in enumerate(run_ranks(train_with_counter, 2, 2, folder=tmp_path)):
        assert (count, weights) == (rank, whole)


def resume_recording_reads(run: Run, kind: str, schedule: Schedule | None) -> set[str]:
    """Return the parameters of which this rank reads anything."""
    read: set[str] = set()
    region = reader.StoredTensors._region

    def record(stored: reader.StoredTensors, name: str, *where: Any) -> torch.Tensor:
        read.add(name)
        return region(stored, name, *where)

    reader.StoredTensors._region = record  # type: ignore[method-assign, assignment]
    train(run, kind, schedule)
    return {name for name in read if name.startswith(("model.", "optimizer.state."))}


def train_as_an_earlier_version(run: Run, kind: str) -> None:
    """Save optimizer states without the names of parameters."""
    optimizer_state.named = lambda state, *_: state
    train(run, kind, "1f1b", 6)


@pytest.mark.parametrize("kind", ["one group", "sgd"])
def test_pipeline_resumes_from_a_checkpoint_without_names_of_parameters(kind: str, tmp_path: Path) -> None:
    expected = weights_of(run_named("pipeline1", kind, folder=tmp_path / "whole"))
    (tmp_path / "parts").mkdir()
    run_ranks(train_as_an_earlier_version, 2, kind, folder=tmp_path / "parts")
    if kind == "one group":
        # they are in the model's order
        found = weights_of(run_named("pipeline2", kind, folder=tmp_path / "parts"))
        assert found == pytest.approx(expected, rel=0, abs=1e-6)
        return
    layout = Parallelism(pipeline=2).layout(2, 2)
    for answer in run_ranks(train, 2, kind, "1f1b", folder=tmp_path / "parts", layout=layout, may_fail=True):
        assert "UserError: this checkpoint does not name the optimizer's parameters, as it is of an earl" in str(answer)
    # without stages, numbers will do
    found = weights_of(run_named("pipeline1 x ddp2", kind, folder=tmp_path / "parts"))
    assert found == pytest.approx(expected, rel=0, abs=1e-6)


def test_stage_reads_only_its_own_layers(tmp_path: Path) -> None:
    run_named("pipeline1 x ddp2", "adamw", 6, folder=tmp_path)
    layout = Parallelism(pipeline=2).layout(2, 2)
    first, second = run_ranks(resume_recording_reads, 2, "adamw", "1f1b", folder=tmp_path, layout=layout)
    assert "optimizer.state.model.0.weight.exp_avg" in first
    assert "optimizer.state.model.3.weight.exp_avg" in second
    assert not first & second


def count_exchanges(run: Run) -> int:
    """Return the number of all-reduces of gradients in a step of four micro-batches."""
    model = run.wrap(make_model(0, 0.0), blocks=(Block,))
    counted = 0
    all_reduce = torch.distributed.all_reduce

    def count(*arguments: Any, **options: Any) -> Any:
        nonlocal counted
        counted += 1
        return all_reduce(*arguments, **options)

    torch.distributed.all_reduce = count
    (batch,) = next(iter(run.loader(TensorDataset(torch.ones(32, 6)), batch_size=32)))
    for part in run.accumulate(batch, 4):
        run.backward(model(part).square().mean())
    return counted


def test_copies_of_a_sharded_model_exchange_gradients_once_in_a_step() -> None:
    # once for each block, and the layers around them
    assert run_ranks(count_exchanges, 4, layout=Parallelism("hsdp", shard=2).layout(4, 4)) == [3] * 4


def evaluate_first(run: Run) -> list[bool]:
    """Create the optimizer after an evaluation, and return which parameters it changes."""
    model = run.wrap(make_model(0, 0.0), blocks=(Block,))
    with torch.no_grad():
        model(torch.ones(2, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [whole(each) for each in model.parameters()]
    run.backward(model(torch.randn(4, 6)).square().mean())
    run.update(optimizer)
    return [not torch.equal(old, whole(new)) for old, new in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_optimizer_created_after_an_evaluation_trains_all_parameters(strategy: Strategy) -> None:
    for changed in run_ranks(evaluate_first, 2, layout=Parallelism(strategy).layout(2, 2)):
        assert all(changed)


def wrap_wrongly(run: Run, what: str) -> None:
    model = make_model(0, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "no blocks":
        run.wrap(model)
    elif what == "other blocks":
        run.wrap(model, blocks=(nn.TransformerEncoderLayer,))
    elif what == "a part first":
        part = run.wrap(model, blocks=(Block,))
        run.wrap(nn.Sequential(part, nn.Linear(1, 1)), blocks=(Block,))
    elif what == "restores an early optimizer":
        model = run.wrap(model, blocks=(Block,))
        run.restore(model=model, optimizer=optimizer)
    else:
        model = run.wrap(model, blocks=(Block,))
        run.backward(model(torch.ones(2, 6)).mean())
        run.update(optimizer)


EARLY = "UserError: the SGD was created before run.wrap, which replaced the model's parameters: create it afterwards"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("no blocks", "UserError: run.wrap: --strategy fsdp needs blocks=(...), the classes of the model's repeated"),
        ("other blocks", "UserError: run.wrap(blocks=...): the Sequential contains no TransformerEncoderLayer"),
        ("a part first", "UserError: run.wrap: only a part of the Sequential is sharded: call run.wrap once, with the"),
        ("restores an early optimizer", EARLY),
        ("updates an early optimizer", EARLY),
    ],
)
def test_wrong_use_is_an_error(what: str, error: str) -> None:
    for answer in run_ranks(wrap_wrongly, 2, what, may_fail=True, layout=Parallelism("fsdp").layout(2, 2)):
        assert answer.startswith(error)


@pytest.mark.parametrize(
    ("what", "error"),
    [("no blocks", "UserError: run.wrap: --strategy fsdp needs blocks"), ("other blocks", "UserError: run.wrap(block")],
)
def test_missing_blocks_are_an_error_on_one_rank_too(what: str, error: str) -> None:
    (answer,) = run_ranks(wrap_wrongly, 1, what, may_fail=True, layout=Parallelism("fsdp").layout(1, 1))
    assert answer.startswith(error)
