"""The training that faults are tried on. It is slow enough to be met anywhere, and writes down what it has seen."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm import Pipeline, Run

SAMPLES, BATCH = 52, 8
HELD = 7
"""Samples to evaluate on."""
STEPS_OF_EPOCH = 7
EPOCHS = 12
SAVE_EVERY = 5
"""Steps; a checkpoint is also written at the end of each epoch."""

dies_soon = False


@dataclass
class Config:
    ledger: str = ""
    """Folder for what each rank of each attempt has seen, step by step; each run has one of its own in it."""
    epochs: int = EPOCHS
    lr: float = 0.01
    pace: float = 0.03
    """Seconds that a step takes at least."""
    workers: int = 0
    """Of the loader."""
    dies_in: str = ""
    """The phase of a save in which a rank dies, once; see `dying.PHASES`."""
    dies_at: int = 0
    """The step from which on it does so as soon as it comes there."""
    dying_rank: int = 0
    layout: str = ""
    """`tensor` or `pipeline` if the ranks work on the same batches."""


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def sum_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def train(run: Run, config: Config) -> dict[str, float]:
    run.seed(5)
    ids = torch.arange(SAMPLES)
    features = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    # on more ranks, some have a single sample of the last batch
    norm = nn.BatchNorm1d(32) if run.world_size == 2 else nn.LayerNorm(32)
    net = nn.Sequential(nn.Linear(8, 32), norm, nn.Dropout(0.5), nn.Linear(32, 1))
    pipe = run.pipeline([*net], loss_of, micro_batches=2) if config.layout == "pipeline" else None
    model: nn.Module = pipe or run.wrap(net, blocks=(nn.Linear,), plan={"0": "output"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs * STEPS_OF_EPOCH)
    data = run.loader(TensorDataset(ids, features), batch_size=BATCH, shuffle=True, num_workers=config.workers)
    mean_loss = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    run.checkpoints(every_steps=SAVE_EVERY, every_minutes=None, best="loss", direction="minimize")
    own = Path(config.ledger, run.folder.name)
    own.mkdir(exist_ok=True)
    with open(own / f"{run.attempt}-{run.rank}.jsonl", "w") as ledger:
        write(ledger, pid=os.getpid(), start=state.step)
        for epoch in state.epochs(config.epochs):
            for batch_ids, batch in data:
                targets = torch.zeros(len(batch), 1)
                if pipe is not None:
                    loss = pipe.gradients(batch, targets)
                else:
                    loss = loss_of(model(batch), targets)
                    run.backward(loss)
                run.update(optimizer, clip=1.0)
                scheduler.step()
                mean_loss.add(loss)
                own_ids = batch_ids.tolist() if is_first_of_batch(run, config.layout) else []
                write(ledger, epoch=epoch, step=run.step, samples=own_ids)
                if config.dies_in and run.rank == config.dying_rank and run.step >= config.dies_at:
                    die_once(config.dies_in, own / "died")
                time.sleep(config.pace)
            held = evaluate(run, pipe or net, config.pace)
            run.report(
                epoch, loss=run.mean(loss.detach(), 1), held=held, mean=mean_loss.mean(), draw=torch.rand(1).item()
            )
    weights = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.state_dict().values()]
    torch.save([weights, torch.rand(3)], run.folder / f"final-{run.rank}.pt")
    return {"steps": run.step}


def is_first_of_batch(run: Run, layout: str) -> bool:
    """Whether no earlier rank works on the same samples; two ranks compute a layer together, or hold a stage each."""
    if layout == "tensor":
        return run.rank % 2 == 0
    return layout != "pipeline" or run.rank < run.world_size // 2


def evaluate(run: Run, net: nn.Module, pace: float) -> float:
    """Of samples that the ranks do not have equally many of."""
    total, count = torch.zeros(()), 0
    net.eval()
    with torch.no_grad():
        for (batch,) in run.shard(TensorDataset(torch.linspace(-1, 1, HELD * 8).reshape(HELD, 8)), batch_size=1):
            total += net.evaluate(batch, batch, sum_of) if isinstance(net, Pipeline) else net(batch).sum()
            count += len(batch)
            time.sleep(pace)
    net.train()
    return run.mean(total, count)


def write(ledger: IO[str], **facts: Any) -> None:
    ledger.write(json.dumps(facts) + "\n")
    ledger.flush()


def die_once(phase: str, mark: Path) -> None:
    """
    Args:
        mark: a file that shows that a rank has died; only then, because another fault may end the attempt before.
    """
    global dies_soon
    if not dies_soon and not mark.exists():
        from dying import die_in  # type: ignore[import-not-found]  # a module of the project

        dies_soon = True
        die_in(phase, mark.touch)
