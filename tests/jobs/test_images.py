from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from jobs import images
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.config import absolute_paths, fill
from tests.support import Project, log

SMALL = "shufflenet_v2_x0_5"


def make_folder(root: Path, train: dict[str, int], val: dict[str, int]) -> Path:
    """An image folder with so many images per class."""
    for split, counts in (("train", train), ("val", val)):
        for label, count in counts.items():
            (root / split / label).mkdir(parents=True)
            for index in range(count):
                Image.new("L", (40, 30), color=10 * index).save(root / split / label / f"{index}.png")
    return root


class TestConfig:
    def test_dataset_on_disk_needs_a_folder(self) -> None:
        with pytest.raises(UserError, match="dataset=folder needs its folder: add data=/path"):
            fill(images.Config, {}, "config of jobs.images:train")

    def test_freezing_needs_weights(self) -> None:
        with pytest.raises(UserError, match="freeze=true without weights"):
            fill(images.Config, {"dataset": "fake", "freeze": True}, "config of jobs.images:train")

    def test_unknown_model_is_refused_with_suggestion(self) -> None:
        values = {"dataset": "fake", "model": "resnet81"}
        with pytest.raises(UserError, match="model=resnet81 is no classifier of torchvision: did you mean 'resnet18'"):
            fill(images.Config, values, "config of jobs.images:train")

    def test_unknown_model_of_timm_is_refused_with_suggestion(self) -> None:
        values = {"dataset": "fake", "model": "timm/resnet81"}
        with pytest.raises(UserError, match="model=timm/resnet81 is no model of timm: did you mean 'timm/resnet18'"):
            fill(images.Config, values, "config of jobs.images:train")

    def test_decay_of_the_average_is_checked(self) -> None:
        with pytest.raises(UserError, match=r"ema=1\.5: expected a decay such as 0\.999, or 0 for none"):
            fill(images.Config, {"dataset": "fake", "ema": 1.5}, "config of jobs.images:train")

    @pytest.mark.parametrize("first_size", [8, 240])
    def test_first_size_of_the_images_is_checked(self, first_size: int) -> None:
        with pytest.raises(UserError, match=rf"first_size={first_size}: expected 16 to size=224"):
            fill(images.Config, {"dataset": "fake", "first_size": first_size}, "config of jobs.images:train")

    @pytest.mark.parametrize(("epoch", "size"), [(1, 128), (3, 160), (5, 192), (7, 224), (10, 224)])
    def test_images_grow_until_two_thirds_of_the_epochs(self, epoch: int, size: int) -> None:
        config = images.Config(dataset="fake", size=224, first_size=128, epochs=9)
        assert images.size_in(epoch, config) == size
        assert images.size_in(epoch, images.Config(dataset="fake", epochs=9)) == 224

    def test_detection_model_is_refused(self) -> None:
        values = {"dataset": "fake", "model": "fasterrcnn_resnet50_fpn"}
        with pytest.raises(UserError, match="model=fasterrcnn_resnet50_fpn is no classifier"):
            fill(images.Config, values, "config of jobs.images:train")

    def test_paths_become_absolute_at_submission(self) -> None:
        config = fill(images.Config, {"data": "cats", "weights": "w.pt"}, "config of jobs.images:train")
        config = absolute_paths(config, Path("/from"))
        assert (config.data, config.weights) == (Path("/from/cats"), Path("/from/w.pt"))


