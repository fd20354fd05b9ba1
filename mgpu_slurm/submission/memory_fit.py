"""What a job would hold in the memory of each GPU, before it is submitted: `submit --dry-run --fit`.

A process of its own runs the job on tensors without values (`training.memory.planning`), once for each pipeline stage.
If that is more than a GPU has, options that take less are tried in the same way.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mgpu_slurm.core import interpreter, node_gpus
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import binary_size, counted
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import index
from mgpu_slurm.request.parallelism import SHARDED
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import LayerMemory, MemoryPlan
from mgpu_slurm.submission import submit
from mgpu_slurm.submission.plan import Plan, Request

SPARE = 0.1
"""Part of a GPU's memory that CUDA itself, its libraries and fragmentation may take."""

TIMEOUT = 900
"""Seconds for which a job may run."""

MOST_RUNS = 100
"""Number of newest runs among which one on the same GPUs is searched."""

_RECOMPUTE = "run.wrap(blocks=..., recompute=True)"

_NUMBERED = re.compile(r"(?P<path>.*?)(?P<number>\d+)")


@dataclass(frozen=True)
class Gpu:
    """The memory of a cluster's GPUs."""

    memory: int
    """Bytes."""
    source: str
    """Where that is written."""

    def has_room_for(self, peak: int) -> bool:
        return peak <= (1 - SPARE) * self.memory


@dataclass(frozen=True)
class Change:
    """Another way to run the job."""

    words: str
    """What the user would change."""
    spec: Spec
    limit: int = 0
    """Number of samples at once, if the job leaves that to the run; 0 for all."""
    recomputes: bool = False


@dataclass(frozen=True)
class Fit:
    """What a job would hold in memory, and whether its GPUs have that much."""

    plans: Sequence[MemoryPlan]
    """That of each pipeline stage."""
    gpu: Gpu | None
    """None if nothing says how much memory they have."""
    cluster: str
    """The name of the cluster in `mgpu.yaml`."""
    compiles: bool = False
    """Whether models will be compiled."""
    tried: Sequence[tuple[Change, int | str]] = ()
    """Changes with the peak that each leads to, in bytes, or why it is impossible."""

    @property
    def largest(self) -> MemoryPlan:
        """Return the plan of the stage that takes the most."""
        return max(self.plans, key=lambda plan: plan.peak)

    @property
    def fits(self) -> bool | None:
        """Return whether there is room; None if that is unknown."""
        return None if self.gpu is None else self.gpu.has_room_for(self.largest.peak)

    def lines(self) -> list[str]:
        """Return the lines to show after those of the plan."""
        plan = self.largest
        kinds = ", ".join(f"{kind} {binary_size(size)}" for kind, size in plan.kinds.items())
        stage = f" in stage {self.plans.index(plan)}" if len(self.plans) > 1 else ""
        samples = f", with {counted(plan.samples, 'sample')}" if plan.samples else ""
        where = f"{plan.phase}{stage}{samples}"
        told = [f"memory    {binary_size(plan.peak)} per GPU ({where})", f"          {kinds}"]
        told += ["          as without --compile, with which activations usually take less"] if self.compiles else []
        told += [self._verdict()]
        told += [f"          {self._outcome(change, outcome)}" for change, outcome in self.tried]
        if self.tried and not any(self._has_room(outcome) for _, outcome in self.tried):
            told.append("          none of these is enough: use more GPUs, or a smaller model or batch")
        return told + _table(plan.layers)

    def _verdict(self) -> str:
        if self.gpu is None:
            entry = f"clusters: {{{self.cluster}: {{gpu-memory: 80GiB}}}}"
            return f"gpu       memory unknown: set it in mgpu.yaml, such as `{entry}`"
        left = self.gpu.memory - self.largest.peak
        has = f"gpu       {binary_size(self.gpu.memory)} ({self.gpu.source})"
        if self.fits:
            return f"{has}: fits"
        if left < 0:
            return f"{has}: does not fit"
        return f"{has}: may not fit, as CUDA and fragmentation need some of the {binary_size(left)} left"

    def _outcome(self, change: Change, outcome: int | str) -> str:
        if isinstance(outcome, str):
            return f"{change.words}: {outcome}"
        return f"{change.words}: {binary_size(outcome)}, {'fits' if self._has_room(outcome) else 'does not fit'}"

    def _has_room(self, outcome: int | str) -> bool:
        return self.gpu is not None and isinstance(outcome, int) and self.gpu.has_room_for(outcome)

    def to_json(self) -> dict[str, Any]:
        """Return the facts for programs."""
        return {
            "stages": [plan.to_json() for plan in self.plans],
            "peak": self.largest.peak,
            "gpu_memory": self.gpu and self.gpu.memory,
            "fits": self.fits,
            "tried": [
                {"change": change.words, "error" if isinstance(outcome, str) else "peak": outcome}
                for change, outcome in self.tried
            ],
        }


