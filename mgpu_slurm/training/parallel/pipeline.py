"""Pass micro-batches through stages of consecutive layers, each on other ranks: `run.pipeline`.

See Huang et al., GPipe (2019); Narayanan et al., PipeDream-2BW (2021) for 1F1B; and
https://docs.pytorch.org/docs/stable/distributed.pipelining.html, whose stages and schedules are used here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_slurm.checkpoints.state.wrapping import canonical_names
from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.data.batching.batch_cutting import MicroBatchSize
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.parallel.mesh import mesh_of
from mgpu_slurm.training.parallel.stages import cut

Schedule = Literal["1f1b", "gpipe"]

MOST_SCHEDULES = 8
"""Number of input shapes for which buffers are kept."""

Metric = Callable[[Any, Any], torch.Tensor]
"""Returns a number, or several in one tensor, from outputs and targets."""


@dataclass(frozen=True)
class Options:
    """How batches pass through the stages."""

    loss_of: Metric
    """Returns the mean loss of a micro-batch from the last layer's outputs and the targets."""
    micro_batches: int
    schedule: Schedule = "1f1b"

    def check(self, stages: int) -> None:
        """
        Raises:
            UserError: an option is invalid, or does not fit the number of stages.
        """
        if self.schedule not in get_args(Schedule):
            hint = nearest(str(self.schedule), [*get_args(Schedule)])
            raise UserError(f"run.pipeline: schedule={self.schedule!r}: expected '1f1b' or 'gpipe'{hint}")
        if self.micro_batches < 1:
            raise UserError(f"run.pipeline: micro_batches={self.micro_batches}: expected at least 1")
        if self.schedule == "1f1b" and self.micro_batches < stages:
            raise UserError(
                f"run.pipeline: micro_batches={self.micro_batches} with --pipeline {stages}: 1f1b needs at least as"
                " many micro-batches as stages"
            )


@dataclass(frozen=True)
class Hooks:
    """The parts of a run that a pipeline uses."""

    note_inputs: Callable[[nn.Module, Any], None]
    """Called with the inputs of each batch."""
    weight: Callable[[], float]
    """Returns the factor of the gradient of the batch that the model was given last."""
    differentiated: Callable[[], None]
    """Called after each backward pass."""
    size: MicroBatchSize
    """The most samples of a micro-batch."""


