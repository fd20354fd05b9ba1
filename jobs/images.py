"""Image classification with any model of torchvision or timm: from scratch, or from the weights in a file (transfer).

mgpu-slurm submit jobs.images --nodes 2 data=photos
mgpu-slurm submit jobs.images --nodes 2 dataset=cifar10 data=/data model=timm/vit_tiny_patch16_224 augment=2 ema=0.999
"""

from __future__ import annotations

import difflib
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import Dataset

from mgpu_slurm import MovingAverage, Run, UserError, import_torchvision

# of ImageNet, which nearly all published weights were trained on
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# two models have extra outputs for training; their published files hold weights for those, which we leave out
NO_EXTRA_OUTPUTS = {"aux_logits": False, "init_weights": True}
TIMM = "timm/"
"""Before the names of timm's models."""

OPTIONS = {"googlenet": NO_EXTRA_OUTPUTS, "inception_v3": NO_EXTRA_OUTPUTS}
EXTRA_OUTPUTS = ("AuxLogits.", "aux1.", "aux2.")


@dataclass
class Config:
    dataset: Literal["folder", "cifar10", "fake"] = "folder"
    """folder: `train/` and `val/` below `data`, in each a folder of images per class. cifar10: CIFAR-10 as its authors
    pack it, in `data`; it is never downloaded. fake: random images, to try a model or a machine without any data."""
    data: Path | None = None
    """Folder of the images; `fake` does not read it."""
    model: str = "resnet18"
    """Any name of `torchvision.models.list_models(module=torchvision.models)`; with `timm/` in front, one of
    `timm.list_models()`, if timm is installed."""
    weights: Path | None = None
    """File to start from: a state dict of the same model, or `rank-00000.safetensors` of a checkpoint of this job. The
    last layer starts anew where the number of classes differs. None trains from scratch."""
    freeze: bool = False
    """Trains the last layer only; the rest stays as the file has it."""
    size: int = 224
    """Side of the square that the model sees, in pixels; some models take one size only."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 64
    """Images per optimizer step, over all ranks together."""
    lr: float = 0.05
    """Maximum learning rate of SGD; it falls to zero along a cosine. Transfer wants about a tenth."""
    lr_batch: int | None = None
    """The batch size that `lr` is meant for: the rate is scaled linearly to `batch_size`. None leaves it as it is."""
    warmup: int = 0
    """Epochs in which the learning rate rises from near zero."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 1e-4
    """Pull of every weight towards zero."""
    augment: int = 0
    """Random changes of each image by RandAugment, such as rotations and colours; 0 crops and flips only."""
    mixup: float = 0.0
    """Mixes pairs of images and their labels, by a share drawn from Beta(mixup, mixup); 0 mixes nothing."""
    smoothing: float = 0.0
    """Part of each label that is divided among all classes."""
    first_size: int | None = None
    """Side of the training images in the first epoch; it grows to `size` until two thirds of the epochs are done."""
    ema: float = 0.0
    """Decay of a moving average of the weights, which is evaluated then; 0 for none."""
    recompute: bool = False
    """Whether to compute the activations of each block again in the backward pass, to save their memory."""
    workers: int | Literal["auto"] = "auto"
    """Processes per rank that read and transform images; 0 does it in the rank itself, auto goes by its cores."""
    seed: int = 0
    """Of the first weights, the order of the images and their random crops."""

    def __post_init__(self) -> None:
        # here, because a config is made before any rank joins the others, and by `submit --dry-run --check`
        check_name(self.model)
        if self.dataset != "fake" and self.data is None:
            raise UserError(f"dataset={self.dataset} needs its folder: add data=/path, or take dataset=fake for a try")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema={self.ema}: expected a decay such as 0.999, or 0 for none")
        if self.first_size is not None and not 16 <= self.first_size <= self.size:
            raise UserError(f"first_size={self.first_size}: expected 16 to size={self.size}")
        if self.freeze and self.weights is None:
            raise UserError("freeze=true without weights would keep a random network: add weights=/path/to/file")


def transforms(size: int, augment: int = 0) -> tuple[Any, Any]:
    """From a PIL image to a normalised tensor (3, size, size): with random crops, flips and changes, and plain."""
    v2 = import_torchvision().transforms.v2
    finish = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    changes = [v2.RandAugment(num_ops=augment)] if augment else []
    random = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *changes, finish])
    plain = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), finish])
    return random, plain


