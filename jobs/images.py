"""Image classification with any model of torchvision: from scratch, or from the weights in a file (transfer)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from mgpu_slurm import Run, UserError, import_torchvision

# of ImageNet, which nearly all published weights were trained on
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# two models have extra outputs for training; their published files hold weights for those, which we leave out
NO_EXTRA_OUTPUTS = {"aux_logits": False, "init_weights": True}
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
    """Any name of `torchvision.models.list_models(module=torchvision.models)`."""
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
    """Learning rate of SGD at the start; it falls to zero along a cosine. Transfer wants about a tenth."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 1e-4
    """Pull of every weight towards zero."""
    workers: int = 2
    """Processes per rank that read and transform images; 0 does it in the rank itself."""
    seed: int = 0
    """Of the first weights, the order of the images and their random crops."""

    def __post_init__(self) -> None:
        # here, because a config is made before any rank joins the others, and by `submit --dry-run --check`
        check_name(self.model)
        if self.dataset != "fake" and self.data is None:
            raise UserError(f"dataset={self.dataset} needs its folder: add data=/path, or take dataset=fake for a try")
        if self.freeze and self.weights is None:
            raise UserError("freeze=true without weights would keep a random network: add weights=/path/to/file")


def transforms(size: int) -> tuple[Any, Any]:
    """From a PIL image to a normalised tensor (3, size, size): with random crops and flips, and plain."""
    v2 = import_torchvision().transforms.v2
    finish = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    random = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), finish])
    plain = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), finish])
    return random, plain


def load_images(config: Config) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Training set, validation set and the number of classes.

    Raises:
        UserError: names the folder or the file that is not as it should be.
    """
    random, plain = transforms(config.size)
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
    """Refuses what is no classifier of torchvision, with the nearest one that is."""
    models = import_torchvision().models
    known = models.list_models(module=models)
    if model not in known:
        [nearest] = difflib.get_close_matches(model, known, n=1, cutoff=0.0)
        raise UserError(f"model={model} is no classifier of torchvision: did you mean {nearest!r}?")


def build_model(name: str, classes: int) -> nn.Module:
    """The classifier of torchvision with this name, untrained, with one logit per class."""
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


def train(run: Run, config: Config) -> dict[str, float]:
    """Trains the model and returns its accuracy on the validation images."""
    run.seed(config.seed)
    train_set, val_set, classes = load_images(config)
    network = build_model(config.model, classes)
    if config.weights is not None:
        load_weights(network, config.weights)
    if config.freeze:
        freeze_all_but_last(network)
    model = run.wrap(network)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    # batch norm cannot train on a single image, which a rank's share of the last batch may be
    is_large = len(train_set) >= config.batch_size
    data = run.loader(
        train_set, batch_size=config.batch_size, shuffle=True, drop_last=is_large, num_workers=config.workers
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.epochs * len(data))
    mean_loss = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, data=data)

    for epoch in state.epochs(config.epochs):
        # batch norm's statistics are part of what is frozen
        model.train(not config.freeze)
        for images, labels in data:
            loss = cross_entropy(model(images), labels)
            run.backward(loss)
            run.update(optimizer, clip=5.0)
            scheduler.step()
            mean_loss.add(loss)
            # unlike `enumerate`, it is right in an epoch that a restarted run continues
            if run.is_main and data.batch % 100 == 99:
                print(f"epoch {epoch}: batch {data.batch + 1} of {len(data)}", flush=True)
        run.report(epoch, accuracy=val_accuracy(run, model, val_set, config), loss=mean_loss.mean())

    return {"accuracy": val_accuracy(run, model, val_set, config)}