class Pipeline(nn.Sequential):
    """The layers of one stage, under the names that they have in `nn.Sequential` of all layers.

    With one stage, it is that `nn.Sequential`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        options: Options,
        layout: Layout,
        rank: int,
        device: torch.device,
        hooks: Hooks,
    ) -> None:
        """
        Args:
            layers: all layers of the model.

        Raises:
            UserError: the options do not fit the number of stages, or there are too few layers.
        """
        options.check(layout.pipeline)
        parts = cut([_parameters(layer) for layer in layers], layout.pipeline)
        _refuse_tied(layers, parts)
        own = parts[layout.stage(rank)]
        super().__init__(OrderedDict((str(index), layers[index]) for index in own))
        whole = nn.Sequential(*layers)
        names = [name for name, _ in whole.named_parameters()]
        self.parameter_names = [*canonical_names(whole, names).values()]
        """The names of all parameters of the whole model, in its order."""
        self._is_trained = self._has_trained()
        self._options = options
        self._device = device
        self._hooks = hooks
        self._is_in_schedule = layout.pipeline == 1
        self._transport = None if layout.pipeline == 1 else _Transport(layers, parts, options, layout, rank, device)
        # in a tuple, so that it does not become a part of this module
        self._exchanging: tuple[nn.Module] = (self,)

    def exchange_gradients_by(self, wrapped: nn.Module) -> None:
        """Set the module that computes this stage and exchanges gradients with its copies: DDP around this one."""
        self._exchanging = (wrapped,)

    def _has_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, *args: Any) -> Any:
        if not self._is_in_schedule:
            raise UserError("this model is in several stages: call its `gradients` to train, and `evaluate` otherwise")
        # a tuple between two stages arrives as several inputs
        outputs = super().forward(args[0] if len(args) == 1 else args)  # type: ignore[no-untyped-call]
        if self._transport is None:
            return outputs
        if isinstance(outputs, tuple) and len(outputs) == 1 and not self._transport.is_last:
            raise UserError(
                f"run.pipeline: the {type(self[-1]).__name__}, the last layer of a stage, returns a tuple of one, which"
                " the next layer would receive without the tuple: return what is in it"
            )
        return _sendable(outputs)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Do the forward and backward pass of this rank's batch, in micro-batches, and return its mean loss.

        The ranks of all stages must call it, with the same batch. Call `run.update` afterwards.

        Raises:
            UserError: the batch cannot be divided into the micro-batches, or this stage has parameters to train and had
                none before, or the other way round.
        """
        if self._transport is not None and self._has_trained() != self._is_trained:
            # the next stage would not know whether to send gradients
            raise UserError(
                "run.pipeline: a stage with parameters to train must keep at least one, and a stage without any must"
                " stay so: to change that, freeze layers before run.pipeline, and resume the run"
            )
        count = self._micro_batches(len(inputs))
        self._hooks.note_inputs(self, (inputs, targets))
        factor = self._hooks.weight() / count
        with self._scheduled():
            if self._transport is not None:
                total = self._transport.train(self._exchanging[0], inputs, targets, count, factor)
            else:
                total = self._train_whole(inputs, targets, count, factor)
        self._hooks.differentiated()
        return total / count

    def _micro_batches(self, samples: int) -> int:
        """Return the number of micro-batches of a batch: more than asked for if fewer samples fit into memory at once.

        Raises:
            UserError: the batch cannot be divided into the micro-batches.
        """
        count, size = self._options.micro_batches, self._hooks.size
        if samples == 0 or samples % count:
            raise UserError(
                f"run.pipeline: this rank's batch of {samples} is not a multiple of micro_batches={count}: choose"
                " another batch size, or drop_last=True if it is the last batch"
            )
        most = size.limit or samples
        count = next(each for each in range(count, samples + 1) if samples % each == 0 and samples // each <= most)
        size.current = samples // count
        return count

    def _train_whole(self, inputs: torch.Tensor, targets: torch.Tensor, count: int, factor: float) -> torch.Tensor:
        """Train a pipeline of one stage in `count` micro-batches; return the sum of their losses."""
        model = self._exchanging[0]
        total = torch.zeros((), device=self._device)
        for number, (part, target) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True), 1):
            with ExitStack() as stack:
                if isinstance(model, DistributedDataParallel) and number < count:
                    stack.enter_context(model.no_sync())
                loss = self._options.loss_of(model(part), target)
                (loss * factor).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor, metric: Metric | None = None) -> torch.Tensor:
        """Return a metric of the outputs without gradients, on the ranks of all stages, which must all call it.

        A batch without samples, as `run.shard` yields to keep sharded models in step, results in 0.

        Args:
            metric: returns one or more numbers from outputs and targets; None for the loss.
        """
        metric = metric or self._options.loss_of
        is_empty = len(inputs) == 0
        if is_empty:
            inputs, targets = (each.new_zeros((1, *each.shape[1:])) for each in (inputs, targets))
        with self._scheduled():
            if self._transport is not None:
                found = self._transport.evaluate(self._exchanging[0], inputs, targets, metric)
            else:
                found = torch.as_tensor(metric(self._exchanging[0](inputs), targets))
        return torch.zeros_like(found) if is_empty else found

    @contextmanager
    def _scheduled(self) -> Iterator[None]:
        before, self._is_in_schedule = self._is_in_schedule, True
        try:
            yield
        finally:
            self._is_in_schedule = before

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Sequential:
        """Copy the layers of this stage, for a moving average; process groups cannot be copied."""
        return nn.Sequential(OrderedDict((name, copy.deepcopy(layer, memo)) for name, layer in self.named_children()))


