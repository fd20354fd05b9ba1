"""Run a job on fake tensors, as one rank of its layout, to see how much memory it would take.

This happens in a process of its own, see `main`. The job's data is real; its models, and the batches of its loaders,
have shapes only. It ends after two optimizer steps, because an optimizer allocates its state in the first one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import write_json
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.request import target
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import MemoryPlan
from mgpu_slurm.training.memory import fake_torch_adapter
from mgpu_slurm.training.memory.planned_run import CPU, Enough, PlannedRun
from mgpu_slurm.training.memory.tracking import Kind, MemoryTracker
from mgpu_slurm.training.parallel.mesh import mesh_of
from mgpu_slurm.training.run import Run


@contextmanager
def _fake_parameters(tracker: MemoryTracker) -> Iterator[None]:
    """Make parameters fake as soon as a module has them, before they are initialized, and track memory from then on."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # checks the name
        original(module, name, parameter)
        if parameter is not None and not is_lazy(parameter):
            tracker.begin()
            tracker.make_fake(parameter)

    with (
        torch_adapter.replaced(nn.Module, register_parameter=register),
        fake_torch_adapter.converting_fakes(),
        fake_torch_adapter.reading_fakes(),
        fake_torch_adapter.exchanging_nothing(tracker.making_buckets),
    ):
        yield


@contextmanager
def _tracked_steps(run: PlannedRun, tracker: MemoryTracker) -> Iterator[None]:
    """Count what optimizers allocate, which compute as on a GPU: all parameters together. Nothing is saved."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        tracker.makes_fakes = True
        blocks.append(ExitStack())
        blocks[-1].enter_context(tracker.allocating("optimizer", "optimizer step"))
        blocks[-1].enter_context(tracker.reading(1.0))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        blocks.pop().close()
        run.stepped(optimizer)
        # this step has been counted, unless it is a part of `run.update`
        run.end_if_known()

    def step(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        # which skips a step if it reads that anything is infinite
        with tracker.reading(0.0):
            return scaled_step(scaler, *args, **kwargs)

    blocks: list[ExitStack] = []
    handles: list[RemovableHandle] = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    scaled_step = torch.amp.GradScaler.step
    try:
        with (
            torch_adapter.replaced(torch.amp.GradScaler, step=step),
            torch_adapter.replaced(torch, save=lambda *_, **__: None),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()


def plan(
    train: Callable[[Run], object],
    facts: RankInfo,
    layout: Layout,
    folder: Path,
    limit: int | None = None,
    recomputes: bool = False,
    is_for_gpu: bool = False,
) -> MemoryPlan:
    """Call a rank's job function with fake tensors, and return what it would hold in memory.

    Args:
        limit, recomputes: see `PlannedRun`.
        is_for_gpu: whether to count the next batch, which is copied to a GPU ahead.

    Raises:
        UserError: the job took no optimizer step, uses no model of the run, or divides it in a way that this torch
            cannot compute with fake tensors.
    """
    if facts.world_size > 1:
        if layout.is_sharded or layout.tensor > 1 or layout.pipeline > 1:
            torch_versions.check_planning()
        fake_torch_adapter.join_fake_group(facts.rank, facts.world_size)
        # made of tensors that need values
        mesh_of(layout, CPU)
    # collections are then fast
    gc.freeze()
    with ExitStack() as stack:
        tracker = stack.enter_context(closing(MemoryTracker()))
        run = stack.enter_context(closing(PlannedRun(facts, folder, layout, tracker, limit, recomputes)))
        stack.enter_context(_fake_parameters(tracker))
        stack.enter_context(_tracked_steps(run, tracker))
        stack.enter_context(fake_torch_adapter.loading_in_this_process(run.fetch_begins, run.fetched))
        with suppress(Enough):
            train(run)
        if run.step == 0:
            raise UserError("the job takes no optimizer step")
        if not run.layers:
            raise UserError("no model that was passed to run.wrap or run.pipeline is trained")
        ahead = run.next_batch if is_for_gpu else 0
        kinds = {kind: tracker.at_peak.get(kind, 0) for kind in get_args(Kind)}
        return MemoryPlan(
            peak=tracker.peak + ahead,
            phase=tracker.phase_of_peak,
            kinds=kinds | {"inputs": kinds["inputs"] + ahead},
            samples=run.samples,
            splits=run.splits,
            can_recompute=run.can_recompute,
            layers=list(run.layers.values()),
        )


def _plan_or_error(folder: RunFolder, rank: int, limit: int | None, recomputes: bool) -> MemoryPlan:
    spec = read_spec(folder)
    if spec.tasks is not None:
        # runs of a group differ in their seeds only
        spec = spec.of_task(0)
    resources = spec.resources
    node, local_rank = divmod(rank, resources.ranks_per_node)
    facts = RankInfo(rank, resources.ranks, local_rank, resources.ranks_per_node, node)
    os.environ.update(facts.torchrun_variables() | dict(spec.environment))
    # compiled code holds less, but how much is known only once it is compiled
    layout = replace(spec.parallelism, compile=None).layout(resources.ranks, resources.ranks_per_node)
    try:
        job = target.job_function(spec, folder)
        config = job.fill(spec.config, spec.original)
        return plan(lambda run: job.call(run, config), facts, layout, folder.path, limit, recomputes, is_for_gpu=True)
    except UserError as error:
        return MemoryPlan(error=str(error))
    except Exception as error:
        words = target.described_error(error, spec.target.label, folder.code / spec.workdir)
        if fake_torch_adapter.needs_values(error):
            place = words.split(": ")[0]
            problem = "an operation depends on the values of a tensor, which --fit does not compute"
            words = f"{place}: {problem}: use one whose shape does not, such as torch.where in place of x[x > 0]"
        return MemoryPlan(error=words)


def main(path: str, rank: str, limit: str, recomputes: str) -> None:
    """Write the plan of one rank of a run into its folder.

    Args:
        limit: 0 for any number of samples at once.
        recomputes: 0 or 1.
    """
    folder = RunFolder(Path(path))
    planned = _plan_or_error(folder, int(rank), int(limit) or None, bool(int(recomputes)))
    write_json(folder.memory_plan, planned.to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
