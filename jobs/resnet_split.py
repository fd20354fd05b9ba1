"""ResNet-50 or AlexNet divided over GPUs: over those of one rank, or over ranks as a pipeline.

    mgpu-slurm submit jobs.resnet_split --strategy single --gpus-per-node 2        # one rank with two GPUs
    mgpu-slurm submit jobs.resnet_split --nodes 2 --pipeline 2 mode=pipeline split_size=8

It trains on random images, as it is about where the layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu_slurm import Run, UserError, import_torchvision


@dataclass
class Config:
    model: Literal["resnet50", "alexnet"] = "resnet50"
    mode: Literal["devices", "pipeline"] = "devices"
    """devices: the layers are divided over the GPUs of each rank. pipeline: over ranks, by --pipeline."""
    split_size: int = 4
    """Images in a micro-batch of a pipeline."""
    classes: int = 10
    size: int = 64
    """Side of the images in pixels."""
    images: int = 64
    epochs: int = 2
    batch_size: int = 16
    """Images in an optimizer step, over all ranks."""
    lr: float = 0.01
    seed: int = 0


def make_layers(config: Config) -> list[nn.Module]:
    """Return the layers of torchvision's model, to be called one after the other."""
    model = import_torchvision().models.get_model(config.model, weights=None, num_classes=config.classes)
    if config.model == "alexnet":
        return [*model.features, model.avgpool, nn.Flatten(), *model.classifier]
    stem = [model.conv1, model.bn1, model.relu, model.maxpool]
    blocks = [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    return [*stem, *blocks, model.avgpool, nn.Flatten(), model.fc]


class OverDevices(nn.Module):
    """Layers divided over the devices of one rank, in parts of similar size. The outputs are on the first device."""

    def __init__(self, layers: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.parts = nn.ModuleList(nn.Sequential() for _ in devices)
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        for index, layer in enumerate(layers):
            # by where the middle of the layer is
            middle = (sum(sizes[:index]) + sizes[index] / 2) / sum(sizes)
            part = min(int(middle * len(devices)), len(devices) - 1)
            self.parts[part].append(layer.to(devices[part]))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        for part, device in zip(self.parts, self.devices, strict=True):
            x = part(x.to(device))
        return x.to(self.devices[0])


class RandomImages(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random images whose brightness tells their class."""

    def __init__(self, config: Config) -> None:
        numbers = torch.Generator().manual_seed(config.seed)
        self.labels = torch.arange(config.images) % config.classes
        noise = torch.randn(config.images, 3, config.size, config.size, generator=numbers)
        self.images = noise + self.labels.view(-1, 1, 1, 1) / config.classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def train(run: Run, config: Config) -> dict[str, float]:
    """Train the model and return its last mean loss."""
    run.seed(config.seed)
    data = run.loader(RandomImages(config), batch_size=config.batch_size, shuffle=True, drop_last=True)
    layers = make_layers(config)
    pipe = None
    model: nn.Module
    if config.mode == "pipeline":
        share = config.batch_size // data_ranks(run)
        if config.split_size < 1 or share % config.split_size:
            raise UserError(f"split_size={config.split_size} does not divide a rank's batch of {share} images")
        model = pipe = run.pipeline(layers, cross_entropy, micro_batches=share // config.split_size)
    elif run.world_size > 1 and run.mesh["pipeline"].size() > 1:
        raise UserError("mode=devices divides the model over the GPUs of one rank: use mode=pipeline with --pipeline")
    else:
        model = run.wrap(OverDevices(layers, run.devices))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    mean_loss = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, data=data)
    for epoch in state.epochs(config.epochs):
        for images, labels in data:
            if pipe is not None:
                loss = pipe.gradients(images, labels)
            else:
                loss = cross_entropy(model(images), labels)
                run.backward(loss)
            run.update(optimizer)
            mean_loss.add(loss)
        run.report(epoch, loss=mean_loss.mean())
    return {"loss": run.last_metrics["loss"]}


def data_ranks(run: Run) -> int:
    """Return the number of parts into which a batch is divided."""
    if run.world_size == 1:
        return 1
    mesh = run.mesh
    return mesh["replicate"].size() * mesh["shard"].size()