class _Transport:
    """Passes micro-batches from stage to stage, by torch's schedules."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        parts: Sequence[range],
        options: Options,
        layout: Layout,
        rank: int,
        device: torch.device,
    ) -> None:
        self._outline = _outline_of(layers)
        self._first_layers = [part.start for part in parts]
        self._options = options
        self._index, self._count = layout.stage(rank), layout.pipeline
        self._device = device
        self._group = mesh_of(layout, device)["pipeline"].get_group()
        self._last = dist.get_global_rank(self._group, self._count - 1)
        self._factor = 1.0
        self._metric: Metric = options.loss_of
        self._schedules: dict[Any, Any] = {}
        """By the shape of micro-batches, because torch's receive buffers have a fixed shape; the newest used last."""

    @property
    def is_last(self) -> bool:
        return self._index == self._count - 1

    def train(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, count: int, factor: float
    ) -> torch.Tensor:
        """Return the sum of the losses of `count` micro-batches, after the backward pass of that sum times `factor`."""
        self._factor, self._metric = factor, self._options.loss_of
        losses: list[torch.Tensor] = []
        self._step(self._schedule(model, inputs, count).step, inputs, targets, losses)
        total = torch.zeros((), device=self._device)
        if self.is_last:
            # without weight, if this rank only keeps the others company
            total = (torch.stack([loss.detach() for loss in losses]).sum() / (factor or 1.0)).float()
        dist.broadcast(total, src=self._last, group=self._group)
        return total

    def evaluate(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, metric: Metric) -> torch.Tensor:
        """Return the metric of the last stage's outputs."""
        self._factor, self._metric = 1.0, metric
        losses: list[torch.Tensor] = []
        self._step(self._schedule(model, inputs, 1).eval, inputs, targets, losses)
        found = [losses[0].cpu() if self.is_last else None]
        dist.broadcast_object_list(found, src=self._last, group=self._group, device=self._device)
        assert found[0] is not None
        return found[0].to(self._device)

    def _step(self, step: Any, inputs: torch.Tensor, targets: torch.Tensor, losses: list[torch.Tensor]) -> None:
        """Call a schedule's `step` or `eval` with what it needs in this stage."""
        given = (inputs,) if self._index == 0 else ()
        measured = {"target": targets, "losses": losses} if self.is_last else {}
        try:
            step(*given, **torch_versions.no_outputs(), **measured)
        except RuntimeError as error:
            # torch reports an error of a layer, or a lost connection, as the cause of its own
            raise error.__cause__ or error from None

    def _schedule(self, model: nn.Module, inputs: torch.Tensor, micro_batches: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        shape = (len(inputs) // micro_batches, *inputs.shape[1:])
        key = (micro_batches, shape, inputs.dtype, torch.is_grad_enabled())
        if key in self._schedules:
            self._schedules[key] = self._schedules.pop(key)
        else:
            received, sent = self._shapes(torch.empty(shape, dtype=inputs.dtype, device="meta"))
            # shapes that torch finds by a forward pass are kept, as that changes buffers
            if len(self._schedules) >= MOST_SCHEDULES and received is not None:
                del self._schedules[next(iter(self._schedules))]
            stage = PipelineStage(
                model, self._index, self._count, self._device, input_args=received, output_args=sent, group=self._group
            )
            torch_versions.connect_with_equal_types(stage)
            kind = Schedule1F1B if self._options.schedule == "1f1b" and torch.is_grad_enabled() else ScheduleGPipe
            # the loss is divided here: torch would also divide gradients of earlier backward passes
            self._schedules[key] = torch_versions.make_schedule(kind, stage, micro_batches, self._weighted_loss)
        return self._schedules[key]

    def _weighted_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return torch.as_tensor(self._metric(outputs, targets)) * self._factor

    def _shapes(self, inputs: torch.Tensor) -> tuple[Any, Any]:
        """Return the inputs and outputs of this stage on the meta device.

        They are found without a forward pass, which would change buffers. Where that is impossible, they are None, and
        torch finds them by one.
        """
        if self._outline is None:
            return None, None
        edges: list[Any] = []
        passed: Any = inputs
        try:
            for index, layer in enumerate(self._outline):
                if index in self._first_layers:
                    edges.append(_contiguous(passed) if index else passed)
                passed = layer(passed)
        except Exception:
            return None, None
        edges.append(_contiguous(passed))
        return edges[self._index], edges[self._index + 1]


def _outline_of(layers: Sequence[nn.Module]) -> list[nn.Module] | None:
    """Return copies of the layers on the meta device; None if they cannot be copied."""
    try:
        return [copy.deepcopy(layer).to("meta") for layer in layers]
    except Exception:
        return None


def _refuse_tied(layers: Sequence[nn.Module], parts: Sequence[range]) -> None:
    """Check that no parameter is in two stages, which would train it separately.

    Raises:
        UserError: one is.
    """
    stages: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for index in part:
            for name, parameter in layers[index].named_parameters():
                full = f"{index}.{name}"
                first, known = stages.setdefault(id(parameter), (stage, full))
                if first != stage:
                    raise UserError(
                        f"run.pipeline: {known!r} and {full!r} are one parameter, but in different stages: untie them,"
                        " or put both into one layer"
                    )


def _sendable(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return tuple(map(_sendable, outputs))
    return outputs.contiguous()


def _contiguous(value: Any) -> Any:
    """Return what a stage receives for these activations on the meta device."""
    if isinstance(value, tuple):
        return tuple(map(_contiguous, value))
    received = torch.empty(value.shape, dtype=value.dtype, device="meta")
    # not if all layers before are frozen
    return received.requires_grad_(value.requires_grad)


def _parameters(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())
