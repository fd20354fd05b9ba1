"""Three steps of a tiny model, as a script for torchrun: `torchrun --nproc_per_node 2 -m ... OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.jobs.three_steps_model import BATCH_SIZE, make_data, make_model, write_down_the_end


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = make_data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True)
    for features, labels in DataLoader(data, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler):
        optimizer.zero_grad()
        cross_entropy(model(features), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    write_down_the_end(out, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
