"""The same as `submit_here`, with submitit and torch as they come."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import submitit


def train(out: str) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from benchmarks.jobs.three_steps_model import BATCH_SIZE, make_data, make_model, write_down_the_end

    environment = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    dist.init_process_group("gloo")
    try:
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = make_data()
        steps = 0
        share = BATCH_SIZE // environment.world_size
        for features, labels in DataLoader(data, batch_size=share, sampler=DistributedSampler(data)):
            optimizer.zero_grad()
            cross_entropy(model(features), labels).backward()
            optimizer.step()
            steps += 1
        write_down_the_end(Path(out), environment.rank)
        return {"steps": float(steps)}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    start = time.perf_counter()
    executor = submitit.SlurmExecutor(os.environ["SUBMITIT_FOLDER"])
    executor.update_parameters(nodes=2, ntasks_per_node=2, time=10)
    job = executor.submit(train, sys.argv[1])
    assert job.results() == [{"steps": 3.0}] * 4
    print(time.perf_counter() - start)
