"""Prints facts about the installed torch as JSON, on the last line: `python -m mgpu_slurm.doctor.torch_probe`.

`doctor` runs it as a separate process, so that a broken torch cannot crash `doctor` itself.
"""

from __future__ import annotations

import importlib.util
import json
import time
from typing import Any


def facts() -> dict[str, Any]:
    """Return facts about torch and torchvision as plain values.

    An import error of torch is raised; one of torchvision is in `torchvision_problem`. `torchvision` is None without a
    problem if it is not installed, since it is an extra.
    """
    begun = time.perf_counter()
    import torch
    import torch.distributed as dist

    seconds = time.perf_counter() - begun
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None),
        "gpus": [torch.cuda.get_device_name(index) for index in range(visible)],
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "seconds": seconds,
    }
    return found | _torchvision()


def _torchvision() -> dict[str, Any]:
    from mgpu_slurm.training.torchvision_import import has_declared, import_torchvision

    if importlib.util.find_spec("torchvision") is None:
        return {"torchvision": None, "torchvision_problem": ""}
    try:
        torchvision = import_torchvision()
    except Exception as error:
        return {"torchvision": None, "torchvision_problem": f"{type(error).__name__}: {error}"}
    return {"torchvision": torchvision.__version__, "torchvision_problem": "", "declared": has_declared()}


if __name__ == "__main__":
    print(json.dumps(facts()))
