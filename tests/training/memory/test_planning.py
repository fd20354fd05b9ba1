"""The memory that a job would take, found with fake tensors, is what torch tracks when it trains with real ones."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, TensorDataset

from jobs import digits, gpt, gpt_pipeline, images, resnet_split
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.request.parallelism import Layout, Parallelism
from mgpu_slurm.run_folder.record_types import MemoryPlan
from mgpu_slurm.training.memory import fake_torch_adapter, planning
from mgpu_slurm.training.memory.planned_run import STEPS
from mgpu_slurm.training.run import Run
from tests.forks import in_fork
from tests.ranks import run_ranks
from tests.support import with_long

WIDTH = 128
PLAN = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Images(nn.Sequential):
    """Has buffers, and an activation that is computed in place."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10))


def square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def samples_of(how: str = "text", **_: Any) -> TensorDataset:
    shape, width = ((3, 16, 16), 10) if how == "images" else ((WIDTH,), WIDTH)
    return TensorDataset(torch.randn(1024, *shape), torch.randn(1024, width))


def train(
    run: Run,
    samples: TensorDataset,
    how: str = "text",
    recompute: bool = False,
    foreach: bool | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Take two steps.

    Args:
        foreach: whether to update all parameters together, as GPUs do by default.
        begin: called before the first step.
    """
    run.seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, WIDTH)]
    model: Any
    if how == "images":
        model = run.wrap(Images())
    elif how == "pipeline":
        model = run.pipeline(layers, square, micro_batches=4)
    else:
        model = run.wrap(nn.Sequential(*layers), blocks=(Block,), plan=PLAN, recompute=recompute)
    del layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    data = run.loader(samples, batch_size=512, shuffle=True)
    losses = run.meter("loss")
    # not restored, as the copy for a checkpoint would be in the same memory here
    begin()
    for epoch in range(1, 4):
        for inputs, targets in data:
            if how == "pipeline":
                loss = model.gradients(inputs, targets)
            else:
                loss = square(model(inputs), targets)
                run.backward(loss)
            run.update(optimizer, clip=1.0)
            losses.add(loss)
        if run.step >= STEPS:
            return
        run.report(epoch, loss=losses.mean())


def measured_alone(facts: RankInfo, layout: Layout, options: dict[str, Any]) -> int:
    """Return the peak of a rank's memory if the others do not exist: gloo, unlike NCCL, copies what it exchanges."""
    torch.set_num_threads(1)
    if facts.world_size > 1:
        fake_torch_adapter.join_fake_group(facts.rank, facts.world_size)
    alone = Collectives(RankInfo())
    with TemporaryDirectory() as folder, fake_torch_adapter.exchanging_nothing(nullcontext):
        return measured(Run(facts, Path(folder), torch.device("cpu"), 1, StopFlag(), alone, layout=layout), options)


def measured(run: Run, options: dict[str, Any]) -> int:
    """Return the peak of the memory that torch allocates for real tensors, by its profiler."""
    before, during = (profile(activities=[ProfilerActivity.CPU], profile_memory=True) for _ in range(2))

    def begin() -> None:
        gc.collect()
        before.stop()
        during.start()

    samples = samples_of(**options)
    before.start()
    train(run, samples, begin=begin, **options)
    during.stop()
    return allocations(before)[-1] + max(allocations(during))


def allocations(recorded: profile) -> list[int]:
    """Return how many bytes more were allocated after each allocation than at the start."""
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()) if event.name() == "[memory]"
    ]
    return [*accumulate(sizes)]


def planned(facts: RankInfo, layout: Layout, options: dict[str, Any]) -> MemoryPlan:
    with TemporaryDirectory() as folder:
        return planning.plan(lambda run: train(run, samples_of(**options), **options), facts, layout, Path(folder))


CASES: dict[str, tuple[int, Parallelism, dict[str, Any]]] = {
    "one rank": (1, Parallelism(), {}),
    "batch norm": (1, Parallelism(), {"how": "images"}),
    "recompute": (1, Parallelism(), {"recompute": True}),
    "ddp": (2, Parallelism(), {}),
    "fsdp": (2, Parallelism("fsdp"), {}),
    "fsdp bf16": (2, Parallelism("fsdp", precision="bf16"), {}),
    "zero2": (2, Parallelism("zero2"), {}),
    "hsdp": (4, Parallelism("hsdp", shard=2), {}),
    "fsdp, tensor": (4, Parallelism("fsdp", tensor=2), {}),
    "tensor": (2, Parallelism(tensor=2), {}),
}


