"""Name mistakes of a job that cost memory or time, with the variable, the file and the line.

Its variables are looked at twice, after steps 4 and 12 of an attempt. Nothing that was seen is kept.
"""

from __future__ import annotations

import bisect
import heapq
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.data.batching.nests import leaves_of
from mgpu_slurm.rank.torch_adapter import sequence_number
from mgpu_slurm.training.memory.job_variables import Look, Place, Variable, place_of_call, variables_of
from mgpu_slurm.training.parallel.input_hook import InputHook
from mgpu_slurm.training.wrap import Models

FIRST, STEPS = 4, 8
"""After which step it looks first, and how many steps later again."""
LOOK_SECONDS = 0.05
"""Longest time of a look; one that takes longer says nothing."""
CHECKS = 4
"""Number of batches of evaluations that are checked."""
MOST_NODES = 2000
"""Of the graph, for one variable."""
LEAST_GROWTH = 1 << 20
"""Bytes by which a container has to grow between the looks. Smaller tensors, such as losses, may be kept."""


@dataclass
class _Held:
    """The tensors that a variable holds."""

    tensors: int = 0
    """Those on the device, without a graph."""
    size: int = 0
    """Their bytes, if the variable is a container."""
    graphs: int = 0
    """The number of steps since the first look whose graphs it keeps."""


@dataclass
class _Marks:
    """Where the steps between the looks begin, in torch's numbering of the nodes of graphs."""

    numbers: list[int] = field(default_factory=list)

    def add(self) -> None:
        with torch.enable_grad():
            self.numbers.append(sequence_number(torch.zeros((), requires_grad=True).view(1).grad_fn))

    def steps_of(self, tensors: list[torch.Tensor]) -> int:
        """Return in how many of these steps nodes of the graphs of tensors were created.

        The oldest nodes are followed first: those of earlier steps are near, as in a sum of losses.
        """
        # the numbers in the middle tell apart nodes, which cannot be compared
        nodes: list[Any] = [each.grad_fn for each in tensors]
        heap = [(sequence_number(node), at, node) for at, node in enumerate(nodes)]
        heapq.heapify(heap)
        # an id is that of a node only as long as that exists
        seen, kept, steps = set(map(id, nodes)), nodes, set()
        while heap and len(kept) < MOST_NODES:
            number, _, node = heapq.heappop(heap)
            if self.numbers[0] <= number < self.numbers[-1]:
                steps.add(bisect.bisect_right(self.numbers, number))
            for following, _ in node.next_functions:
                if following is not None and id(following) not in seen:
                    seen.add(id(following))
                    kept.append(following)
                    heapq.heappush(heap, (sequence_number(following), len(kept), following))
        return len(steps)


class Mistakes:
    """Watches the job, and warns of each mistake once."""

    def __init__(self, device: torch.device, models: Models, watches: bool) -> None:
        """
        Args:
            watches: whether on this rank: one is enough, as all run the same code.
        """
        self._device = device
        self._steps = 0 if watches else FIRST + STEPS
        self._marks = _Marks()
        self._held: dict[Variable, _Held] | None = None
        self._empties = 0
        self._emptied_at: Place | None = None
        self._restore: Callable[[], None] | None = None
        self._models = models
        self._checks = CHECKS if watches else 0
        """How many more batches of evaluations are checked."""
        self._hooks: list[RemovableHandle] = []
        self._is_computed = False
        """Whether that batch was computed with gradients."""

    # -- growing variables

    def step_done(self) -> None:
        """Look at the job's variables if it is time. Call it after each step, from a call of the job."""
        self._remove_hooks()
        if self._steps >= FIRST + STEPS:
            return
        self._steps += 1
        if self._steps < FIRST:
            return
        self._marks.add()
        if self._steps == FIRST:
            self._held = self._look()
            self._count_empties()
        elif self._steps == FIRST + STEPS:
            self._compare()
            self.close()

    def close(self) -> None:
        """Forget what was counted, and count no calls any more."""
        self._remove_hooks()
        self._held = None
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _compare(self) -> None:
        found = self._look()
        if self._held is not None and found is not None:
            for variable, held in found.items():
                if (mistake := self._mistake(held, self._held.get(variable, _Held()))) is not None:
                    log_lines.warn(f"{variable.place()}: `{variable.path}` {mistake}")
        if self._empties >= STEPS:
            log_lines.warn(
                f"{self._emptied_at}: `torch.cuda.empty_cache()` in every step makes the GPU wait, and torch allocate"
                " its memory again: remove it"
            )

    def _mistake(self, held: _Held, before: _Held) -> str | None:
        # an average may forget the oldest graphs, and the newest belongs to this step
        if held.graphs >= STEPS - 2:
            return f"keeps the graphs of {held.graphs} steps: use `.item()` or `.detach()` of what is added to it"
        grown = held.size - before.size
        if held.tensors - before.tensors >= STEPS and grown >= LEAST_GROWTH:
            return (
                f"holds {held.tensors - before.tensors} tensors more than {STEPS} steps ago, {human_size(grown)} on"
                f" {self._device}: keep numbers (`.item()`), or move to the CPU what is needed later"
            )
        return None

    def _look(self) -> dict[Variable, _Held] | None:
        """Return what the job's variables hold; None if that takes too long to find out."""
        look = Look(time.perf_counter() + LOOK_SECONDS)
        found = {}
        for variable, tensors in variables_of(sys._getframe(), look):
            own = [each for each in tensors if each.grad_fn is None and each.device.type == self._device.type]
            graphs = self._marks.steps_of([each for each in tensors if each.grad_fn is not None])
            # a single tensor does not grow
            size = sum(each.nbytes for each in own) if variable.is_container else 0
            found[variable] = _Held(len(own), size, graphs)
        return None if look.is_over else found

    def _count_empties(self) -> None:
        original = torch.cuda.empty_cache

        def counted() -> None:
            self._empties += 1
            self._emptied_at = place_of_call(sys._getframe())
            original()

        def restore() -> None:
            if torch.cuda.empty_cache is counted:
                torch.cuda.empty_cache = original

        torch.cuda.empty_cache = counted
        self._restore = restore

    # -- evaluation

    def evaluate_batch(self) -> None:
        """Record the next batch of a loop over `run.shard`: of the first of each two, calls of models are noted."""
        if self._hooks:
            self._remove_hooks()
            if self._is_computed:
                self._checks = 0
                log_lines.warn(
                    f"{place_of_call(sys._getframe())}: the model is evaluated with gradients on, which keeps all"
                    " activations: put the loop under `torch.no_grad()`"
                )
        elif self._checks:
            self._checks -= 1
            self._is_computed = False
            hook = InputHook(self._note_call)
            self._hooks = [model.register_forward_pre_hook(hook, with_kwargs=True) for model in self._models.held()]

    def _note_call(self, model: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and not model.training:
            # or gradients of the inputs are wanted
            self._is_computed |= not any(
                each.requires_grad for each in leaves_of(inputs) if isinstance(each, torch.Tensor)
            )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
