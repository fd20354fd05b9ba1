"""Share models among the ranks of a run by its strategy, with rank 0's values, and with a hook that reports inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from mgpu_slurm.checkpoints.state.tensors import is_sharded
from mgpu_slurm.checkpoints.state.wrapping import Wrapped
from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.randomness import share_random_state
from mgpu_slurm.rank.torch_adapter import is_dtensor
from mgpu_slurm.request.parallelism import SHARDED, Layout
from mgpu_slurm.training.parallel.compilation import compile_layers, compile_model
from mgpu_slurm.training.parallel.data_parallel import (
    Copied,
    GradientExchange,
    exchange_of,
    is_spread,
    memory_text,
    replicate,
    scatter,
)
from mgpu_slurm.training.parallel.gradient_check import GradientCheck
from mgpu_slurm.training.parallel.input_hook import InputHook
from mgpu_slurm.training.parallel.mesh import broadcast_tensors, data_group, mesh_of
from mgpu_slurm.training.parallel.pipeline import Hooks, Options, Pipeline
from mgpu_slurm.training.parallel.precision import HALF, autocast, to_fp8
from mgpu_slurm.training.parallel.recompute import recompute_blocks
from mgpu_slurm.training.parallel.sharding import blocks_of, refuse_first_fsdp, shard
from mgpu_slurm.training.parallel.tensor import divide, step_one_by_one


class Models:
    """The models of one rank's run, as `run.wrap` has returned them."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        layout: Layout,
        device: torch.device,
        devices: Sequence[torch.device],
        note_inputs: Callable[[nn.Module, Any], None],
    ) -> None:
        """
        Args:
            devices: all devices of this rank.
            note_inputs: called with a model and its inputs.
        """
        self._rank = rank
        self._world_size = world_size
        self._layout = layout
        self._device = device
        self._devices = devices
        self._note_inputs = note_inputs
        self.is_deterministic = False
        """Whether DDP must always sum gradients in the same order."""
        self._has_told = False
        """Whether it has told of the memory of each GPU."""
        self.wrapped = Wrapped()
        self.exchanges: list[GradientExchange] = []
        """DDP around each model whose gradients are exchanged in each backward pass."""
        self._frozen: list[nn.Module] = []
        """Models that were entirely frozen when they were wrapped."""
        self.gradient_check = GradientCheck(layout)
        self.sharded: list[nn.Module] = []
        """Models for which a rank with fewer forward passes would leave the others waiting."""
        self._alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models of a run with one rank."""
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaced: dict[int, weakref.ref[nn.Parameter]] = {}
        """Parameters of models from before they were sharded, by id: tensors cannot be compared."""
        self._checked: dict[int, list[int]] = {}
        """Ids of the parameters that each optimizer trained when it was last checked, by the optimizer's id."""

    @property
    def are_sharded(self) -> bool:
        """Whether any model is sharded over the ranks."""
        return bool(self.sharded)

    def add_sharded(self, model: nn.Module) -> None:
        """Record a model that is sharded over the ranks."""
        self.sharded.append(model)
        self.wrapped.add(model)

    def add_restored(self, value: Any) -> None:
        """Record an object passed to `run.restore`: a sharded model need not have been wrapped.

        Raises:
            UserError: it is an optimizer that was created before a model was sharded.
        """
        self._check_created_after(_parameters_of(value), value)
        self._add_optimizer(value)
        if isinstance(value, nn.Module) and is_sharded(value) and value not in self.sharded:
            self.add_sharded(value)

    def check_optimizer(self, optimizer: Any) -> None:
        """Check that an optimizer has the parameters of the models as they are now. Call it before each update.

        Gradients that no model exchanges are compared later, when the ranks meet.

        Raises:
            UserError: it was created before a model was sharded, which replaces the parameters.
        """
        self._add_optimizer(optimizer)
        if self._world_size == 1 and not self._replaced and id(optimizer) in self._checked:
            return
        trained = [each for each in _parameters_of(optimizer) if each.requires_grad]
        found = [*map(id, trained)]
        if self._checked.get(id(optimizer)) != found:
            self._check_created_after(trained, optimizer)
            self._check_options_apply(trained)
            if self._world_size > 1:
                self._watch_others(trained, optimizer)
            self._checked[id(optimizer)] = found
        for exchange in self.exchanges:
            if exchange.is_first_left_out():
                self._watch_parts(exchange.module, trained, optimizer)
        self.gradient_check.before_update(optimizer)

    def _add_optimizer(self, value: Any) -> None:
        # one that cannot be found again holds parameters of a model, too
        with suppress(TypeError):
            if hasattr(value, "param_groups") and value not in self.optimizers:
                step_one_by_one(value)
                self.optimizers.add(value)

    def held(self) -> list[nn.Module]:
        """Return the models that exist."""
        return [*self.wrapped, *self._alone]

    def trained(self) -> list[nn.Parameter]:
        """Return all parameters that may have gradients."""
        own = [each for model in self.held() for each in model.parameters()]
        return own + [each for optimizer in self.optimizers for each in _parameters_of(optimizer)]

    def _check_created_after(self, parameters: Iterable[nn.Parameter], optimizer: Any) -> None:
        if any(id(each) in self._replaced and self._replaced[id(each)]() is each for each in parameters):
            raise UserError(
                f"the {type(optimizer).__name__} was created before run.wrap, which replaced the model's parameters:"
                " create it afterwards"
            )

    def _check_options_apply(self, trained: Sequence[nn.Parameter]) -> None:
        """
        Raises:
            UserError: the run has options for models, but no model to which they apply.
        """
        layout = self._layout
        if not trained or any(map(is_dtensor, trained)) or any(model not in self._frozen for model in self.held()):
            return
        if layout.pipeline > 1:
            raise UserError(f"--pipeline {layout.pipeline} has no effect: no model was passed to run.pipeline")
        options = {
            f"--tensor {layout.tensor}": layout.tensor > 1,
            f"--strategy {layout.strategy}": layout.is_sharded or layout.strategy == "dp",
            f"--precision {layout.precision}": layout.precision in HALF,
            "--compile": layout.compile,
        }
        if given := [option for option, is_given in options.items() if is_given]:
            have = "has" if len(given) == 1 else "have"
            raise UserError(f"{' '.join(given)} {have} no effect: no model was passed to run.wrap")

    def _watch_others(self, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
        """Compare the gradients of parameters outside the wrapped models between ranks: the job may exchange them."""
        frozen = {id(each): model for model in self._frozen for each in model.parameters()}
        wrapped = {id(each) for model in self.wrapped if model not in self._frozen for each in model.parameters()}
        others = [each for each in parameters if id(each) not in wrapped and not is_dtensor(each)]
        why = (
            f"run.update: gradients of {len(others)} of the {type(optimizer).__name__}'s {len(parameters)} parameters"
            " differ between ranks, because their model was not returned by run.wrap: wrap it, or exchange its"
            " gradients before run.update"
        )
        if self._layout.precision != "fp16":
            why += " (if each rank is to train another model, call optimizer.step())"
        if model := next((frozen[id(each)] for each in others if id(each) in frozen), None):
            call = "run.pipeline" if isinstance(model, Pipeline) else "run.wrap"
            why = (
                f"run.update: the {type(model).__name__} was entirely frozen when it was passed to {call}, so ranks do"
                f" not exchange its gradients: freeze it after {call}, and unfreeze it later"
            )
        self.gradient_check.watch(optimizer, others, why)

    def _watch_parts(self, model: nn.Module, trained: Sequence[nn.Parameter], optimizer: Any) -> None:
        """Compare gradients of a model that was not called itself between ranks: the job may exchange them."""
        own = set(map(id, model.parameters()))
        why = (
            f"run.update: gradients of a {type(model).__name__} differ between ranks, because only parts of it were"
            " called: ranks exchange gradients when the model itself is called, so compute the loss from its outputs"
        )
        self.gradient_check.watch(optimizer, [each for each in trained if id(each) in own], why)

    def wrap(
        self,
        model: nn.Module,
        blocks: Sequence[type[nn.Module]] = (),
        plan: Mapping[str, str] | None = None,
        recompute: bool = False,
        offload: bool = False,
    ) -> nn.Module:
        """See `Run.wrap`."""
        if isinstance(model, Copied):
            return model
        refuse_first_fsdp(model)
        if is_sharded(model):
            self._check_sharded(model)
            self.add_sharded(model)
            self._note_inputs_of(model)
            return model
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if self._layout.precision == "fp8":
            to_fp8(model, self._device)
        if self._layout.compile:
            compile_model(model, blocks, self._device, self.is_deterministic)
        if recompute and is_trained:
            recompute_blocks(blocks_of(model, blocks, "recompute=True"))
        if is_trained and self._layout.pipeline > 1:
            raise UserError(f"--pipeline {self._layout.pipeline} needs run.pipeline(layers, ...) in place of run.wrap")
        # checked on one rank too, where nothing is sharded: the job should not fail only on the cluster
        is_alone = self._layout.data * self._layout.tensor * self._layout.pipeline == 1
        is_asked = is_trained and self._layout.strategy in SHARDED and (self._layout.is_sharded or is_alone)
        parts = blocks_of(model, blocks, f"--strategy {self._layout.strategy}") if is_asked else []
        if is_trained and (self._layout.is_sharded or self._layout.tensor > 1):
            return self._divide(model, parts, plan, offload)
        if not is_spread(model):
            model = model.to(self._device)
        if self._layout.precision in HALF:
            autocast(model, self._device, HALF[self._layout.precision])
        if self._layout.strategy == "dp":
            # around the hooks: a thread of DataParallel would not know the dtype
            model = scatter(model, self._devices)
        if self._world_size == 1:
            # a job may create many models
            self._alone.add(model)
            return model
        self.wrapped.add(model)
        if not is_trained:
            self._frozen.append(model)
            # DDP refuses a model without trainable parameters
            broadcast_tensors([*model.parameters(), *model.buffers()])
            return model
        exchange = self._exchange_of(model)
        self.exchanges.append(exchange)
        # not a hook of the model itself: torch.jit.script refuses that
        self._note_inputs_of(exchange, lambda _, inputs: self._note_inputs(model, inputs))
        return replicate(model, exchange)

    def pipeline(self, layers: Sequence[nn.Module], options: Options, hooks: Hooks) -> Pipeline:
        """See `Run.pipeline`."""
        layout = self._layout
        if layout.tensor > 1:
            raise UserError(f"--tensor {layout.tensor} needs run.wrap(model, plan=...) in place of run.pipeline")
        if layout.precision == "fp8" or layout.strategy == "dp":
            option = "--precision fp8" if layout.precision == "fp8" else "--strategy dp"
            raise UserError(f"run.pipeline does not support {option}: use --precision bf16 and --strategy ddp")
        for layer in layers:
            self._copy_from_rank_0(layer)
        pipe = Pipeline(layers, options, layout, self._rank, self._device, hooks)
        if layout.compile:
            compile_layers(pipe, self._device, self.is_deterministic)
        if layout.is_sharded:
            self._replaced |= {id(each): weakref.ref(each) for each in pipe.parameters()}
            self._checked.clear()
            parts = [layer for layer in pipe if any(True for _ in layer.parameters())]
            shard(pipe, parts, layout, self._device)
            self.sharded.append(pipe)
        else:
            pipe.to(self._device)
            if layout.precision in HALF:
                autocast(pipe, self._device, HALF[layout.precision])
            # DDP refuses a model without trainable parameters
            if layout.data > 1 and any(parameter.requires_grad for parameter in pipe.parameters()):
                group = data_group(layout, self._device)
                pipe.exchange_gradients_by(self._exchange_of(pipe, group))
            elif layout.data > 1 and layout.pipeline == 1:
                self._frozen.append(pipe)
        if layout.pipeline > 1:
            self.wrapped.add_stage(pipe)
        elif self._world_size > 1:
            self.wrapped.add(pipe)
        else:
            self._alone.add(pipe)
        return pipe

    def _exchange_of(self, model: nn.Module, group: Any = None) -> GradientExchange:
        in_order = self.is_deterministic and self._layout.data > 2
        return exchange_of(model, self._device, in_order, self.gradient_check.note_trained, group)

    def _check_sharded(self, model: nn.Module) -> None:
        """Check that a model that is sharded already needs nothing of the strategy or the precision.

        Raises:
            UserError: it does.
        """
        if self._layout.is_sharded and any(each.requires_grad and not is_dtensor(each) for each in model.parameters()):
            raise UserError(
                f"run.wrap: only a part of the {type(model).__name__} is sharded: call run.wrap once, with the whole"
                " model"
            )
        if self._layout.precision in HALF and model not in self.sharded:
            raise UserError(
                f"run.wrap: --precision {self._layout.precision} cannot be applied to a model that is sharded already:"
                " pass an mp_policy to fully_shard, or shard it by --strategy"
            )

    def _divide(
        self, model: nn.Module, parts: Sequence[nn.Module], plan: Mapping[str, str] | None, offload: bool
    ) -> nn.Module:
        """Divide the model over the ranks, from rank 0's values.

        Args:
            parts: modules within the model that are sharded, outer ones first.
        """
        layout = self._layout
        if layout.tensor > 1 and not plan:
            raise UserError(
                f"run.wrap: --tensor {layout.tensor} needs plan={{...}}, how the ranks divide the model's layers"
            )
        self._copy_from_rank_0(model)
        before = list(model.parameters())
        if layout.tensor > 1:
            tensor = mesh_of(layout, self._device)["tensor"]
            divide(model, tensor, plan or {})
            # what they compute together must draw the same, even if creating the model did not
            share_random_state(self._device, tensor.get_group())
        if layout.is_sharded:
            shard(model, parts, layout, self._device, offload)
        else:
            model.to(self._device)
            if layout.precision in HALF:
                autocast(model, self._device, HALF[layout.precision])
        after = set(map(id, model.parameters()))
        self._replaced |= {id(each): weakref.ref(each) for each in before if id(each) not in after}
        self._checked.clear()
        self.add_sharded(model)
        self._note_inputs_of(model)
        return model

    def _copy_from_rank_0(self, model: nn.Module) -> None:
        """Set all tensors to rank 0's values, one after the other on the device, where the whole may not fit."""
        if self._world_size == 1:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            held = tensor.detach().to(self._device)
            broadcast_tensors([held])
            tensor.detach().copy_(held)

    def _note_inputs_of(self, called: nn.Module, note: Callable[[nn.Module, Any], None] | None = None) -> None:
        # before hooks that change the inputs, such as those of a sharded model
        called.register_forward_pre_hook(InputHook(note or self._note_inputs), prepend=True, with_kwargs=True)

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Do not exchange gradients within the block, as far as that takes no memory: those of sharded parameters are
        still divided over the ranks of each copy."""
        # a model that the job has divided itself may be of another kind
        copied: list[Any] = [model for model in self.sharded if hasattr(model, "set_requires_all_reduce")]
        with ExitStack() as stack:
            for exchange in self.exchanges:
                stack.enter_context(exchange.no_sync())
            for model in copied:
                model.set_requires_all_reduce(False)
                stack.callback(model.set_requires_all_reduce, True)
            yield

    def step_done(self) -> None:
        """After the first step with DataParallel, tell how unevenly the GPUs are used."""
        if self._layout.strategy == "dp" and not self._has_told and len(self._devices) > 1:
            self._has_told = True
            log_lines.say(memory_text([torch.cuda.max_memory_allocated(device) for device in self._devices]))

    def stages_of(self, optimizer: Any) -> Any:
        """Return the mesh of the ranks with the other stages of an optimizer's model; None if there are none."""
        is_staged = self._layout.pipeline > 1 and self.wrapped.is_staged(optimizer)
        return mesh_of(self._layout, self._device)["pipeline"] if is_staged else None

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers of all models."""
        if self._world_size == 1:
            return
        for model in self.wrapped:
            if not isinstance(model, Pipeline) or self._layout.pipeline == 1:
                broadcast_tensors(model.buffers())
            elif self._layout.data > 1:
                # the other stages have other buffers
                broadcast_tensors(model.buffers(), data_group(self._layout, self._device))


def _parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [each for group in getattr(optimizer, "param_groups", []) for each in group["params"]]