class TestData:
    def test_image_folder_gives_square_normalized_rgb_images(self, tmp_path: Path) -> None:
        root = make_folder(tmp_path, train={"cat": 3, "dog": 2}, val={"cat": 1, "dog": 1})
        train_set, val_set, classes = images.load_images(images.Config(data=root, size=32))
        assert (len(train_set), len(val_set), classes) == (5, 2, 2)  # type: ignore[arg-type]
        for dataset in (train_set, val_set):
            image, label = dataset[0]
            assert image.shape == (3, 32, 32)
            assert image.dtype == torch.float32
            assert label == 0
        black = -torch.tensor(images.MEAN) / torch.tensor(images.STD)
        torch.testing.assert_close(val_set[0][0][:, 5, 5], black)

    def test_only_training_images_are_randomly_augmented(self) -> None:
        train_set, val_set, _ = images.load_images(images.Config(dataset="fake", size=32))
        assert not torch.equal(train_set[0][0], train_set[0][0])
        assert torch.equal(val_set[0][0], val_set[0][0])

    def test_fake_validation_images_differ_from_training_images(self) -> None:
        train_set, val_set = images.fake_images(8, random=None, plain=None)
        assert train_set[0][0].tobytes() != val_set[0][0].tobytes()

    def test_missing_data_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"data=.*nowhere is no folder"):
            images.load_images(images.Config(data=tmp_path / "nowhere"))

    def test_missing_split_is_named(self, tmp_path: Path) -> None:
        root = make_folder(tmp_path, train={"cat": 1}, val={})
        with pytest.raises(UserError, match=r"val' is missing: .* train/ and val/"):
            images.load_images(images.Config(data=root))

    def test_folder_without_classes_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "train").mkdir()
        with pytest.raises(UserError, match="train' is no image folder"):
            images.load_images(images.Config(data=tmp_path))

    def test_classes_must_match_in_both_splits(self, tmp_path: Path) -> None:
        root = make_folder(tmp_path, train={"cat": 1, "dog": 1}, val={"cat": 1, "eel": 1})
        with pytest.raises(UserError, match="class 'dog' is in one of train/ and val/ only"):
            images.load_images(images.Config(data=root))

    def test_missing_cifar10_is_reported_and_not_downloaded(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"does not hold CIFAR-10: unpack cifar-10-python.tar.gz"):
            images.load_images(images.Config(dataset="cifar10", data=tmp_path))
        assert list(tmp_path.iterdir()) == []


class TestModel:
    @pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v3_small", "googlenet"])
    def test_model_has_one_logit_per_class_in_training_mode(self, name: str) -> None:
        model = images.build_model(name, classes=3).train()
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)

    def test_freezing_keeps_the_last_layer_trainable(self) -> None:
        model = images.build_model(SMALL, classes=3)
        images.freeze_all_but_last(model)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained == ["fc.weight", "fc.bias"]


def wrap_nothing(state: dict[str, Any]) -> dict[str, Any]:
    return state


def wrap_as_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in state.items()} | {"optimizer.state.0.step": torch.zeros(())}


def wrap_as_ddp(state: dict[str, Any]) -> dict[str, Any]:
    return {"state_dict": {f"module.{name}": value for name, value in state.items()}, "epoch": 3}


