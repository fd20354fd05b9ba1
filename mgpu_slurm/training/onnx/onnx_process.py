"""Run the job of a run to its model's first forward pass, and write the model with the weights of a checkpoint as ONNX.

This happens in a process of its own, see `main`, because it runs the job's code. ONNX Runtime then computes the same
example as torch: https://onnxruntime.ai.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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


def first_forward(run: RunFolder, name: str, keys: Set[str], folder: Path) -> ModelCall:
    """Call the job function of a run until its model is called.

    Args:
        name: that of the model in `run.restore`.
        keys: the names of its parameters and buffers.
        folder: an empty one.

    Raises:
        UserError: the job fails before, or never calls the model.
    """
    spec = read_spec(run)
    job = target.job_function(spec, run)
    config = job.fill(spec.config, spec.original)
    with closing(TracedRun(folder, name, keys)) as traced:
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


def write(found: ModelCall, file: Path) -> tuple[float, bool]:
    """Write a model as ONNX, with any number of samples if that is possible.

    Return the largest difference from torch, and whether the number of samples is that of the job's batch.

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
    # else torch takes a mapping that comes last for named arguments
    args = found.args if found.kwargs else (*found.args, {})
    for shapes in (_any_number_of_samples(found), None):
        try:
            torch.onnx.export(model, args, file, dynamic_shapes=shapes, verbose=False, **options)
            break
        except Exception as error:
            problem = error
    else:
        # the cause says what; around it are the steps of the exporter
        words = first_line(str(problem and (problem.__cause__ or problem)))
        raise MgpuError(f"--to onnx: torch cannot write this model: {words}") from problem
    difference = _difference(model, found, file)
    if not difference <= TOLERANCE:
        raise MgpuError(f"--to onnx: ONNX Runtime computes other outputs than torch: they differ by {difference:.2g}")
    return difference, shapes is None


def _any_number_of_samples(found: ModelCall) -> Any:
    """Return the shapes of a model's inputs, whose first dimension is that of samples."""

    def shape(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: shape(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [shape(each) for each in value]
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
    outputs = session.run(None, {name: each.detach().numpy() for name, each in zip(names, inputs, strict=True)})
    with torch.no_grad():
        expected = [each for each in leaves_of(model(*found.args, **found.kwargs)) if isinstance(each, torch.Tensor)]
    pairs = zip(outputs, expected, strict=True)
    return max((_largest(output, each.numpy()) for output, each in pairs if output.size), default=0.0)


def _largest(output: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    one, other = output.astype(np.float64), expected.astype(np.float64)
    # infinities, as of masked values, have no difference
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        return float(np.where(is_same, 0.0, np.abs(one - other) / np.maximum(1.0, np.abs(other))).max())


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
        tensors = load_file(weights)
        found = first_forward(run, exported.object, tensors.keys(), Path(hidden))
        problems = found.model.load_state_dict(tensors, strict=False)
        for key in (*problems.missing_keys, *problems.unexpected_keys):
            raise UserError(
                f"--to onnx: the checkpoint's {exported.object} is not the model that the job calls: see {key}; name"
                " another one with --object"
            )
        made = Path(hidden, "made")
        made.mkdir()
        difference, is_fixed = write(found, made / file.name)
        parts = {part: file.absolute().parent / part.name for part in sorted(made.iterdir(), reverse=True)}
        for target in parts.values():
            if os.path.lexists(target):
                raise UserError(f"{str(target)!r} exists: delete it, or choose another name with -o")
        for part, target in parts.items():
            os.rename(part, target)
    shapes = [list(each.shape) for each in _inputs(found)]
    facts = {"object": exported.object, "checkpoint": exported.checkpoint, "step": exported.step}
    return facts | {
        "bytes": file.stat().st_size,
        "inputs": shapes,
        "is_fixed": is_fixed,
        "difference": difference,
    }


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
