"""A model as ONNX: what the job passes to it, and how its outputs are compared."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn

from mgpu_slurm.training.onnx import onnx_process
from mgpu_slurm.training.onnx.onnx_process import write
from mgpu_slurm.training.onnx.traced_run import FirstForward, ModelCall, TracedRun


class Masked(nn.Module):
    """Takes a batch by name, and leaves classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.out(batch["x"])
        masked = logits.masked_fill(batch["mask"], -math.inf)
        return masked, masked > 0


def first_call(model: nn.Module, batch: dict[str, torch.Tensor], folder: Path) -> ModelCall:
    """Return what a job's first forward pass of a model is."""
    # one that is open counts the optimizer steps of the tests after it, too
    with closing(TracedRun(folder, "model", model.state_dict().keys())) as run:
        run.wrap(nn.Linear(3, 4))(batch["x"])
        with pytest.raises(FirstForward) as found:
            run.wrap(torch.compile(model))(batch)
    return found.value.call


# torch's exporter uses what torch deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_batch_by_name_and_masked_outputs(tmp_path: Path) -> None:
    mask = torch.tensor([[False, True, False, False]] * 2)
    call = first_call(Masked(), {"x": torch.randn(2, 3, requires_grad=True), "mask": mask}, tmp_path)
    file = tmp_path / "model.onnx"
    difference, is_fixed = write(call, file)
    assert difference <= onnx_process.TOLERANCE
    # another number of samples
    assert not is_fixed
    session = onnxruntime.InferenceSession(file)
    names = [each.name for each in session.get_inputs()]
    values = {"x": np.ones((5, 3), np.float32), "mask": np.zeros((5, 4), bool)}
    logits, _ = session.run(None, dict(zip(names, values.values(), strict=True)))
    assert logits.shape == (5, 4)


@pytest.mark.parametrize(
    ("output", "expected", "difference"),
    [
        ([1.0, -math.inf, math.nan], [1.0, -math.inf, math.nan], 0.0),
        ([1.0, 2.0], [1.5, 2.0], 0.5 / 1.5),
        ([100.0], [101.0], 1 / 101),
        ([True, False], [True, True], 1.0),
    ],
)
def test_outputs_are_compared_by_value(output: list[float], expected: list[float], difference: float) -> None:
    assert onnx_process._largest(np.asarray(output), np.asarray(expected)) == pytest.approx(difference)


@pytest.mark.parametrize(("output", "expected"), [([math.inf], [1.0]), ([math.nan], [1.0])])
def test_infinity_and_nan_are_no_number(output: list[float], expected: list[float]) -> None:
    assert not onnx_process._largest(np.asarray(output), np.asarray(expected)) <= onnx_process.TOLERANCE
