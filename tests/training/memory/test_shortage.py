"""The report on memory that has run out: where it is, and what would help."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mgpu_slurm.training.memory import shortage
from mgpu_slurm.training.memory.shortage import Holding, Pool, lines_of, report

GIB = 1 << 30
CPU = torch.device("cpu")
KINDS = {"parameters": 5 * GIB, "gradients": 5 * GIB, "optimizer": 10 * GIB}


class Recorder:
    """An object of the job, which keeps what it is given."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []


def run_out(recorder: Recorder) -> BaseException:
    """Return an error with the frames of a job that has filled its memory."""

    def step() -> None:
        scores = torch.zeros(1 << 18)
        little = torch.zeros(16)
        for _ in range(4):
            recorder.outputs.append(scores + little[0])
        for batch, _ in [(torch.zeros(1 << 17), 0)]:
            scores += batch[0]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    try:
        step()
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError


def test_report_names_kinds_and_the_largest_variables() -> None:
    model = nn.Linear(255, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 255)).sum().backward()
    optimizer.step()
    error = run_out(Recorder())
    line = 1 + Path(__file__).read_text().split("recorder.outputs.append")[0].count("\n")
    assert report(error, [model], [optimizer], CPU).splitlines() == [
        "out of memory: parameters 1.0 MiB, gradients 1.0 MiB, optimizer 2.0 MiB",
        f"  {__file__}:{line}: recorder.outputs holds 4.0 MiB in 4 tensors",
        f"  {__file__}:{line + 2}: scores holds 1.0 MiB in 1 tensor",
        f"  {__file__}:{line + 1}: batch holds 512.0 KiB in 1 tensor",
    ]


def test_report_of_a_gpu_shows_what_is_reserved_and_in_pieces() -> None:
    pool = Pool(allocated=40 * GIB, reserved=64 * GIB, total=80 * GIB)
    holdings = [Holding("train.py:3", "outputs", 400, 3 * GIB), Holding("train.py:4", "few", 1, 10)]
    assert [*lines_of(KINDS, pool, holdings)] == [
        "out of memory: tensors use 40.0 GiB of 64.0 GiB reserved; the GPU has 80.0 GiB",
        "  parameters 5.0 GiB, gradients 5.0 GiB, optimizer 10.0 GiB, other 20.0 GiB",
        "  train.py:3: outputs holds 3.0 GiB in 400 tensors",
        "  38% of the reserved memory is in pieces that no tensor fits into: set"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ]
    whole = Pool(allocated=60 * GIB, reserved=64 * GIB, total=80 * GIB)
    assert "pieces" not in "".join(lines_of(KINDS, whole, []))


def test_numbers_of_a_gpu_are_those_in_the_message_of_torch() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.12 GiB is"
        " free. Including non-PyTorch memory, this process has 78.12 GiB memory in use. Of the allocated memory 60.50"
        " GiB is allocated by PyTorch, and 16.25 GiB is reserved by PyTorch but unallocated. If reserved but"
    )
    assert Pool.of(message) == Pool(int(60.5 * GIB), int(76.75 * GIB), int(79.25 * GIB))


def test_optimizer_without_torch_states_and_variables_of_one_memory_are_no_obstacle() -> None:
    whole = torch.zeros(1 << 10)
    assert report(ValueError(), [], [object()], CPU).startswith("out of memory: parameters 0 B")
    memory = frozenset([whole.data_ptr()])
    holdings = [Holding("train.py:3", name, 1, 1 << 12, memory) for name in ("whole", "view")]
    assert len([*lines_of({"parameters": 0}, None, holdings)]) == 2


def test_views_count_once_and_the_cpu_has_no_pool() -> None:
    whole = torch.zeros(1 << 10)
    assert shortage._size([whole, whole[:5], whole.view(32, 32)]) == 1 << 12
    assert Pool.of("can't allocate memory: you tried to allocate 8 bytes") is None