@pytest.mark.parametrize("case", with_long(CASES, {*CASES} - {"fsdp bf16", "zero2", "fsdp, tensor"}))
def test_planned_memory_is_that_of_real_training(case: str) -> None:
    ranks, parallelism, options = CASES[case]
    layout, facts = parallelism.layout(ranks, ranks), RankInfo(0, ranks)
    plan = in_fork(planned, facts, layout, options)
    if isinstance(plan, UserError):
        raise plan
    assert sum(plan.kinds.values()) == plan.peak
    # on CPUs, torch's optimizers update one parameter at a time by default, as they have to with --tensor
    foreach = None if layout.tensor > 1 else True
    assert plan.peak == pytest.approx(in_fork(measured_alone, facts, layout, options | {"foreach": foreach}), rel=0.005)


@pytest.mark.needs_torch("2.13")
def test_planned_memory_of_each_stage_is_that_of_real_training() -> None:
    layout, options = Parallelism(pipeline=2).layout(2, 2), {"how": "pipeline"}
    peaks = run_ranks(measured, 2, options | {"foreach": True}, layout=layout)
    plans = [in_fork(planned, RankInfo(rank, 2), layout, options) for rank in range(2)]
    assert [plan.peak for plan in plans] == [pytest.approx(peak, rel=0.02) for peak in peaks]
    # the last stage needs activations of one micro-batch at a time, the first one of two
    assert plans[0].kinds["activations"] > 1.5 * plans[1].kinds["activations"]


JOBS: dict[str, tuple[Any, Any]] = {
    "digits": (digits, digits.Config()),
    "gpt": (gpt, gpt.Config(layers=2, recompute=True)),
    "gpt_pipeline": (gpt_pipeline, gpt_pipeline.Config(layers=2)),
    "images": (images, images.Config(dataset="fake", size=32, batch_size=8, ema=0.9, mixup=0.2)),
    "resnet_split": (resnet_split, resnet_split.Config()),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_are_planned_as_they_are(name: str) -> None:
    job, config = JOBS[name]
    plan = in_fork(planned_job, job.train, config)
    assert min(plan.kinds[kind] for kind in ("parameters", "optimizer", "inputs")) > 0
    assert plan.samples > 0
    assert plan.layers


def planned_job(train: Callable[[Run, Any], object], config: Any) -> MemoryPlan:
    with TemporaryDirectory() as folder:
        return planning.plan(lambda run: train(run, config), RankInfo(), Layout(), Path(folder))


def usual_loop(run: Run, _: object) -> None:
    """Use torch's DataLoader, arrays, real numbers, texts and a moving average, and report after a single step."""
    model = run.wrap(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale, losses = torch.tensor(2.0), run.meter("loss")
    for epoch in range(1, 4):
        for (inputs,) in DataLoader(Arrays(), batch_size=8, shuffle=True, num_workers=2):
            loss = (model(inputs) * scale.item()).square().mean()
            run.backward(loss)
            run.update(optimizer)
            average.update_parameters(model)
            losses.add(loss, len(inputs))
            print(f"{loss:.3f}", loss.detach().cpu().numpy().mean(), loss.tolist())
            torch.save(model.state_dict(), run.folder / "nowhere" / "model.pt")
        with torch.no_grad():
            correct = sum((model(inputs) > 0).sum().item() for (inputs,) in run.shard(Arrays(), batch_size=4))
            assert model(torch.zeros(3, 2)).cpu().numpy().tolist() == [[1.0]] * 3
        run.report(epoch, loss=losses.mean(), correct=correct)
        assert run.last_metrics["loss"] == 1.0


class Arrays(Dataset[tuple[torch.Tensor]]):
    """Reads its tensors as arrays."""

    def __init__(self) -> None:
        self._samples = torch.randn(8, 2)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.from_numpy(self._samples[index].numpy() + torch.zeros(2).numpy()),)


def two_models(run: Run, _: object) -> None:
    """Train two models in turn, with a gradient scaler of the job's own."""
    models = [run.wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    run.restore(**{f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)})
    scaler = torch.amp.GradScaler("cpu")
    while True:
        for number in (0, 0, 0, 1):
            scaler.scale(models[number](torch.randn(4, 64)).square().mean()).backward()
            scaler.step(optimizers[number])
            scaler.update()
            optimizers[number].zero_grad()


def converted_model(run: Run, _: object) -> None:
    """Tie, mark and convert parameters, and hold one outside of its module."""
    model: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    own = nn.Parameter(torch.zeros(64))
    own.marked = True  # type: ignore[attr-defined]
    model.bias = own
    optimizer = torch.optim.Adam([model[0].weight, own])
    run.wrap(model.to(torch.bfloat16))
    assert model[1].weight is model[0].weight
    assert [name for name, each in model.named_parameters() if hasattr(each, "marked")] == ["bias"]
    while True:
        run.backward((model(torch.randn(4, 64, dtype=torch.bfloat16)) + model.bias).square().mean())
        run.update(optimizer)


def odd_values(run: Run, _: object) -> None:
    """Read values of tensors in conditions and loops, as jobs and initializers do."""
    model = run.wrap(nn.Linear(2, 1))
    nn.init.trunc_normal_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(4, 2)).square().mean()
        if not torch.isfinite(loss) or torch.isnan(loss).any() or not (loss == loss).all():
            raise ValueError("not a number")
        if math.log(loss.item()) > 3 or bool(loss != loss):
            raise ValueError("too large")
        mask = torch.ones(4) * loss > 0
        if mask.sum() == 0 or (loss * torch.ones(1) == 0) or torch.logical_not(loss).all():
            continue
        run.backward(loss)
        run.update(optimizer)


