"""Prints facts about the installed torch as JSON, on the last line: `python -m mgpu_slurm.doctor.torch_probe`.

`doctor` runs it as a separate process, so that a broken torch cannot crash `doctor` itself.
"""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import asdict

from mgpu_slurm.doctor.machine_checks import TorchFacts


def facts() -> TorchFacts:
    """Return facts about torch and torchvision. An import error of torch is raised."""
    begun = time.perf_counter()
    import torch
    import torch.distributed as dist

    seconds = time.perf_counter() - begun
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    torchvision, problem, declared = _torchvision()
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None),
        gpus=[torch.cuda.get_device_name(index) for index in range(visible)],
        gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=dist.is_available() and dist.is_nccl_available(),
        seconds=seconds,
        torchvision=torchvision,
        torchvision_problem=problem,
        declared=declared,
    )


def _torchvision() -> tuple[str | None, str, bool]:
    """Return the version of torchvision, why it cannot be imported, and whether its operators were only declared."""
    from mgpu_slurm.rank.torchvision_adapter import has_declared, import_torchvision

    if importlib.util.find_spec("torchvision") is None:
        return None, "", False
    try:
        torchvision = import_torchvision()
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", False
    return torchvision.__version__, "", has_declared()


if __name__ == "__main__":
    print(json.dumps(asdict(facts())))
