"""The state of a ResNet-50 with its momentum, saved in several ways that take turns; see `benchmarks/checkpoint.py`."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import TensorDataset

from benchmarks.measure import interleave
from mgpu_slurm import Run, import_torchvision

WARM_UPS = 2
"""Rounds that do not count: the first save of each way gets its memory."""

Seconds = tuple[float, float]
"""For how long the training stood, and until the checkpoint was on the disk."""


@dataclass
class Config:
    rounds: int


def train(run: Run, config: Config) -> dict[str, float]:
    # DCP's asynchronous save wants a group, also of a process alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = import_torchvision().models.resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    data = run.loader(TensorDataset(torch.arange(10 * config.rounds)), batch_size=1)
    run.checkpoints(every_minutes=None)
    run.restore(model=model, optimizer=optimizer, data=data)
    optimizer.step()
    objects = {"model": model, "optimizer": optimizer}
    tensors = [*model.state_dict().values()]
    tensors += [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    folder = run.folder / "others"
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    cases: dict[str, Callable[[], Seconds]] = {
        "copy": functools.partial(at_a_stroke, lambda: torch._foreach_copy_(buffers, tensors)),
        "run": functools.partial(by_run, run, iter(data)),
        "torch": functools.partial(at_a_stroke, lambda: by_torch(objects, folder)),
        "torch, synced": functools.partial(at_a_stroke, lambda: by_torch_synced(objects, folder)),
        "dcp": functools.partial(at_a_stroke, lambda: by_dcp(objects, folder)),
        "dcp, asynchronous": functools.partial(by_dcp_asynchronously, objects, folder),
    }
    seconds = interleave({name: in_own_folder(folder, case) for name, case in cases.items()}, config.rounds, WARM_UPS)
    (run.folder / "seconds.json").write_text(json.dumps(seconds))
    return {"bytes": float(sum(tensor.nbytes for tensor in tensors))}


def in_own_folder(folder: Path, case: Callable[[], Seconds]) -> Callable[[], Seconds]:
    def measure() -> Seconds:
        folder.mkdir()
        # what others have left to write is not this one's
        os.sync()
        try:
            return case()
        finally:
            shutil.rmtree(folder)

    return measure


def at_a_stroke(save: Callable[[], object]) -> Seconds:
    """Of a way in which the training stands until all is done."""
    start = time.perf_counter()
    save()
    took = time.perf_counter() - start
    return took, took


def by_run(run: Run, batches: Any) -> Seconds:
    run.step += 1
    run.save()
    start = time.perf_counter()
    next(batches)
    stood = time.perf_counter() - start
    run._saver.finish()
    return stood, time.perf_counter() - start


def states(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() for name, value in objects.items()}


def by_torch(objects: dict[str, Any], folder: Path) -> None:
    torch.save(states(objects), folder / "state.pt")


def by_torch_synced(objects: dict[str, Any], folder: Path) -> None:
    with open(folder / "new.pt", "wb") as file:
        torch.save(states(objects), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "new.pt", folder / "state.pt")


def by_dcp(objects: dict[str, Any], folder: Path) -> None:
    dcp.save(states(objects), checkpoint_id=folder)


def by_dcp_asynchronously(objects: dict[str, Any], folder: Path) -> Seconds:
    start = time.perf_counter()
    saved: Any = dcp.async_save(states(objects), checkpoint_id=folder)
    stood = time.perf_counter() - start
    saved.result()
    return stood, time.perf_counter() - start