def load_images(config: Config) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Training set, validation set and the number of classes.

    Raises:
        UserError: names the folder or the file that is not as it should be.
    """
    random, plain = transforms(config.size, config.augment)
    if config.dataset == "fake":
        return *fake_images(config.size, random, plain), 10
    assert config.data is not None, "Config checked it"
    if not config.data.is_dir():
        raise UserError(f"data={config.data} is no folder: give the folder of the images")
    if config.dataset == "cifar10":
        return *cifar10(config.data, random, plain), 10
    train_set, val_set = image_folder(config.data / "train", random), image_folder(config.data / "val", plain)
    if train_set.classes != val_set.classes:
        [odd, *_] = sorted(set(train_set.classes) ^ set(val_set.classes))
        raise UserError(f"data={config.data}: class {odd!r} is in one of train/ and val/ only: both need all")
    return train_set, val_set, len(train_set.classes)


def image_folder(folder: Path, transform: Any) -> Any:
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is missing: the data folder needs train/ and val/ with a folder per class")
    try:
        return import_torchvision().datasets.ImageFolder(folder, transform)
    except FileNotFoundError as error:
        raise UserError(f"{str(folder)!r} is no image folder: {error}") from None


def cifar10(folder: Path, random: Any, plain: Any) -> tuple[Any, Any]:
    dataset = import_torchvision().datasets.CIFAR10
    try:
        return dataset(folder, train=True, transform=random), dataset(folder, train=False, transform=plain)
    except RuntimeError:
        raise UserError(
            f"data={folder} does not hold CIFAR-10: unpack cifar-10-python.tar.gz there (it makes cifar-10-batches-py/)"
        ) from None


def fake_images(size: int, random: Any, plain: Any) -> tuple[Any, Any]:
    dataset = import_torchvision().datasets.FakeData
    shape = (3, size, size)
    train_set = dataset(512, shape, num_classes=10, transform=random)
    return train_set, dataset(128, shape, num_classes=10, transform=plain, random_offset=512)


def check_name(model: str) -> None:
    """Refuses what is no classifier of torchvision or timm, with the nearest one that is."""
    if model.startswith(TIMM):
        known = [f"{TIMM}{name}" for name in import_timm().list_models()]
        if model not in known:
            raise UserError(f"model={model} is no model of timm: did you mean {nearest_of(model, known)!r}?")
        return
    models = import_torchvision().models
    known = models.list_models(module=models)
    if model not in known:
        raise UserError(f"model={model} is no classifier of torchvision: did you mean {nearest_of(model, known)!r}?")


def nearest_of(name: str, known: list[str]) -> str:
    [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return nearest


def import_timm() -> Any:
    # timm imports torchvision, which needs help on some machines
    import_torchvision()
    try:
        import timm
    except ImportError:
        raise UserError("timm is not installed: `pip install timm`, or choose a model of torchvision") from None
    return timm


def blocks_of(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of the blocks that a model repeats, or of its layers if it has no blocks: the units of sharding."""
    composed = [part for part in model.modules() if any(part.children()) and not isinstance(part, nn.Sequential)]
    counts = Counter(type(part) for part in composed if part is not model)
    return tuple(kind for kind, count in counts.items() if count > 1) or (nn.Conv2d, nn.Linear)


def build_model(name: str, classes: int) -> nn.Module:
    """The classifier with this name, untrained, with one logit per class."""
    if name.startswith(TIMM):
        of_timm: nn.Module = import_timm().create_model(name.removeprefix(TIMM), num_classes=classes)
        return of_timm
    model: nn.Module = import_torchvision().models.get_model(
        name, weights=None, num_classes=classes, **OPTIONS.get(name, {})
    )
    return model


def last_layer(model: nn.Module) -> str:
    """Name of the layer that gives the logits."""
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return names[-1]


def load_weights(model: nn.Module, file: Path) -> None:
    """Fills the model from a file of weights, except for a last layer of another number of classes.

    Raises:
        UserError: the file cannot be read, or is of another model; names the first tensor that does not fit.
    """
    weights = {name: value for name, value in read_weights(file).items() if not name.startswith(EXTRA_OUTPUTS)}
    expected = model.state_dict()
    last = last_layer(model)
    for name in (f"{last}.weight", f"{last}.bias"):
        if name in weights and name in expected and weights[name].shape != expected[name].shape:
            weights[name] = expected[name]
    problem = first_misfit(weights, expected)
    if problem is not None:
        raise UserError(f"weights={file} are of another model: {problem}: give the file of the model that is trained")
    # not strict, because older files lack batch norm's counter of batches
    model.load_state_dict(weights, strict=False)


