"""The weights of a checkpoint as one plain file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mgpu_slurm import MovingAverage, Run
from mgpu_slurm.checkpoints.export import export
from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.run_folder.layout import RunFolder
from tests.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, Parallelism]] = {
    "one": (1, Parallelism()),
    "ddp": (2, Parallelism()),
    "fsdp": (3, Parallelism("fsdp")),
    "tensor": (2, Parallelism(tensor=2)),
    "fsdp x tensor": (4, Parallelism("fsdp", tensor=2)),
    "pipeline": (2, Parallelism(pipeline=2)),
    "pipeline x fsdp": (4, Parallelism("fsdp", pipeline=2)),
}


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def save(run: Run, is_pipeline: bool) -> None:
    model: Any
    if is_pipeline:
        model = run.pipeline(make_layers(), loss_of, micro_batches=2)
    else:
        model = run.wrap(nn.Sequential(*make_layers()), blocks=(nn.Linear,), plan={"0": "output"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = MovingAverage(model)
    run.checkpoints(best="loss", direction="minimize", every_minutes=None)
    state = run.restore(model=model, optimizer=optimizer, average=average)
    for epoch in state.epochs(2):
        if is_pipeline:
            model.gradients(torch.ones(4, 4), torch.ones(4, 2))
        else:
            run.backward(loss_of(model(torch.ones(4, 4)), torch.ones(4, 2)))
        run.update(optimizer)
        average.update()
        run.report(epoch, loss=epoch)
    run.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_file_fits_the_plain_model_under_every_layout(name: str, tmp_path: Path) -> None:
    ranks, options = LAYOUTS[name]
    run_ranks(save, ranks, name.startswith("pipeline"), folder=tmp_path, layout=options.layout(ranks, ranks))
    found = {}
    for which in ("newest", "best", "2"):
        done = export(RunFolder(tmp_path), which, "model", tmp_path / f"{which}.safetensors")
        assert (done.step, done.tensors) == (1 if which == "best" else 2, 9)
        assert done.bytes == (tmp_path / f"{which}.safetensors").stat().st_size
        found[which] = load_file(tmp_path / f"{which}.safetensors")
        nn.Sequential(*make_layers()).load_state_dict(found[which])
    assert all(torch.equal(found["newest"][key], found["2"][key]) for key in found["2"])
    # by one step of AdamW
    assert (found["newest"]["2.weight"] - found["best"]["2.weight"]).abs().max() > 0.01
    export(RunFolder(tmp_path), "best", "average", tmp_path / "average.safetensors")
    average = load_file(tmp_path / "average.safetensors")
    assert all(torch.equal(average[key], found["best"][key]) for key in found["best"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 1, False, folder=folder)
    return folder


def test_only_module_is_exported_by_default(saved: Path, tmp_path: Path) -> None:
    done = export(RunFolder(saved), "newest", None, tmp_path / "model.safetensors")
    assert done.object == "model"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("which", "name", "file", "error"),
    [
        ("7", None, "new", "--checkpoint 7: {run} has newest, best and the steps 1, 2"),
        (
            "newest",
            "modle",
            "new",
            "--object modle: the checkpoint has model, optimizer, average (did you m",
        ),
        ("newest", "optimizer", "new", "'optimizer' holds no tensors by name: export one of model"),
        ("newest", None, "existing", "'{folder}/existing' exists: delete it, or choose another name"),
        ("newest", None, "missing/new", "'{folder}/missing' is no folder: create it first"),
    ],
)
def test_wrong_use_is_an_error(
    which: str, name: str | None, file: str, error: str, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "existing").write_text("kept")
    with pytest.raises(UserError) as raised:
        export(RunFolder(saved), which, name, tmp_path / file)
    assert str(raised.value).startswith(error.format(run=RunFolder(saved).run, folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["existing"]
    assert (tmp_path / "existing").read_text() == "kept"


def test_run_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no checkpoint: a job saves them once"):
        export(RunFolder(tmp_path), "newest", None, tmp_path / "new")


def test_damaged_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(saved, copied, symlinks=True)
    file = copied / "checkpoints" / "step-000000002" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(MgpuError, match=r"checkpoint step-000000002 of .* is damaged \(rank-00000\.safetensors is"):
        export(RunFolder(copied), "newest", None, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_version_0_1_is_exported_without_the_names_of_wrappers(tmp_path: Path) -> None:
    old = RunFolder(Path(__file__).parent / "state/version_0_1")
    with pytest.raises(UserError, match=r"the checkpoint has the modules model, average: choose one with --object"):
        export(old, "newest", None, tmp_path / "new")
    export(old, "newest", "model", tmp_path / "new")
    assert {name.partition(".")[0] for name in load_file(tmp_path / "new")} == {"0", "1", "2"}