def no_step(run: Run, _: object) -> None:
    run.wrap(nn.Linear(2, 1))(torch.randn(4, 2))


def no_model(run: Run, _: object) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 2)).mean().backward()
        optimizer.step()


def test_values_that_a_job_reads_let_it_continue() -> None:
    assert in_fork(planned_job, odd_values, None).samples == 4


def test_job_may_do_what_jobs_do() -> None:
    assert in_fork(planned_job, usual_loop, None).samples == 8


def test_states_of_all_optimizers_are_counted() -> None:
    plan = in_fork(planned_job, two_models, None)
    size = 4 * 2 * (64 * 64 + 64)
    assert (plan.kinds["parameters"], plan.kinds["gradients"] > 0) == (2 * size, True)
    assert plan.kinds["optimizer"] >= 4 * size
    assert [layer.name for layer in plan.layers] == ["0", "1", "", "model 2: 0", "model 2: 1"]


def test_tied_and_converted_parameters_count_once() -> None:
    plan = in_fork(planned_job, converted_model, None)
    assert plan.kinds["parameters"] == 2 * (64 * 64 + 64)
    assert plan.kinds["optimizer"] >= 2 * plan.kinds["parameters"]


@pytest.mark.parametrize(
    ("train", "why"), [(no_step, "takes no optimizer step"), (no_model, "no model that was passed to run.wrap")]
)
def test_job_without_a_step_or_a_model_is_refused(train: Callable[[Run, object], None], why: str) -> None:
    assert why in str(in_fork(planned_job, train, None))


def test_limit_and_recomputation_reduce_activations() -> None:
    facts, layout = RankInfo(), Layout()
    whole = in_fork(planned_with, facts, layout, None, False)
    assert (whole.splits, whole.samples) == (True, 512)
    parts = in_fork(planned_with, facts, layout, 128, False)
    assert parts.kinds["activations"] < 0.3 * whole.kinds["activations"]
    recomputed = in_fork(planned_with, facts, layout, None, True)
    assert recomputed.kinds["activations"] < 0.5 * whole.kinds["activations"]


def test_next_batch_counts_on_a_gpu() -> None:
    on_cpu, on_gpu = (in_fork(planned_with, RankInfo(), Layout(), None, False, is_gpu) for is_gpu in (False, True))
    batch = sum(tensor[:512].nbytes for tensor in samples_of().tensors)
    assert on_gpu.peak - on_cpu.peak == on_gpu.kinds["inputs"] - on_cpu.kinds["inputs"] == batch


def planned_with(
    facts: RankInfo, layout: Layout, limit: int | None, recomputes: bool, is_for_gpu: bool = False
) -> MemoryPlan:
    with TemporaryDirectory() as folder:
        return planning.plan(train_in_parts, facts, layout, Path(folder), limit, recomputes, is_for_gpu)


def train_in_parts(run: Run) -> None:
    model = run.wrap(nn.Sequential(*(Block() for _ in range(6))), blocks=(Block,))
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in run.loader(samples_of(), batch_size=512):
        run.gradients(lambda x, y: square(model(x), y), inputs, targets)
        run.update(optimizer)
