"""A model is written as ONNX with the weights of a checkpoint, and computes what it computed in torch."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support import Project

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, x, scale=None):
        return self.out(self.norm(x)) * scale, x.sum(dim=1)


def train(run, calls: bool = True):
    run.seed(0)
    teacher = run.wrap(nn.Linear(3, 3))
    model = run.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(TensorDataset(torch.randn(16, 3)), batch_size=4)
    run.checkpoints(best="loss", direction="minimize")
    state = run.restore(model=model, optimizer=optimizer, teacher=teacher, data=data)
    for epoch in state.epochs(2):
        for (x,) in data:
            x = teacher(x).detach()
            if not calls:
                raise ValueError("as asked")
            y, total = model(x, scale=torch.full((len(x), 1), 2.0))
            run.backward((y.sum(dim=1) - total).square().mean())
            run.update(optimizer)
        # the first epoch is the best
        run.report(epoch, loss=float(epoch))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    from tests.support import make_project

    project = make_project(tmp_path_factory.mktemp("project"))
    project.write("job.py", JOB)
    folder = project.submit("job.py", "--name", "net")
    assert project.finish(folder)["state"] == "COMPLETED"
    # for reports
    assert json.loads((folder / "state.json").read_text())["best_by"] == {"loss": "minimize"}
    return project


# with torch 2.6, the versions of onnxscript of today cannot write batch norm
@pytest.mark.needs_torch("2.9")
def test_model_with_the_weights_of_the_best_checkpoint(trained: Project) -> None:
    found = trained.json("export", "net", "--to", "onnx", "--object", "model", "-o", "net.onnx")
    assert (found["object"], found["inputs"]) == ("model", [[4, 3], [4, 1]])
    assert found["difference"] <= 1e-5
    assert trained.json("export", "net", "--object", "model", "--checkpoint", "best", "-o", "net.safetensors")
    assert found["step"] == 4
    weights = load_file(trained.folder / "net.safetensors")
    norm, out = nn.BatchNorm1d(3).eval(), nn.Linear(3, 2)
    for name, part in (("norm", norm), ("out", out)):
        part.load_state_dict({key.partition(".")[2]: each for key, each in weights.items() if key.startswith(name)})
    session = onnxruntime.InferenceSession(trained.folder / "net.onnx")
    # another number of samples than in the job
    x, scale = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32), np.full((7, 1), 3.0, np.float32)
    names = [each.name for each in session.get_inputs()]
    y, total = session.run(None, dict(zip(names, (x, scale), strict=True)))
    expected = out(norm(torch.from_numpy(x))) * torch.from_numpy(scale)
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, x.sum(axis=1), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_written_is_refused_with_one_line(trained: Project) -> None:
    def refused(*words: str) -> str:
        done = trained.call("export", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        return done.stderr

    (trained.folder / "there.onnx").write_text("")
    assert "there.onnx' exists: delete it" in refused("net", "--to", "onnx", "-o", "there.onnx")
    assert "name the file for the model with -o" in refused("net", "--to", "onnx")
    assert "-o net.pt: the ending tells what to write (.safetensors, .onnx, .csv" in refused("net", "-o", "net.pt")
    assert "name a file with -o, such as -o model.safetensors, or a form with --to" in refused("net")
    several = refused("net", "-o", "new.onnx")
    assert "the checkpoint has the modules model, teacher: choose one with --object" in several
    (run,) = [path for path in (trained.folder / "runs").iterdir() if path.name.startswith("net")]
    (run / "code" / "job.py").write_text(JOB.replace("if not calls", "if calls"))
    failed = refused("net", "--to", "onnx", "--object", "model", "-o", "new.onnx")
    assert "the job fails before it calls its model: job.py:29: ValueError: as asked" in failed
    (run / "code" / "job.py").write_text(JOB)
    assert not list(trained.folder.glob("*new.onnx*"))


def test_run_of_a_command_is_refused(trained: Project) -> None:
    folder = trained.submit("--name", "shell", "--", "true")
    trained.finish(folder)
    done = trained.call("export", "shell", "--to", "onnx", "-o", "x.onnx")
    assert done.returncode == 2
    assert "runs a command, whose model is not known: export it in your script" in done.stderr