def first_misfit(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    for name, value in expected.items():
        if name not in weights:
            if not name.endswith(".num_batches_tracked"):
                return f"{name!r} is not in the file"
        elif weights[name].shape != value.shape:
            return f"{name!r} has shape {tuple(weights[name].shape)} in the file, {tuple(value.shape)} in the model"
    return next((f"the model has no {name!r}" for name in weights if name not in expected), None)


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors by name of a state dict, alone or inside a checkpoint; nothing in the file is run."""
    try:
        content = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"weights={file} cannot be read: {error.strerror}: give a file of weights") from None
    except Exception:
        # bytes that torch did not write make it raise nearly anything: IndexError, KeyError, struct.error
        raise UserError(f"weights={file} is no file of safetensors or of torch.save: give a state dict") from None
    for key in ("model", "state_dict"):
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"weights={file} holds no tensors by name: give a state dict, model.state_dict()")
    # a checkpoint of this job holds more than the model
    of_model = {name: value for name, value in content.items() if name.startswith("model.")}
    return {name.removeprefix("model.").removeprefix("module."): value for name, value in (of_model or content).items()}


def freeze_all_but_last(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.get_submodule(last_layer(model)).requires_grad_(True)


@torch.no_grad()
def val_accuracy(run: Run, model: nn.Module, val_set: Dataset[Any], config: Config) -> float:
    """The share of the validation images that the model names right; every rank judges its own part of them."""
    model.eval()
    hits, count = torch.zeros((), device=run.device), 0
    for images, labels in run.shard(val_set, batch_size=config.batch_size, num_workers=config.workers):
        hits += (model(images).argmax(dim=1) == labels).sum()
        count += len(labels)
    return run.mean(hits, count)


def size_in(epoch: int, config: Config) -> int:
    """The side of the training images in an epoch: a multiple of 16, except at last."""
    if config.first_size is None:
        return config.size
    done = min(1.0, (epoch - 1) / max(1.0, 2 / 3 * config.epochs))
    return config.size if done == 1.0 else int(config.first_size + done * (config.size - config.first_size)) // 16 * 16


def make_scheduler(optimizer: torch.optim.Optimizer, config: Config, steps_of_epoch: int) -> Any:
    """A linear warm-up, then a cosine to zero."""
    schedules = torch.optim.lr_scheduler
    warmup = config.warmup * steps_of_epoch
    cosine = schedules.CosineAnnealingLR(optimizer, T_max=max(1, config.epochs * steps_of_epoch - warmup))
    if not warmup:
        return cosine
    rise = schedules.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup)
    return schedules.SequentialLR(optimizer, [rise, cosine], milestones=[warmup])


def train(run: Run, config: Config) -> dict[str, float]:
    """Trains the model and returns its accuracy on the validation images."""
    run.seed(config.seed)
    train_set, val_set, classes = load_images(config)
    network = build_model(config.model, classes)
    if config.weights is not None:
        load_weights(network, config.weights)
    if config.freeze:
        freeze_all_but_last(network)
    model = run.wrap(network, blocks=blocks_of(network), recompute=config.recompute)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr = config.lr * (1 if config.lr_batch is None else config.batch_size / config.lr_batch)
    optimizer = torch.optim.SGD(trained, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)
    average = MovingAverage(model, config.ema) if config.ema else None
    # batch norm cannot train on a single image, which a rank's share of the last batch may be
    is_large = len(train_set) >= config.batch_size
    data = run.loader(
        train_set, batch_size=config.batch_size, shuffle=True, drop_last=is_large, num_workers=config.workers
    )
    mix = import_torchvision().transforms.v2.MixUp(alpha=config.mixup, num_classes=classes) if config.mixup else None
    scheduler = make_scheduler(optimizer, config, len(data))
    mean_loss = run.meter("loss")
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    state = run.restore(**objects, **({} if average is None else {"average": average}))

    for epoch in state.epochs(config.epochs):
        # batch norm's statistics are part of what is frozen
        model.train(not config.freeze)
        size = size_in(epoch, config)
        for images, labels in data:
            inputs = images if size == config.size else interpolate(images, size, mode="bilinear", antialias=True)
            targets = labels
            if mix is not None:
                inputs, targets = mix(inputs, labels)
            loss = cross_entropy(model(inputs), targets, label_smoothing=config.smoothing)
            # the batch that the loss is of, as the inputs may be changed images
            run.backward(loss, images)
            run.update(optimizer, clip=5.0)
            scheduler.step()
            if average is not None:
                average.update()
            mean_loss.add(loss)
            # unlike `enumerate`, it is right in an epoch that a restarted run continues
            if run.is_main and data.batch % 100 == 99:
                print(f"epoch {epoch}: batch {data.batch + 1} of {len(data)}", flush=True)
        with nullcontext() if average is None else average.applied():
            accuracy = val_accuracy(run, model, val_set, config)
        run.report(epoch, accuracy=accuracy, loss=mean_loss.mean(), lr=scheduler.get_last_lr()[0])

    return {"accuracy": run.last_metrics["accuracy"]}
