"""Models compiled by --compile train like others, under every strategy, with few compilations, and resume exactly."""

from __future__ import annotations

import copy
import functools
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import RunStopped, UserError
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import Stop, StopFlag
from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.training import entry
from mgpu_slurm.training.parallel import compilation
from mgpu_slurm.training.parallel.pipeline import Pipeline
from mgpu_slurm.training.run import Run
from tests import ranks
from tests.forks import in_fork
from tests.ranks import run_ranks
from tests.support import require

CPU = torch.device("cpu")
PLAN = {"*.up": "column", "*.down": "row"}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"precision": "fp16"},
    {"strategy": "fsdp", "precision": "bf16"},
    {"tensor": 2},
    {"pipeline": 2},
)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), Block(dropout), Block(dropout), Block(dropout), nn.Linear(16, 1))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.mean(1) - targets).square().mean()


def own_run(run: Run, **options: Any) -> Run:
    """Return another run in this process."""
    facts = RankInfo(run.rank, run.world_size, run.rank, run.world_size)
    layout = Parallelism(**options).layout(run.world_size, run.world_size)
    return Run(facts, Path(tempfile.mkdtemp()), CPU, 1, StopFlag(), layout=layout)


def counted(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a call, and how often torch has compiled in it."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    result = work()
    assert not counters["graph_break"]
    return result, counters["stats"]["unique_graphs"]


# -- the strategies, with a backend that needs no compiler


def trained(run: Run, recompute: bool, options: dict[str, Any], compiles: bool) -> dict[str, torch.Tensor]:
    """Return the state of a model after four steps, with batches of two sizes."""
    own = own_run(run, compile=compiles, **options)
    layers = make_model()
    model: Any
    if "pipeline" in options:
        model = own.pipeline([*layers], loss_of, micro_batches=2)
    else:
        model = own.wrap(layers, blocks=(Block,), plan=PLAN, recompute=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for size in (8, 8, 4, 8):
        inputs, targets = torch.randn(size, 6, generator=generator), torch.randn(size, generator=generator)
        if isinstance(model, Pipeline):
            model.gradients(inputs, targets)
        else:
            own.backward(loss_of(model(inputs), targets))
        own.update(optimizer)
    own.close()
    state = model.state_dict()
    return {name: getattr(each, "full_tensor", lambda own=each: own)().detach().clone() for name, each in state.items()}


def compile_without_inductor() -> None:
    """Trace and differentiate, in this process, but generate no code."""
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend("aot_eager")
    else:
        torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]


def under_each_strategy(run: Run) -> dict[str, Any]:
    compile_without_inductor()
    found = {}
    for options in LAYOUTS:
        recompute = options.get("strategy") == "fsdp"
        expected = trained(run, recompute, options, compiles=False)
        state, compilations = counted(lambda: trained(run, recompute, options, compiles=True))  # noqa: B023
        distance = max(float((state[name] - expected[name]).abs().max()) for name in expected)
        found[str(options)] = [*state] == [*expected], distance, compilations
    return found


@pytest.mark.long
def test_compiled_models_train_as_others_do_under_each_strategy() -> None:
    for found in run_ranks(under_each_strategy, 2):
        for options, (has_same_names, distance, compilations) in found.items():
            assert has_same_names, options
            assert distance < 1e-5, options
            # of the blocks, and of the layer of a pipeline that comes before or after them
            assert compilations <= (4 if "pipeline" in options else 2), options


# -- how often torch compiles


class TooLarge:
    """Raises the error of a full GPU if a part of a batch is too large."""

    def __init__(self, model: nn.Module, most: int) -> None:
        self._model, self._most = model, most

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(inputs) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_of(self._model(inputs), targets)


def of_many_sizes(run: Run, most: int = 3) -> None:
    """Train with batches that are halved until they fit, and evaluate, also a copy of the model."""
    own = own_run(run, compile=True)
    model = own.wrap(make_model(), blocks=(Block,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (16, 13, 16):
        own.gradients(TooLarge(model, most), torch.randn(size, 6), torch.randn(size))
        own.update(optimizer)
    for each in (model, copy.deepcopy(model)):
        each.eval()
        with torch.no_grad():
            for size in (16, 11, 5):
                each(torch.randn(size, 6))
    own.close()


def once_for_each_size(run: Run) -> None:
    own = own_run(run, compile=True)
    own.seed(0, deterministic=True)
    model = own.wrap(make_model(), blocks=(Block,))
    for size in (8, 5, 8, 3, 5):
        model(torch.randn(size, 6)).sum().backward()
    own.close()


def whole_model(run: Run) -> None:
    own = own_run(run, compile=True, precision="bf16")
    model = own.wrap(make_model())
    assert model(torch.randn(4, 6)).dtype == torch.float32
    # what is compiled already stays as it is
    assert own.wrap(model) is model
    compiled: Any = torch.compile(make_model())
    assert own.wrap(compiled) is compiled
    compiled(torch.randn(4, 6))
    own.close()


def limit_for_kinds() -> int:
    """Return how many more compilations than by default are allowed for two kinds of modules of one class."""
    from torch._dynamo import config

    name = torch_versions.compilation_limit()
    before = getattr(config, name)
    compilation.compile_layers([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)], CPU, in_order=False)
    return int(getattr(config, name)) - before


def numbers(run: Run) -> list[int]:
    compile_without_inductor()
    torch_versions.deterministic_options = lambda: None  # type: ignore[assignment, return-value]
    found = [counted(lambda: work(run))[1] for work in (of_many_sizes, once_for_each_size, whole_model)]  # noqa: B023
    return [*found, limit_for_kinds()]


def test_torch_compiles_once_for_identical_blocks_and_rarely_for_other_sizes() -> None:
    # one size of a batch, then any, and any in evaluation; each size; a model by --compile, and one by the job
    assert run_ranks(numbers, 1) == [[3, 3, 2, 16]]


# -- with the compiler that users have


def with_dropout(run: Run, steps: int | None = None) -> tuple[int, dict[str, Any]]:
    """Train, and return the first step and the model's state: as numbers, because tensors that are sent last only as
    long as their process."""
    run.seed(5, deterministic=True)
    model = run.wrap(make_model(dropout=0.2), blocks=(Block,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    data = run.loader(TensorDataset(torch.randn(16, 6, generator=generator)), batch_size=4, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    began = run.step
    for _ in state.epochs(2):
        for (inputs,) in data:
            if run.step == steps:
                run._loop_control.stop.asked = Stop.END
            run.backward(model(inputs).square().mean())
            run.update(optimizer)
    return began, {name: each.tolist() for name, each in model.state_dict().items()}


def use_compiler(cache: str) -> None:
    """Compile as fast as possible: without optimizations, for any CPU."""
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "AOT_INDUCTOR_DEBUG_COMPILE": "1",
        "ATEN_CPU_CAPABILITY": "default",
    }


def whole_then_stopped(run: Run, cache: str, folder: Path) -> tuple[dict[str, Any], float]:
    use_compiler(cache)
    own = own_run(run, compile=True)
    _, whole = with_dropout(own)
    own.close()
    layout = Parallelism(compile=True).layout(1, 1)
    stopped = Run(RankInfo(), folder, CPU, 1, StopFlag(), layout=layout)
    with pytest.raises(RunStopped):
        with_dropout(stopped, steps=5)
    stopped.close()
    return whole, _distance_to_eager(run)


def _distance_to_eager(run: Run) -> float:
    """Return the largest difference of gradients to those of a model that is not compiled."""
    own = own_run(run, compile=True)
    compiled, plain = own.wrap(make_model(), blocks=(Block,)), make_model()
    inputs = torch.randn(4, 6)
    for model in (compiled, plain):
        model(inputs).square().mean().backward()
    own.close()
    pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
    return max(float((one.grad - other.grad).abs().max()) for one, other in pairs)  # type: ignore[operator]


def resumed(run: Run, cache: str) -> tuple[int, int, dict[str, Any], int]:
    use_compiler(cache)
    from torch._dynamo.utils import counters

    began, state = with_dropout(run)
    return began, run.step, state, counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_compiled_run_resumes_exactly_and_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a C++ compiler takes half a minute of CPU time
    monkeypatch.setattr(ranks, "PATIENCE", 250)
    require(None if shutil.which("g++") else "no g++: apt-get install g++")
    cache, folder = str(tmp_path / "cache"), tmp_path / "run"
    folder.mkdir()
    ((whole, distance),) = run_ranks(whole_then_stopped, 1, cache, folder)
    assert distance < 1e-5
    layout = Parallelism(compile=True).layout(1, 1)
    ((began, step, state, misses),) = run_ranks(resumed, 1, cache, folder=folder, layout=layout)
    assert (began, step, misses) == (6, 8, 0)
    assert state == whole
    assert list(Path(cache, "headers").glob("*")), "precompiled headers are elsewhere"


# -- errors


@pytest.mark.parametrize(("device", "lacks"), [("cpu", r"C\+\+ compiler, and .+ has no g\+\+"), ("cuda", "C compiler")])
def test_missing_compiler_is_named(device: str, lacks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=f"--compile needs a {lacks}"):
        compilation.compile_model(make_model(), (), torch.device(device), in_order=False)


def compile_without_openssl(run: Run, folder: Path) -> float:
    programs = folder / "bin"
    programs.mkdir()
    for path in (path for place in os.get_exec_path() if os.path.isdir(place) for path in Path(place).iterdir()):
        if path.name != "openssl" and not (programs / path.name).exists():
            (programs / path.name).symlink_to(path)
    os.environ |= {"PATH": str(programs), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    assert shutil.which("openssl") is None
    model = make_model()
    compilation.compile_model(model, (), CPU, in_order=False)
    found: float = model(torch.ones(2, 6)).sum().item()
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_model_is_compiled_without_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE", 250)
    torch.manual_seed(0)
    assert math.isfinite(run_ranks(compile_without_openssl, 1, tmp_path)[0])


def processes_that_compile(told: str) -> int | None:
    from torch._inductor import config

    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": told, "OMP_NUM_THREADS": "1"}
    with entry.compiler_cache_in_use():
        return config.compile_threads


def test_rank_compiles_in_as_many_processes_as_it_is_told_even_if_forked() -> None:
    """The process from which it was forked has imported the compiler, which reads the variable then."""
    assert in_fork(processes_that_compile, "3") == 3


def test_blocks_that_do_not_exist_are_named() -> None:
    with pytest.raises(UserError, match=r"the Sequential contains no Conv1d"):
        compilation.compile_model(make_model(), (nn.Conv1d,), CPU, in_order=False)
