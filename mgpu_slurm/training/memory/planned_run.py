"""The run of a job whose memory is planned: its models and batches are fake, and it ends when the peak is known."""

from __future__ import annotations

import gc
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import nn

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batching.nests import leaves_of
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.metrics.reporter import as_numbers
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder.record_types import LayerMemory
from mgpu_slurm.training.memory.tracking import MemoryTracker
from mgpu_slurm.training.parallel.pipeline import Pipeline
from mgpu_slurm.training.restore import State
from mgpu_slurm.training.run import Run

STEPS = 2
"""Steps of each optimizer after which the peak is known."""
MOST_STEPS = 16
"""Steps of one optimizer after which others are not waited for."""

CPU = torch.device("cpu")


def _is_tracked(tensor: torch.Tensor) -> bool:
    return torch_adapter.is_dtensor(tensor) or torch_adapter.is_fake(tensor)


class Enough(BaseException):
    """Ends the job when its memory is known."""


class PlannedRun(Run):
    """A run of which no other rank exists, and which writes nothing."""

    def __init__(
        self, facts: RankInfo, folder: Path, layout: Layout, tracker: MemoryTracker, limit: int | None, recomputes: bool
    ) -> None:
        """
        Args:
            limit: number of samples that the job computes at once, if it leaves that to the run.
            recomputes: whether to recompute the activations of each block, even if the job does not.
        """
        alone = Collectives(RankInfo(node_name=facts.node_name))
        super().__init__(facts, folder, CPU, 1, StopFlag(), alone, layout=layout)
        self._parts.size.limit = limit
        self._recomputes = recomputes
        self._tracker = tracker
        self._models_watched = 0
        self._steps_of: Counter[int] = Counter()
        """Steps of each optimizer, by its id."""
        self.layers: dict[str, LayerMemory] = {}
        self.samples = 0
        """Number of samples of the largest batch of this rank."""
        self.splits = False
        """Whether the job leaves the size of micro-batches to the run."""
        self.can_recompute = False
        """Whether the job names blocks that it does not recompute."""
        self.next_batch = 0
        """Bytes of the next batch, which the run's loaders copy to a GPU while the job has a batch."""
        self._has_loader = False

    def loader(self, *args: Any, **options: Any) -> Loader:
        self._has_loader = True
        return super().loader(*args, **options)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        watches = self._watches(model)
        if options.get("blocks") and not options.get("recompute"):
            self.can_recompute = True
            options["recompute"] = self._recomputes
        wrapped = super().wrap(model, **options)
        self._watch(wrapped, watches)
        return wrapped

    def pipeline(self, layers: Sequence[nn.Module], *args: Any, **options: Any) -> Pipeline:
        watches = self._watches(nn.Sequential(*layers))
        pipe = super().pipeline(layers, *args, **options)
        own = set(map(id, (*pipe.parameters(), *pipe.buffers())))
        for each in (each for layer in layers for each in (*layer.parameters(), *layer.buffers())):
            if id(each) not in own:
                # of another stage: it stays in main memory
                self._tracker.leave_out(each)
        self._watch(pipe, watches)
        pipe.gradients = self._given_batches(pipe.gradients)  # type: ignore[method-assign]
        return pipe

    def gradients(self, loss_of: Callable[..., torch.Tensor], *batch: Any) -> torch.Tensor:
        self.splits = True
        return super().gradients(loss_of, *batch)

    def update(self, optimizer: Any, clip: float | None = None) -> None:
        # clipping asks the mesh, which is made of tensors that need values
        self._tracker.makes_fakes = False
        # a gradient scaler then reads that nothing is infinite
        with self._tracker.reading(0.0 if self._layout.precision == "fp16" else 1.0):
            super().update(optimizer, clip)
        self.end_if_known()

    def restore(self, **objects: Any) -> State:
        # there is nothing to load, and nothing will be saved
        state = super().restore(**{name: each for name, each in objects.items() if isinstance(each, Loader)})
        self._loop_control.keeps = False
        for value in objects.values():
            self._parts.steps.add(value)
            self._models.add_restored(value)
        return state

    def report(self, progress: SupportsIndex, **metrics: Any) -> None:
        self._tracker.makes_fakes = False
        self._position.progress, self._position.metrics = operator.index(progress), as_numbers(metrics)

    def mean(self, total: torch.Tensor | float, count: torch.Tensor | float) -> float:
        # like any other number
        return 1.0

    def save(self) -> None:
        pass

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step of an optimizer.

        Raises:
            UserError: it has parameters whose memory is not tracked.
        """
        self._tracker.makes_fakes = False
        self._steps_of[id(optimizer)] += 1
        if not all(_is_tracked(each) for group in optimizer.param_groups for each in group["params"]):
            raise UserError(
                f"the {type(optimizer).__name__} has parameters that were replaced after it was created, or that belong"
                " to no module: create it after the model is complete"
            )

    def end_if_known(self) -> None:
        """End the job once each optimizer has stepped with its state in memory.

        Raises:
            Enough: the peak is known.
        """
        known = {*self._steps_of, *map(id, self._models.optimizers)}
        if self.step and (min(self._steps_of[each] for each in known) >= STEPS or self.step >= MOST_STEPS):
            raise Enough

    def fetch_begins(self) -> None:
        """Leave the job's data real."""
        self._tracker.makes_fakes = False

    def fetched(self, batch: Any) -> Any:
        """Return a batch without values."""
        if not self._models_watched:
            return batch
        self._note_samples(batch)
        if self._has_loader:
            size = sum(each.nbytes for each in leaves_of(batch) if isinstance(each, torch.Tensor))
            self.next_batch = max(self.next_batch, size)
        return self._tracker.fake_all(batch, "inputs")

    def _note_samples(self, batch: Any) -> None:
        first = next((each for each in leaves_of(batch) if isinstance(each, torch.Tensor) and each.dim()), None)
        if first is not None and torch.is_grad_enabled():
            self.samples = max(self.samples, len(first))

    def _watches(self, model: nn.Module) -> dict[str, _LayerWatch]:
        """Make the buffers of a model fake, as its parameters are since they were created; return a watch for each of
        its layers, whose class a strategy may change."""
        for part in model.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, self._tracker.fake(buffer, "parameters"))
        for parameter in model.parameters():
            # a lazy module may have got it late
            self._tracker.make_fake(parameter)
        # those of a second model may have the same names
        prefix = f"model {self._models_watched + 1}: " if self._models_watched else ""
        return {
            name: _LayerWatch(f"{prefix}{name}", type(layer).__name__, self._tracker, self.layers)
            for name, layer in model.named_modules()
            if name or not prefix
        }

    def _watch(self, model: nn.Module, watches: Mapping[str, _LayerWatch]) -> None:
        """Track the forward passes of a model and its layers."""
        self._models_watched += 1

        # functions, because a copy of the model, such as for a moving average, would copy methods with this run
        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._enter_model(args, kwargs)

        def count(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._tracker.count(parameter.grad, "gradients")

        # a whole model is not on the device before it is sharded
        self._tracker.reset_peak()
        for parameter in model.parameters():
            self._tracker.count(parameter, "parameters")
            if parameter.requires_grad and parameter.is_leaf:
                parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
        for name, layer in model.named_modules():
            if name in watches:
                watches[name].begin(layer)
        model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)

    def _enter_model(self, args: Any, kwargs: Any) -> Any:
        # torch leaves tensors in cycles, which would count until Python collects them at some time
        gc.collect()
        self._tracker.makes_fakes, self._tracker.phase = True, "forward and backward pass"
        self._note_samples((args, kwargs))
        args, kwargs = (self._tracker.fake_all(each, "inputs") for each in (args, kwargs))
        return args, kwargs

    def _given_batches(self, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a pipeline's function that gets its batch: stages after the first receive their inputs."""

        def computed(*batch: Any) -> torch.Tensor:
            batch, _ = self._enter_model(batch, {})
            return compute(*batch)

        return computed


class _LayerWatch:
    """Hooks that record what a layer's first forward pass leaves in memory."""

    def __init__(self, name: str, kind: str, tracker: MemoryTracker, found: dict[str, LayerMemory]) -> None:
        self._name = name
        self._kind = kind
        self._tracker = tracker
        self._found = found
        self._before = 0

    def begin(self, layer: nn.Module) -> None:
        # before the hook that gathers a sharded layer's parameters, and after the one that frees them
        layer.register_forward_pre_hook(lambda *_: self._enter(), prepend=True)
        layer.register_forward_hook(lambda layer, _, outputs: self._leave(layer, outputs))

    def _enter(self) -> None:
        self._before = self._tracker.total

    def _leave(self, layer: nn.Module, outputs: Any) -> None:
        if self._name in self._found or not torch.is_grad_enabled():
            return
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        self._found[self._name] = LayerMemory(
            name=self._name,
            kind=self._kind,
            shape=list(first.shape) if isinstance(first, torch.Tensor) else [],
            parameters=sum(parameter.numel() for parameter in layer.parameters()),
            memory=self._tracker.total - self._before,
        )
