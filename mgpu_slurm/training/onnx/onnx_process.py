"""Run the job of a run to its model's first forward pass, and write the model with the weights of a checkpoint as ONNX.

This happens in a process of its own, see `main`, because it runs the job's code. ONNX Runtime then computes the same
example as torch: https://onnxruntime.ai.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from mgpu_slurm.checkpoints import export as exports
from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.files import write_json
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.data.batching.nests import leaves_of
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.request import target
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.onnx.traced_run import FirstForward, ModelCall, TracedRun

TOLERANCE = 1e-5
"""Difference from torch's outputs that ONNX Runtime may have, relative to those above 1."""

ONE_FILE = 1 << 30
"""Bytes of weights up to which they are in the file itself: one of more than 2 GB cannot be read."""


def first_forward(run: RunFolder, name: str, folder: Path) -> ModelCall:
    """Call the job function of a run until its model is called.

    Args:
        name: that of the model in `run.restore`.
        folder: an empty one.

    Raises:
        UserError: the job fails before, or never calls the model.
    """
    spec = read_spec(run)
    job = target.job_function(spec, run)
    config = job.fill(spec.config, spec.original)
    with closing(TracedRun(folder, name)) as traced:
        try:
            job.call(traced, config)
        except FirstForward as found:
            return found.call
        except UserError:
            raise
        except Exception as error:
            words = target.described_error(error, spec.target.label, run.code / spec.workdir)
            raise UserError(f"--to onnx: the job fails before it calls its model: {words}") from error
    raise UserError(f"--to onnx: the job never calls {name!r}, or did not pass it to run.wrap")


def write(found: ModelCall, file: Path) -> float:
    """Write a model as ONNX, with any number of samples if that is possible; return the largest difference from torch.

    Args:
        file: must not exist.

    Raises:
        MgpuError: the model cannot be written, or ONNX Runtime computes something else.
    """
    model = found.model
    model.eval()
    # torch's exporter does not take the hook
    torch_adapter.remove_forward_pre_hook(model, found.hook)
    size = sum(each.nbytes for each in model.state_dict().values())
    options: dict[str, Any] = {"kwargs": dict(found.kwargs), "dynamo": True, "external_data": size > ONE_FILE}
    problem: Exception | None = None
    for shapes in (_any_number_of_samples(found), None):
        try:
            torch.onnx.export(model, found.args, file, dynamic_shapes=shapes, verbose=False, **options)
            break
        except Exception as error:
            problem = error
    else:
        raise MgpuError(f"--to onnx: torch cannot write this model: {first_line(str(problem))}") from problem
    difference = _difference(model, found, file)
    if not difference <= TOLERANCE:
        raise MgpuError(f"--to onnx: ONNX Runtime computes other outputs than torch: they differ by {difference:.2g}")
    return difference


def _any_number_of_samples(found: ModelCall) -> Any:
    """Return the shapes of a model's inputs, whose first dimension is that of samples."""

    def shape(value: Any) -> Any:
        is_batch = isinstance(value, torch.Tensor) and value.dim()
        return {0: torch.export.Dim.DYNAMIC} if is_batch else None

    by_place: Sequence[Any] = [shape(value) for value in found.args]
    by_name: Mapping[str, Any] = {name: shape(value) for name, value in found.kwargs.items()}
    return {**dict(zip(_parameters(found.model), by_place, strict=False)), **by_name}


def _parameters(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def _difference(model: nn.Module, found: ModelCall, file: Path) -> float:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    inputs = _inputs(found)
    names = [each.name for each in session.get_inputs()]
    outputs = session.run(None, {name: each.numpy() for name, each in zip(names, inputs, strict=True)})
    with torch.no_grad():
        expected = [each for each in leaves_of(model(*found.args, **found.kwargs)) if isinstance(each, torch.Tensor)]
    differences = [
        np.abs(output - each.numpy()) / np.maximum(1, np.abs(each.numpy()))
        for output, each in zip(outputs, expected, strict=True)
    ]
    return max((float(each.max()) for each in differences if each.size), default=0.0)


def _inputs(found: ModelCall) -> list[torch.Tensor]:
    return [each for each in leaves_of((found.args, dict(found.kwargs))) if isinstance(each, torch.Tensor)]


def export(run: RunFolder, which: str, name: str | None, file: Path) -> dict[str, Any]:
    """Write a model of a run as ONNX, whole or not at all, and return what was written.

    Args:
        which, name: as for `checkpoints.export`.
        file: must not exist.
    """
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.absolute().parent) as hidden:
        weights = Path(hidden, "weights.safetensors")
        exported = exports.export(run, which, name, weights)
        found = first_forward(run, exported.object, Path(hidden))
        problems = found.model.load_state_dict(load_file(weights), strict=False)
        for key in (*problems.missing_keys, *problems.unexpected_keys):
            raise MgpuError(f"--to onnx: the checkpoint's {exported.object} is not the job's model: see {key}")
        made = Path(hidden, "made")
        made.mkdir()
        difference = write(found, made / file.name)
        for part in sorted(made.iterdir(), reverse=True):
            os.rename(part, file.absolute().parent / part.name)
    shapes = [list(each.shape) for each in _inputs(found)]
    facts = {"object": exported.object, "checkpoint": exported.checkpoint, "step": exported.step}
    return facts | {"bytes": file.stat().st_size, "inputs": shapes, "difference": difference}


def main(path: str, which: str, name: str, file: str, outcome: str) -> None:
    """Write a model of a run, and what came of it as JSON.

    Args:
        name: empty for the only module.
        outcome: the file for that.
    """
    try:
        told: dict[str, Any] = export(RunFolder(Path(path)), which, name or None, Path(file))
    except MgpuError as error:
        told = {"error": str(error), "is_users": isinstance(error, UserError)}
    write_json(Path(outcome), told)


if __name__ == "__main__":
    main(*sys.argv[1:])