def rehearse(request: Request, note: Note = quiet) -> tuple[Plan, Fit]:
    """Do what `submit.rehearse` does, and also return what the job would hold in memory.

    Raises:
        UserError: the job cannot be run in this way, or fails.
    """
    found: list[Fit] = []
    plan = submit.rehearse(request, note, lambda made, folder: found.append(_fit(made, folder, note)))
    return plan, found[0]


def _fit(made: Plan, folder: RunFolder, note: Note) -> Fit:
    """Plan the memory of a run whose folder is complete, and of changes if there is no room for it."""
    spec = made.spec
    _refuse(spec)
    note("--fit: running the job on tensors without values")
    cluster = spec.cluster or ("local" if spec.nodes_are_simulated else "NAME")
    fit = Fit(_plans(folder, Change("", spec)), _gpu_of(made), cluster, bool(spec.parallelism.compile))
    tried: list[tuple[Change, int | str]] = []
    if fit.gpu is None or fit.fits:
        return fit
    for change in _changes(spec, fit.largest, fit.gpu):
        note(f"--fit: the job does not fit; trying {change.words}")
        try:
            outcome: int | str = max(plan.peak for plan in _plans(folder, change))
        except UserError as error:
            outcome = str(error).removeprefix("--fit: ")
        tried.append((change, outcome))
        if isinstance(outcome, int) and fit.gpu.has_room_for(outcome):
            break
    return replace(fit, tried=tried)


def _refuse(spec: Spec) -> None:
    """
    Raises:
        UserError: memory cannot be planned for this kind of run.
    """
    if spec.target.is_command:
        raise UserError("--fit needs a job function: a command runs code that is not known")
    if spec.parallelism.strategy == "dp":
        raise UserError("--fit does not support --strategy dp, which uses the first GPU most: use --strategy ddp")
    if spec.parallelism.precision == "fp8":
        raise UserError("--fit does not support --precision fp8: use bf16, which takes more")


def _plans(folder: RunFolder, change: Change) -> list[MemoryPlan]:
    change.spec.write(folder)
    resources = change.spec.resources
    layout = change.spec.parallelism.layout(resources.ranks, resources.ranks_per_node)
    return [_plan(folder, rank, change) for rank in layout.first_ranks]


def _plan(folder: RunFolder, rank: int, change: Change) -> MemoryPlan:
    """Run the job as one rank.

    Raises:
        UserError: it failed.
    """
    folder.memory_plan.unlink(missing_ok=True)
    numbers = (str(rank), str(change.limit), str(int(change.recomputes)))
    command = interpreter.command(sys.executable, "mgpu_slurm.training.memory.planning", str(folder.path), *numbers)
    # a compiled model has other activations, which nobody knows before it is compiled for a GPU
    environment = os.environ | node_gpus.HIDDEN | {"TORCHDYNAMO_DISABLE": "1", "WANDB_MODE": "disabled"}
    with tempfile.TemporaryFile("w+") as output:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        try:
            done = subprocess.run(command, env=environment, timeout=TIMEOUT, check=False, **options)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"--fit: the job has not taken two optimizer steps in {TIMEOUT // 60} minutes: try it with less data"
            ) from None
        output.seek(0)
        last = (output.read().strip().splitlines() or ["it printed nothing"])[-1]
    recorded = read_json(folder.memory_plan)
    if recorded is None:
        code = done.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise UserError(f"--fit: the process that ran the job ended with {how}: {last}")
    plan = MemoryPlan.from_json(recorded)
    if plan.error is not None:
        raise UserError(f"--fit: {plan.error}")
    return plan


# -- the GPUs, and what takes less


