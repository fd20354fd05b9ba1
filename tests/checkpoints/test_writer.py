"""Files of tensors: read by the safetensors library and by torch's own reader, whole or in parts of other ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import load

from mgpu_slurm.checkpoints.reader import StoredTensors
from mgpu_slurm.checkpoints.writer import _TYPES, HostCopies, Part, summed, write
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.communication import codec
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


def whole(values: torch.Tensor) -> Part:
    return Part(values, (0,) * values.dim())


def bits(values: torch.Tensor) -> list[int]:
    return list(values.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_safetensors_library_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    parts = {str(kind): whole(torch.arange(6).reshape(2, 3).to(kind)) for kind in _TYPES}
    parts |= {"scalar": whole(torch.tensor(1.5)), "empty": whole(torch.zeros(0, 3)), "ü\n": whole(torch.ones(1))}
    written = write(tmp_path / "a.safetensors", parts)
    assert written == summed(tmp_path / "a.safetensors")
    assert written.size == (tmp_path / "a.safetensors").stat().st_size
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        assert (found[name].dtype, found[name].shape) == (part.values.dtype, part.values.shape)
        assert bits(found[name]) == bits(part.values)


@pytest.mark.parametrize("place", [0, 9, 100, -1])
def test_checksum_changes_if_one_bit_flips(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a.safetensors"
    written = write(path, {"a": whole(torch.randn(100))})
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert summed(path) != written


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a", {})
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", {})


# -- copies in main memory


def test_host_copies_are_snapshots_and_reuse_memory() -> None:
    copies = HostCopies()
    weight = torch.randn(3, 4)
    first = copies.take({"weight": weight, "turned": weight.T}, is_main=True)
    before, place = weight.clone(), first["weight"].values.data_ptr()
    weight.add_(1)
    assert torch.equal(first["weight"].values, before)
    assert torch.equal(first["turned"].values, before.T)
    assert first["turned"].values.is_contiguous()
    again = copies.take({"weight": weight}, is_main=True)
    assert again["weight"].values.data_ptr() == place
    assert copies.take({"weight": torch.ones(7)}, is_main=True)["weight"].values.shape == (7,)


def test_other_ranks_copy_no_replicated_tensors() -> None:
    assert HostCopies().take({"weight": torch.ones(1)}, is_main=False) == {}


class Holds:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"a": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: torch.eye(2).to_sparse(),
            "is a torch.sparse_coo tensor of torch.float32, which a checkpoint cannot hold",
        ),
        (lambda: torch.eye(2).to_sparse_csr(), "is a torch.sparse_csr tensor of torch.float32"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is a quantized tensor of torch.qint8"),
        (lambda: torch.ones(2, dtype=torch.complex128), "is a torch.strided tensor of torch.complex128"),
        (lambda: torch.ones(2, device="meta"), "is a tensor on the meta device, without values"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is a nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "is a nested tensor"),
        (lambda: nn.LazyLinear(2).weight, "has no shape yet: call the module once with a batch first"),
        (lambda: np.ones(2, np.complex128), "is a torch.strided tensor of torch.complex128"),
        (lambda: np.ones(2, np.longdouble), "is a NumPy <f16, which torch does not have: convert it"),
        (lambda: np.ones(2, ">f4"), "is a NumPy >f4, which torch does not have: convert it"),
    ],
)
def test_unsupported_tensor_is_rejected_by_restore(make: Any, words: str, run: Run) -> None:
    with pytest.raises(UserError) as caught:
        run.restore(model=nn.Linear(1, 1), other=Holds(make()))
    assert str(caught.value).startswith(f"run.restore(other=...): other.a.0 {words}")


# -- parts of several ranks


def sharded(run: Run, folder: str, start: int, end: int) -> dict[str, Any]:
    """Trains a sharded model from one step to another, from what ranks have written at the first; its whole weights."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(start)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    if run.world_size > 1:
        for part in (*model, model):
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.linspace(0, 1, 14).reshape(2, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> dict[str, Any]:
        found: dict[str, Any] = model.state_dict()
        whole = {name: value.full_tensor() if run.world_size > 1 else value for name, value in found.items()}
        return {name: value.tolist() for name, value in whole.items()}

    def state() -> tuple[Any, dict[str, torch.Tensor]]:
        return codec.split({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "s")

    if start:
        # what an optimizer keeps is there after its first step
        step()
        shape, like = state()
        stored = codec.joined(shape, StoredTensors(sorted(Path(folder).iterdir()), like))
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
    for _ in range(start, end):
        step()
    if not start:
        write(Path(folder) / f"rank-{run.rank}.safetensors", HostCopies().take(state()[1], run.is_main))
        dist.barrier()
    then = weights()
    step()
    return {"then": then, "after": weights()}


@pytest.mark.needs_torch("2.7")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sharded_state_of_two_ranks_loads_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    before, _ = run_ranks(sharded, 2, str(tmp_path), 0, 3)
    assert len(os.listdir(tmp_path)) == 2
    for found in run_ranks(sharded, ranks, str(tmp_path), 3, 3):
        assert found["then"] == before["then"]
        for name, values in found["after"].items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(before["after"][name]))


# torch's reader
@pytest.mark.needs_torch("2.8")
def test_single_process_and_torch_reader_load_whole_tensors(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    (before, _) = run_ranks(sharded, 2, str(tmp_path), 0, 1)
    stored = StoredTensors(sorted(tmp_path.iterdir()), like={})
    weight = stored["s.model.0.weight"]
    assert weight.tolist() == before["then"]["0.weight"]
    theirs = {"s.model.0.weight": torch.zeros(5, 7), "s.optimizer.state.0.exp_avg": torch.zeros(5, 7)}
    with pytest.warns(UserWarning, match="in a single process"):
        load(theirs, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(theirs["s.model.0.weight"], weight)
    assert torch.equal(theirs["s.optimizer.state.0.exp_avg"], stored["s.optimizer.state.0.exp_avg"])
