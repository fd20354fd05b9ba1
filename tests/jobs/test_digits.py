from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs import digits
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.config import fill
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import Project


def test_data_file_matches_the_checksums_in_its_readme() -> None:
    readme = (digits.DATA.parent / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(digits.DATA.read_bytes()).hexdigest() in readme
    with np.load(digits.DATA) as arrays:
        assert set(arrays) == {"images", "labels"}
        for name in arrays:
            assert arrays[name].dtype == np.uint8
            assert hashlib.sha256(arrays[name].tobytes()).hexdigest() in readme


def test_images_are_scaled_and_shaped_for_the_network() -> None:
    train_set, test_set = digits.load_digits()
    for dataset in (train_set, test_set):
        images, labels = dataset.tensors
        assert images.shape == (len(labels), 1, 8, 8)
        assert images.dtype == torch.float32
        assert (images.min(), images.max()) == (0.0, 1.0)
        assert labels.dtype == torch.int64


def test_split_uses_every_image_once_and_a_fifth_of_each_digit_for_test() -> None:
    (train_images, train_labels), (test_images, test_labels) = (part.tensors for part in digits.load_digits())
    assert (len(train_labels), len(test_labels)) == (1437, 360)
    shares = test_labels.bincount() / torch.cat([train_labels, test_labels]).bincount()
    assert (shares - 0.2).abs().max() < 0.005

    with np.load(digits.DATA) as arrays:
        stored = sorted(
            (label, image.tobytes()) for image, label in zip(arrays["images"], arrays["labels"], strict=True)
        )
    images = torch.cat([train_images, test_images]).mul(16).to(torch.uint8).numpy()
    labels = torch.cat([train_labels, test_labels]).numpy()
    assert sorted((label, image.tobytes()) for image, label in zip(images, labels, strict=True)) == stored


def test_split_does_not_depend_on_the_seed() -> None:
    torch.manual_seed(1)
    _, first = digits.load_digits()
    torch.manual_seed(2)
    _, second = digits.load_digits()
    assert torch.equal(first.tensors[0], second.tensors[0])


@pytest.mark.parametrize("width", [16, 128])
def test_network_has_ten_logits_per_image_and_the_requested_width(width: int) -> None:
    net = digits.Net(width=width, dropout=0.0)
    assert net(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert net[0].out_channels == width


def test_optimizer_is_built_from_the_config() -> None:
    parameters = list(digits.Net(width=1, dropout=0.0).parameters())
    adam = digits.make_optimizer(digits.Config(optimizer="adam", lr=0.5), parameters)
    assert isinstance(adam, torch.optim.AdamW)
    assert adam.defaults["lr"] == 0.5
    sgd = digits.make_optimizer(digits.Config(optimizer="sgd", momentum=0.25, weight_decay=0.125), parameters)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0.25, 0.125)


def test_invalid_config_value_or_key_is_named() -> None:
    with pytest.raises(UserError, match=r"optimizer='adm'.*'adam'"):
        fill(digits.Config, {"optimizer": "adm"}, "config of jobs.digits:train")
    with pytest.raises(UserError, match=r"'widht'.*did you mean 'width'"):
        fill(digits.Config, {"widht": 3}, "config of jobs.digits:train")


def test_data_is_found_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(digits.load_digits()[0]) == 1437


def run_on_two_nodes(project: Project, *words: str) -> tuple[list[dict[str, float]], float]:
    """The metrics of each report and the accuracy of the result."""
    jobs = Path(digits.__file__).parent
    shutil.copytree(jobs, project.folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    folder, facts = project.run("--nodes", "2", "jobs.digits", *words)
    assert facts["state"] == "COMPLETED", facts
    metrics = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return metrics, json.loads((folder / "result.json").read_text())["result"]["accuracy"]


def test_two_ranks_with_default_config_reach_98_percent(project: Project) -> None:
    metrics, accuracy = run_on_two_nodes(project)
    assert len(metrics) == digits.Config().epochs
    assert accuracy >= 0.98


def metrics_with(run: Run, seed: int) -> dict[str, float]:
    digits.train(run, digits.Config(epochs=2, width=8, seed=seed))
    return dict(run.last_metrics)


def test_seed_determines_all_metrics() -> None:
    first, again, other = (run_ranks(metrics_with, 2, seed) for seed in (5, 5, 6))
    assert set(first[0]) == {"accuracy", "loss"}
    assert first == again
    assert first != other