def _gpu_of(made: Plan) -> Gpu | None:
    """Return the memory of the GPUs that a run will have: from the cluster file, else of the newest run there."""
    if made.gpu_memory is not None:
        return Gpu(made.gpu_memory, "gpu-memory in mgpu.yaml")
    spec = made.spec
    root = made.folder.path.parent
    known = index.folders(root) if root.exists() else []
    for folder in sorted(known, key=_time_of, reverse=True)[:MOST_RUNS]:
        # another version or user may have written it
        with suppress(UserError, OSError):
            state = records.read_state(folder)
            if state.gpu_memory is not None and _place(read_spec(folder)) == _place(spec):
                return Gpu(state.gpu_memory, f"{state.gpu} in run {folder.run}")
    return None


def _time_of(folder: RunFolder) -> float:
    return folder.path.stat().st_mtime if folder.path.exists() else 0.0


def _place(spec: Spec) -> tuple[object, ...]:
    return spec.executor, spec.cluster, spec.resources.partition


def _changes(spec: Spec, plan: MemoryPlan, gpu: Gpu) -> Iterator[Change]:
    """Yield changes of a run that may take less memory, those with the fewest effects first."""
    if plan.splits and (samples := _samples_with_room(plan, gpu)):
        yield Change(f"{counted(samples, 'sample')} at once, by run.gradients", spec, samples)
    options: list[tuple[str, dict[str, Any]]] = []
    given = spec.parallelism
    if spec.resources.ranks > 1 and given.strategy not in SHARDED and not (given.tensor or given.pipeline):
        options.append(("--strategy fsdp", {"strategy": "fsdp"}))
    if given.precision in (None, "fp32", "tf32"):
        options.append(("--precision bf16", {"precision": "bf16"}))
    single = [Change(words, _with_options(spec, change)) for words, change in options]
    yield from single
    if plan.can_recompute:
        yield Change(_RECOMPUTE, spec, recomputes=True)
    if len(options) > 1:
        both = {name: value for _, change in options for name, value in change.items()}
        single.append(Change(" ".join(words for words, _ in options), _with_options(spec, both)))
        yield single[-1]
    if single and plan.can_recompute:
        yield Change(f"{single[-1].words} and {_RECOMPUTE}", single[-1].spec, recomputes=True)


def _with_options(spec: Spec, changed: dict[str, Any]) -> Spec:
    return replace(spec, parallelism=replace(spec.parallelism, **changed))


def _samples_with_room(plan: MemoryPlan, gpu: Gpu) -> int:
    """Return how many samples at once have room if activations grow with them; 0 if not even one has."""
    samples, activations = plan.samples, plan.kinds.get("activations", 0)
    others = plan.peak - activations
    while samples and not gpu.has_room_for(others + activations * samples // max(1, plan.samples)):
        samples //= 2
    return samples


# -- the table of layers


def _table(layers: Sequence[LayerMemory]) -> list[str]:
    """Return lines with the outermost layers of a model, and its repeated ones as one."""
    from tabulate import tabulate

    names = {layer.name for layer in layers}
    outermost = [layer for layer in layers if layer.name and not any(each in names for each in _above(layer.name))]
    groups: list[list[LayerMemory]] = []
    for layer in outermost or layers:
        if groups and _follows(groups[-1][-1], layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    rows = [("layer", "class", "output", "parameters", "memory"), *map(_row, groups)]
    aligned = ("left", "left", "left", "right", "right")
    return ["", *tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=aligned).splitlines()]


def _above(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain one, without the model's own."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _follows(before: LayerMemory, layer: LayerMemory) -> bool:
    """Return whether a layer repeats the one before it."""
    first, second = _NUMBERED.fullmatch(before.name), _NUMBERED.fullmatch(layer.name)
    is_next = first and second and first["path"] == second["path"] and int(first["number"]) + 1 == int(second["number"])
    return bool(is_next) and replace(before, name="", memory=0) == replace(layer, name="", memory=0)


def _row(group: Sequence[LayerMemory]) -> tuple[str, str, str, str, str]:
    first, last = group[0], group[-1]
    number = last.name.rpartition(".")[2]
    name = first.name if first is last else f"{first.name} to {number}"
    return (
        name or "(model)",
        first.kind,
        " x ".join(map(str, first.shape)) or "-",
        f"{sum(layer.parameters for layer in group):,}",
        binary_size(max(0, sum(layer.memory for layer in group))),
    )
