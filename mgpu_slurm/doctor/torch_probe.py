"""What torch is here, as JSON on the last line of standard output: `python -m mgpu_slurm.doctor.torch_probe`.

The login side asks in this way, so that a broken torch ends a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import time
from typing import Any


def facts() -> dict[str, Any]:
    """Plain values; what fails on import is told by `torchvision_problem`, or by the exception of torch itself.

    `torchvision` is None without a problem where it is not installed: it is an extra.
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