def drop_batch_counters(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


def add_extra_outputs(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "aux1.conv.weight": torch.zeros(1), "AuxLogits.fc.bias": torch.zeros(1)}


class TestWeights:
    @pytest.fixture
    def trained(self) -> nn.Module:
        torch.manual_seed(1)
        return images.build_model(SMALL, classes=5)

    def save(self, content: object, folder: Path) -> Path:
        file = folder / "weights.pt"
        torch.save(content, file)
        return file

    def test_weights_are_read_from_a_safetensors_file(self, trained: nn.Module, tmp_path: Path) -> None:
        save_file(wrap_as_checkpoint(trained.state_dict()), tmp_path / "rank-00000.safetensors")
        found = images.read_weights(tmp_path / "rank-00000.safetensors")
        assert found.keys() == trained.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in trained.state_dict().items())

    @pytest.mark.parametrize(
        "form", [wrap_nothing, wrap_as_checkpoint, wrap_as_ddp, drop_batch_counters, add_extra_outputs]
    )
    def test_last_layer_is_not_loaded_if_the_class_count_differs(
        self, trained: nn.Module, tmp_path: Path, form: Any
    ) -> None:
        torch.manual_seed(2)
        model = images.build_model(SMALL, classes=3)
        own_last_layer = model.fc.weight.detach().clone()
        images.load_weights(model, self.save(form(trained.state_dict()), tmp_path))
        assert torch.equal(model.fc.weight, own_last_layer)
        for name, value in trained.state_dict().items():
            assert name.startswith("fc.") or torch.equal(model.state_dict()[name], value), name

    def test_last_layer_is_loaded_if_the_class_count_matches(self, trained: nn.Module, tmp_path: Path) -> None:
        torch.manual_seed(2)
        model = images.build_model(SMALL, classes=5)
        images.load_weights(model, self.save(trained.state_dict(), tmp_path))
        assert torch.equal(model.fc.weight, trained.fc.weight)

    def test_weights_of_another_width_are_refused(self, trained: nn.Module, tmp_path: Path) -> None:
        file = self.save(trained.state_dict(), tmp_path)
        with pytest.raises(UserError, match=r"of another model: 'stage2.*' has shape \(24, .* in the file, \(58, "):
            images.load_weights(images.build_model("shufflenet_v2_x1_0", classes=5), file)

    def test_weights_with_a_missing_layer_are_refused(self, trained: nn.Module, tmp_path: Path) -> None:
        state = trained.state_dict()
        del state["conv5.0.weight"]
        with pytest.raises(UserError, match=r"of another model: 'conv5.0.weight' is not in the file"):
            images.load_weights(trained, self.save(state, tmp_path))

    def test_weights_of_a_deeper_model_do_not_fit(self) -> None:
        with torch.device("meta"):
            small, deep = (images.build_model(name, classes=5).state_dict() for name in ("resnet18", "resnet34"))
        assert images.first_misfit(deep, small) == "the model has no 'layer1.2.conv1.weight'"

    def test_missing_weights_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"nowhere\.pt cannot be read: No such file or directory"):
            images.read_weights(tmp_path / "nowhere.pt")

    @pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"PK\x03\x04 torn", b"0", b"\x80\x02}(X\x01"])
    def test_file_not_written_by_torch_is_named(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "weights.pt"
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"weights\.pt is no file of safetensors or of torch\.save"):
            images.read_weights(file)

    def test_code_in_a_weights_file_is_not_executed(self, tmp_path: Path) -> None:
        witness = tmp_path / "witness"
        file = self.save(RunsOnLoad(witness), tmp_path)
        with pytest.raises(UserError, match="is no file of safetensors"):
            images.read_weights(file)
        assert not witness.exists()
        torch.load(file, weights_only=False)
        assert witness.exists(), "the file would have run code"

    def test_file_without_named_tensors_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="holds no tensors by name"):
            images.read_weights(self.save([torch.zeros(1)], tmp_path))
        with pytest.raises(UserError, match="holds no tensors by name"):
            images.read_weights(self.save({"epoch": 3}, tmp_path))


