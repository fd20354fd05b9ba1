"""`import_torchvision` in processes of their own: which operators exist is a fact of the whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DECLARE = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

USE = """
import gc
import torch
from mgpu_slurm.rank import torchvision_adapter

torchvision = torchvision_adapter.import_torchvision()
assert torchvision_adapter.import_torchvision() is torchvision
gc.collect()
assert hasattr(torch.ops.torchvision, "nms")
model = torchvision.models.resnet18(num_classes=3).eval()
crop = torchvision.transforms.v2.CenterCrop(16)
dataset = torchvision.datasets.FakeData(size=1, image_size=(3, 32, 32), transform=torchvision.transforms.v2.ToImage())
image, _ = dataset[0]
print(tuple(model(crop(image).float().unsqueeze(0)).shape), len(torchvision_adapter._declared))
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def plain_import_works() -> bool:
    plain = run_python("import torchvision")
    assert plain.returncode == 0 or "operator torchvision::nms does not exist" in plain.stderr, plain.stderr
    return plain.returncode == 0


def test_operators_are_declared_only_if_the_plain_import_fails(plain_import_works: bool) -> None:
    used = run_python(USE)
    assert used.returncode == 0, used.stderr
    assert used.stdout.split() == ["(1,", "3)", "0" if plain_import_works else "1"]


def test_nothing_is_declared_if_the_import_works(plain_import_works: bool) -> None:
    # where torchvision does not fit this torch, it imports once somebody else has declared the operators
    used = run_python(USE if plain_import_works else DECLARE + USE)
    assert used.returncode == 0, used.stderr
    assert used.stdout.split() == ["(1,", "3)", "0"]


def test_other_import_errors_are_not_hidden(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('built for another torch')")
    broken = run_python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mgpu_slurm.rank import torchvision_adapter\n"
        "torchvision_adapter.import_torchvision()"
    )
    assert broken.returncode == 1
    assert "RuntimeError: built for another torch" in broken.stderr
    assert "During handling" not in broken.stderr


def test_missing_torchvision_error_names_the_extra() -> None:
    missing = run_python(
        "import sys; sys.modules['torchvision'] = None\n"
        "from mgpu_slurm import UserError, import_torchvision\n"
        "try:\n    import_torchvision()\nexcept UserError as error:\n    print(error)"
    )
    assert missing.stdout.startswith("torchvision is not installed: `pip install 'mgpu-slurm[vision]'`"), missing.stderr
