"""Start the process that writes the model of a run as ONNX: `export RUN --to onnx`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mgpu_slurm.core import interpreter, node_gpus
from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.files import read_json
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder

NEEDED = ("onnx", "onnxscript", "onnxruntime")


def export(run: RunFolder, which: str | None, name: str | None, file: Path) -> dict[str, Any]:
    """Write a model of a run as ONNX, and return what was written. The job's code runs, in a process of its own.

    Args:
        which: a checkpoint, as for weights; None for the best one, or the newest without one.
        name: that of the object in `run.restore`; None for the only module.
        file: must not exist.

    Raises:
        UserError: a library is missing, the run is a command, or its model has no example of an input.
        MgpuError: the model cannot be written, or ONNX Runtime computes something else.
    """
    missing = [each for each in NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        raise UserError(f"--to onnx needs {', '.join(missing)}: pip install 'mgpu-slurm[onnx]'")
    if read_spec(run).target.is_command:
        raise UserError(f"--to onnx: {run.run} runs a command, whose model is not known: export it in your script")
    if os.path.lexists(file):
        raise UserError(f"{str(file)!r} exists: delete it, or choose another name")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{str(file.parent)!r} is no folder: create it first")
    which = which or ("best" if (run.checkpoints / "best").exists() else "newest")
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        words = (str(run.path), which, name or "", str(file.absolute()), str(outcome))
        command = interpreter.command(sys.executable, "mgpu_slurm.training.onnx.onnx_process", *words)
        environment = os.environ | dict(read_spec(run).environment) | node_gpus.HIDDEN
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        told = read_json(outcome)
    if told is None:
        last = ((done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"])[-1]
        raise MgpuError(f"--to onnx: the process that ran the job ended with exit code {done.returncode}: {last}")
    if "error" in told:
        raise (UserError if told["is_users"] else MgpuError)(told["error"])
    return dict(told)
