"""How the ranks of a run share its model: the strategy, and the grid of ranks that follows from it. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.core.formatting import counted

Strategy = Literal["auto", "ddp", "zero2", "fsdp", "hsdp", "single", "dp"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

SHARDED: tuple[Strategy, ...] = ("zero2", "fsdp", "hsdp")
"""Strategies in which each rank holds a part of every parameter."""


@dataclass(frozen=True)
class Parallelism:
    """The options for sharing a model; None is the default of a new run, or the value of a resumed one."""

    strategy: Strategy | None = None
    """`ddp` copies the model to every rank, and `auto` means the same; `fsdp` shards parameters, gradients and
    optimizer state (ZeRO-3); `zero2` gathers the parameters only once a step; `hsdp` shards within groups of ranks and
    copies the shards between them; `single` is one rank with all of its devices, `dp` one with DataParallel."""
    shard: int | None = None
    """Number of ranks that hold one copy of the model together; by default all, with `hsdp` those of a node."""
    tensor: int | None = None
    """Number of ranks that compute each layer together, on the same batch."""
    pipeline: int | None = None
    """Number of stages: groups of ranks that hold consecutive layers."""
    precision: Precision | None = None
    """Precision in which models compute; parameters stay in float32. `fp16` scales the loss."""
    compile: bool | None = None
    """Whether models are compiled by `torch.compile`."""

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in PRECISIONS:
            hint = nearest(str(self.precision), [*PRECISIONS])
            raise UserError(f"--precision {self.precision}: unknown precision{hint}")
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise UserError(f"--strategy {self.strategy}: unknown strategy{nearest(str(self.strategy), [*STRATEGIES])}")
        for name, number in (("shard", self.shard), ("tensor", self.tensor), ("pipeline", self.pipeline)):
            if number is not None and number < 1:
                raise UserError(f"--{name} {number}: expected at least 1")

    @staticmethod
    def taken_from(options: MutableMapping[str, Any]) -> Parallelism:
        """Remove these options from those of a command, and return them."""
        return Parallelism(**{each.name: options.pop(each.name) for each in dataclasses.fields(Parallelism)})

    @property
    def given(self) -> dict[str, object]:
        """Return the values that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def words(self) -> str:
        """Return the given options as a line for the screen."""
        others = [f"{name} {value}" for name, value in self.given.items() if name not in ("strategy", "compile")]
        compiles = [] if self.compile is None else ["compile" if self.compile else "no compile"]
        return "  ".join([self.strategy or "ddp", *others, *compiles])

    def over(self, other: Parallelism) -> Parallelism:
        """Return the options of both; those of this one take precedence, and another strategy has its own `shard`."""
        if self.strategy not in (None, other.strategy):
            other = dataclasses.replace(other, shard=None)
        return dataclasses.replace(other, **self.given)  # type: ignore[arg-type]

    def fitted(self, ranks: int) -> Parallelism:
        """Return the options as defaults for a number of ranks: without numbers that do not divide it."""
        fitting = self
        if ranks % self._ranks_per_batch:
            fitting = dataclasses.replace(fitting, tensor=None, pipeline=None)
        if fitting.shard is not None and ranks // fitting._ranks_per_batch % fitting.shard:
            fitting = dataclasses.replace(fitting, shard=None)
        return fitting

    @property
    def _ranks_per_batch(self) -> int:
        """Number of ranks that work on the same batch."""
        return (self.tensor or 1) * (self.pipeline or 1)

    def layout(self, ranks: int, ranks_per_node: int) -> Layout:
        """Return the grid of ranks.

        Raises:
            UserError: the options do not fit each other or the number of ranks.
        """
        strategy = "ddp" if self.strategy in (None, "auto") else self.strategy
        assert strategy is not None
        self._check_combination(strategy)
        self._check_one_rank(strategy, ranks, ranks_per_node)
        data = self._data_ranks(ranks)
        tensor, pipeline, precision = self.tensor or 1, self.pipeline or 1, self.precision or "fp32"
        if tensor > 1 and data > 1 and strategy not in SHARDED:
            raise UserError(
                f"--tensor {tensor} with --strategy {strategy} on {ranks} ranks: torch copies a tensor-parallel model"
                f" only if it is sharded: use --strategy fsdp, or {tensor} ranks"
            )
        shards = 1
        if strategy in SHARDED:
            shards = self.shard or (max(1, ranks_per_node // tensor) if strategy == "hsdp" else data)
        if data % shards:
            fits = ", ".join(str(number) for number in range(1, data + 1) if data % number == 0)
            whose = f"{ranks} ranks of the run" if data == ranks else f"{data} data-parallel ranks"
            raise UserError(f"--shard {shards} does not divide the {whose}: use one of {fits}")
        return Layout(strategy, data // shards, shards, tensor, pipeline, precision, bool(self.compile))

    def _check_combination(self, strategy: Strategy) -> None:
        """Check that the options fit each other, whatever the number of ranks.

        Raises:
            UserError: they do not.
        """
        if self.shard is not None and strategy not in SHARDED:
            raise UserError(f"--shard {self.shard} with --strategy {strategy}: use --strategy fsdp, zero2 or hsdp")
        if self.compile and strategy == "dp":
            raise UserError("--compile with --strategy dp is not supported: use --strategy ddp")
        divided = {"tensor": self.tensor or 1, "pipeline": self.pipeline or 1}
        for name, number in divided.items():
            if number == 1:
                continue
            if self.precision in ("fp16", "fp8"):
                raise UserError(f"--precision {self.precision} with --{name} {number} is not supported: use bf16")
            if strategy not in _COMBINED[name]:
                *others, last = _COMBINED[name]
                raise UserError(
                    f"--{name} {number} with --strategy {strategy} is not supported: use --strategy"
                    f" {', '.join(others)} or {last}"
                )
        if divided["pipeline"] > 1 and self.shard is not None:
            raise UserError(f"--shard {self.shard} with --pipeline {self.pipeline} is not supported: leave --shard out")
        if min(divided.values()) > 1:
            raise UserError(f"--pipeline {self.pipeline} with --tensor {self.tensor} is not supported: use one of them")

    def _check_one_rank(self, strategy: Strategy, ranks: int, ranks_per_node: int) -> None:
        """Check the number of ranks for strategies of a single process.

        Raises:
            UserError: there are several ranks.
        """
        if strategy not in ("single", "dp") or ranks == 1:
            return
        if ranks > ranks_per_node:
            raise UserError(f"--strategy {strategy} runs on one node: use --nodes 1, or --strategy ddp")
        raise UserError(
            f"--strategy {strategy} runs in one process, and this run has {ranks}: use --ntasks-per-node 1, or"
            " --strategy ddp"
        )

    def _data_ranks(self, ranks: int) -> int:
        """Return the number of parts into which each batch is divided.

        Raises:
            UserError: the ranks cannot be divided into groups.
        """
        size = self._ranks_per_batch
        if ranks % size:
            name = "tensor" if (self.tensor or 1) > 1 else "pipeline"
            fits = [str(number) for number in (ranks // size * size, (ranks // size + 1) * size) if number]
            raise UserError(
                f"{counted(ranks, 'rank')} {'is' if ranks == 1 else 'are'} not a multiple of --{name} {size}: use"
                f" {' or '.join(fits)} ranks"
            )
        return ranks // size


_COMBINED: dict[str, tuple[Strategy, ...]] = {"tensor": ("fsdp", "hsdp", "ddp"), "pipeline": ("ddp", "fsdp")}
"""Strategies that work with models divided by layers, or within layers; with `ddp`, the latter has no copies."""

DEFAULT_PARALLELISM = Parallelism()


def compiles() -> bool:
    """Return whether the run of this process has the option `--compile`."""
    return bool(json.loads(os.environ.get(VARIABLE, "{}")).get("compile"))


LONGEST_COMPILATION = 4.0
"""A rank that compiles, or waits for ranks that do, may take this many times the limit of a stuck one longer."""

VARIABLE = "MGPU_LAYOUT"
"""The given options as JSON, in the environment of a command, for `attach()`."""


@dataclass(frozen=True)
class Layout:
    """The grid of a run's ranks, and how they compute.

    Its dimensions are pipeline, replicate, shard and tensor; the last one changes fastest, so that ranks which exchange
    the most are neighbours.
    """

    strategy: Strategy = "ddp"
    replicas: int = 1
    """Number of copies of the model."""
    shards: int = 1
    """Number of ranks over which the parameters of one copy are sharded."""
    tensor: int = 1
    """Number of ranks that compute each layer together, on the same batch."""
    pipeline: int = 1
    """Number of stages: groups of ranks that hold consecutive layers."""
    precision: Precision = "fp32"
    compile: bool = False
    """Whether models are compiled."""

    @property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` divides parameters over the ranks."""
        return self.strategy in SHARDED and self.data > 1

    @property
    def data(self) -> int:
        """Number of ranks over which each batch is divided."""
        return self.replicas * self.shards

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that work on the same batch."""
        return self.tensor * self.pipeline

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether ranks that share a model exchange nothing but gradients, so that the rest of a step is their own."""
        return not self.is_sharded and self.ranks_per_batch == 1

    @property
    def waits_in_backward(self) -> bool:
        """Whether ranks wait for each other in the backward pass, and nowhere else in a step."""
        return self.data > 1 and self.exchanges_in_backward

    def data_rank(self, rank: int) -> int:
        """Return the index of a rank's part of each batch."""
        return rank // self.tensor % self.data

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each stage."""
        return [stage * self.data * self.tensor for stage in range(self.pipeline)]

    def random_rank(self, rank: int) -> int:
        """Return a number that differs between ranks, except those that compute a layer together: they must draw the
        same random numbers."""
        return rank // self.tensor

    @property
    def grid(self) -> tuple[int, int, int] | None:
        """The numbers of stages, of parts of each batch, and of ranks that compute a layer together; None if each rank
        has a part of its own."""
        return None if self.ranks_per_batch == 1 else (self.pipeline, self.data, self.tensor)

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.data * self.tensor)

    @property
    def dimensions(self) -> dict[str, int]:
        """Return the size of each dimension of the device mesh, by name, in torch's order."""
        return {"pipeline": self.pipeline, "replicate": self.replicas, "shard": self.shards, "tensor": self.tensor}
