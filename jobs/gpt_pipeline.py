"""The GPT of jobs.gpt in stages of consecutive layers, each on other ranks.

mgpu-slurm submit jobs.gpt_pipeline --nodes 2 --pipeline 2
mgpu-slurm submit jobs.gpt_pipeline --nodes 4 --pipeline 2 --strategy fsdp
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from jobs import gpt
from mgpu_slurm import Pipeline, Run


@dataclass
class Config(gpt.Config):
    micro_batches: int = 4
    """Number of parts of a rank's batch, which pass through the stages one after the other."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"


@torch.no_grad()
def validation_loss(run: Run, pipe: Pipeline, text: gpt.Text, batch_size: int) -> float:
    pipe.eval()
    total, count = torch.zeros((), device=run.device), 0
    for (tokens,) in run.shard(text, batch_size=batch_size):
        total += pipe.evaluate(tokens[:, :-1], tokens[:, 1:]) * len(tokens)
        count += len(tokens)
    pipe.train()
    return run.mean(total, count)


def train(run: Run, config: Config) -> dict[str, float]:
    """Train the model and return its loss on the rest of the text, in nats per byte."""
    run.seed(config.seed)
    train_text, held_text = gpt.load_text(config)
    layers = [gpt.Begin(config), *(gpt.Block(config) for _ in range(config.layers)), gpt.End(config)]
    for layer in layers:
        layer.apply(gpt.initialize)
    pipe = run.pipeline(layers, gpt.next_token_loss, micro_batches=config.micro_batches, schedule=config.schedule)
    optimizer = gpt.make_optimizer(list(pipe.parameters()), config)
    data = run.loader(train_text, batch_size=config.batch_size, shuffle=True, drop_last=True)
    scheduler = gpt.make_scheduler(optimizer, config, config.epochs * len(data))
    mean_loss = run.meter("loss")
    state = run.restore(model=pipe, optimizer=optimizer, scheduler=scheduler, data=data)
    speed = gpt.Speed(run, config)
    for epoch in state.epochs(config.epochs):
        for (tokens,) in data:
            loss = pipe.gradients(tokens[:, :-1], tokens[:, 1:])
            run.update(optimizer, clip=1.0)
            scheduler.step()
            mean_loss.add(loss)
        tokens_per_second = speed.look()
        held = validation_loss(run, pipe, held_text, config.batch_size)
        run.report(epoch, loss=mean_loss.mean(), held=held, tokens_per_second=tokens_per_second)
    return {"held": run.last_metrics["held"]}