class RunsOnLoad:
    """Makes a file where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        ("resnet18", ["BasicBlock"]),
        ("shufflenet_v2_x0_5", ["InvertedResidual"]),
        ("vit_b_16", ["EncoderBlock", "MultiheadAttention"]),
        ("alexnet", ["Conv2d", "Linear"]),
    ],
)
def test_blocks_are_the_composed_layers_that_a_model_repeats(model: str, blocks: list[str]) -> None:
    with torch.device("meta"):
        found = images.blocks_of(images.build_model(model, 3))
    assert [kind.__name__ for kind in found] == blocks


class TestTraining:
    @pytest.fixture
    def user(self, project: Project) -> Project:
        """A project with the jobs in it, and images in two classes that brightness tells apart."""
        jobs = Path(images.__file__).parent
        shutil.copytree(jobs, project.folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
        noise = torch.Generator().manual_seed(0)
        for split, count in (("train", 33), ("val", 9)):
            for label, brightness in (("dark", 0), ("light", 150)):
                folder = project.folder / "pictures" / split / label
                folder.mkdir(parents=True)
                for index in range(count):
                    pixels = torch.randint(brightness, brightness + 100, (40, 40, 3), generator=noise)
                    Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{index}.png")
        return project

    def train(self, user: Project, *words: str) -> tuple[Path, float]:
        """The run folder and the accuracy of a run on two simulated nodes."""
        common = ("jobs.images", "data=pictures", "size=32", "batch_size=8", "workers=0")
        folder, facts = user.run("--nodes", "2", *common, *words)
        assert facts["state"] == "COMPLETED", log(folder, 0)
        return folder, json.loads((folder / "result.json").read_text())["result"]["accuracy"]

    @pytest.mark.long
    def test_model_learns_and_its_checkpoint_starts_a_frozen_training(self, user: Project) -> None:
        folder, accuracy = self.train(user, "model=resnet18", "epochs=5", "lr=0.03")
        assert accuracy >= 0.9
        before = newest_state(folder)

        words = ("model=resnet18", "epochs=1", "freeze=true", f"weights={before}")
        after = newest_state(self.train(user, *words)[0])
        old, new = images.read_weights(before), images.read_weights(after)
        changed = [name for name in old if not torch.equal(old[name], new[name])]
        assert changed == ["fc.weight", "fc.bias"]

    def test_whole_recipe_trains_a_model_of_timm_on_cifar10(self, user: Project) -> None:
        write_cifar10(user.folder / "cifar")
        user.write("recipe.py", UNCHECKED)
        words = ("dataset=cifar10", "data=cifar", "model=timm/test_resnet", "size=64", "first_size=32", "epochs=3")
        recipe = ("augment=2", "mixup=0.2", "smoothing=0.1", "ema=0.9", "warmup=1", "lr=0.02", "lr_batch=16")
        options = ("--nodes", "2", "--precision", "bf16")
        folder, facts = user.run(*options, "recipe", *words, *recipe, "batch_size=32", "workers=0")
        assert facts["state"] == "COMPLETED", log(folder, 0)
        lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        # twice the rate for twice the batch, after the warm-up, then along the cosine
        assert [line["lr"] for line in lines] == pytest.approx([0.04, 0.02, 0.0], abs=1e-6)
        assert all(0 <= line["accuracy"] <= 1 for line in lines)

    @pytest.mark.long
    def test_fake_data_needs_no_folder_and_the_model_can_be_sharded(self, user: Project) -> None:
        words = (
            "--strategy",
            "fsdp",
            "dataset=fake",
            f"model={SMALL}",
            "size=32",
            "epochs=1",
            "batch_size=128",
            "workers=1",
        )
        folder, facts = user.run("--nodes", "2", "jobs.images", *words)
        assert facts["state"] == "COMPLETED", log(folder, 0)
        assert (facts["step"], facts["progress"]) == (4, 1)


UNCHECKED = """
    from jobs import images
    from mgpu_slurm import Run, import_torchvision

    # torchvision compares the checksums with those of the published files
    cifar10 = import_torchvision().datasets.CIFAR10
    cifar10.train_list = [(name, None) for name, _ in cifar10.train_list]
    cifar10.test_list = [(name, None) for name, _ in cifar10.test_list]
    cifar10.meta = {**cifar10.meta, "md5": None}

    def train(run: Run, config: images.Config) -> dict[str, float]:
        return images.train(run, config)
"""


def write_cifar10(folder: Path) -> None:
    """Write 20 images of each of 10 classes in each of CIFAR-10's files: 5 for training, one for validation.

    See https://www.cs.toronto.edu/~kriz/cifar.html for the format.
    """
    packed = folder / "cifar-10-batches-py"
    packed.mkdir(parents=True)
    noise = torch.Generator().manual_seed(0)
    labels = list(range(10)) * 2
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        pixels = torch.randint(0, 25, (len(labels), 3072), generator=noise) + 23 * torch.tensor(labels)[:, None]
        content = {"data": pixels.to(torch.uint8).numpy(), "labels": labels}
        (packed / name).write_bytes(pickle.dumps(content))
    names = {"label_names": [f"class {number}" for number in range(10)]}
    (packed / "batches.meta").write_bytes(pickle.dumps(names))


def newest_state(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*/rank-00000.safetensors"))
