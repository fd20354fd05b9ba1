"""Checks the GPUs of each rank, and their health if NVIDIA's management library (NVML) is available."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mgpu_slurm.core import node_gpus
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.processes import RUN_VARIABLE
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.doctor.in_job.team import Answer, Place, Team, alike, names, who
from mgpu_slurm.rank import preflight, rank_info

GB = 1 << 30


@dataclass(frozen=True)
class RankGpus:
    """The GPUs of a rank."""

    asked: int | None
    visible: int
    gpu: str | None
    """UUID of the GPU it computes on; None for the CPU."""
    name: str


@dataclass(frozen=True)
class GpuHealth:
    """The health of one GPU according to NVML; None for values that this kind of GPU does not report."""

    uuid: str
    name: str
    uncorrected: int | None
    """Uncorrectable memory errors since the driver was loaded."""
    retirement_pending: int | None
    remapping: list[int] | None
    """Rows remapped after correctable and uncorrectable errors, whether some are pending, and whether that failed."""
    slowed: list[str]
    """Reasons for a slowdown other than the GPU's own work."""
    temperature: int | None
    others: int
    """Bytes held by processes outside of this run."""
    persistent: int | None


def measure_gpus(team: Team, place: Place) -> Any:
    import torch

    gpu = rank_info.gpu_identity(place.device)
    name = torch.cuda.get_device_name(place.device) if gpu else ""
    return asdict(RankGpus(place.spec.resources.gpus_per_node, rank_info.visible_gpus(), gpu, name))


def judge_gpus(answers: list[Answer]) -> list[Finding]:
    found = []
    gpus = [(answer.member, RankGpus(**answer.value)) for answer in answers]
    missing = [(member, own) for member, own in gpus if preflight.missing_gpus_warning(own.asked, own.visible)]
    if missing:
        text = preflight.missing_gpus_warning(missing[0][1].asked, 0)
        fix = "install a torch build for CUDA that fits the nodes' driver (nvidia-smi shows the CUDA version)"
        found.append(check_results.failed("gpus", f"{who([member for member, _ in missing])}: {text}", fix))
    shared = preflight.shared_gpu_warnings([(member.node_name, own.gpu) for member, own in gpus])
    fix = "use one rank per GPU: lower --ntasks-per-node, or raise --gpus-per-node"
    found += [check_results.warning("gpus", text, fix) for text in dict.fromkeys(shared.values())]
    names_of_gpus = alike([Answer(member, own.name) for member, own in gpus if own.gpu])
    for name, group in names_of_gpus:
        found.append(check_results.ok("gpus", f"{who([answer.member for answer in group])}: {name}"))
    if not found:
        found.append(check_results.ok("gpus", "no GPUs were requested, and none are visible"))
    return found


def measure_gpu_health(team: Team, place: Place) -> Any:
    team.tell(f"gpus/seen/{team.me.rank}", rank_info.visible_gpu_identities())
    if not team.me.is_leader:
        return None
    here = [member.rank for member in team.members if member.node == team.me.node]
    seen = {gpu for rank in here for gpu in team.hear(f"gpus/seen/{rank}")}
    if not seen:
        return None
    try:
        library = node_gpus.load()
    except ImportError:
        return {"gpus": None}
    try:
        return {"gpus": [asdict(read_gpu(library, handle)) for handle in node_gpus.handles(library, seen)]}
    finally:
        library.nvmlShutdown()


THROTTLE_REASONS = {
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal slowdown (hardware)",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake slowdown",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
}
"""Reasons for a slowdown other than the GPU's own work, by NVML's names."""


def read_gpu(library: Any, handle: Any) -> GpuHealth:
    def known(read: Any, *arguments: Any) -> Any:
        try:
            return read(handle, *arguments)
        except library.NVMLError:
            return None

    volatile = (library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC)
    reasons = known(library.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    rows = known(library.nvmlDeviceGetRemappedRows)
    running = known(library.nvmlDeviceGetComputeRunningProcesses) or []
    return GpuHealth(
        uuid=node_gpus.as_text(known(library.nvmlDeviceGetUUID)),
        name=node_gpus.as_text(known(library.nvmlDeviceGetName)),
        uncorrected=known(library.nvmlDeviceGetTotalEccErrors, *volatile),
        retirement_pending=known(library.nvmlDeviceGetRetiredPagesPendingStatus),
        remapping=list(rows) if rows is not None else None,
        slowed=[words for name, words in THROTTLE_REASONS.items() if reasons & getattr(library, name)],
        temperature=known(library.nvmlDeviceGetTemperature, library.NVML_TEMPERATURE_GPU),
        # the run's own processes already have their contexts
        others=sum(process.usedGpuMemory or 0 for process in running if not _is_of_this_run(process.pid)),
        persistent=known(library.nvmlDeviceGetPersistenceMode),
    )


def _is_of_this_run(pid: int) -> bool:
    """Return whether a process has the run's variable; False for another user's process, which cannot be read."""
    try:
        own = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}".encode()
        return own in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def judge_gpu_health(answers: list[Answer]) -> list[Finding]:
    found = []
    unread = [answer.member for answer in answers if answer.value["gpus"] is None]
    if unread:
        text = f"{names(unread)}: GPU health was not read: nvidia-ml-py is not installed"
        found.append(check_results.warning("gpu health", text, "pip install nvidia-ml-py"))
    strange = [answer.member for answer in answers if answer.value["gpus"] == []]
    if strange:
        text = f"{names(strange)}: GPU health is unknown: NVML does not list them (as with MIG)"
        found.append(check_results.ok("gpu health", text))
    for answer in answers:
        gpus = [GpuHealth(**gpu) for gpu in answer.value["gpus"] or []]
        node = answer.member.node_name
        ill = [_of_node(node, finding) for gpu in gpus for finding in complaints(node, gpu)]
        found += ill
        if gpus and not ill:
            hottest = max((gpu.temperature or 0 for gpu in gpus), default=0)
            healthy = f"{node}: {counted(len(gpus), 'GPU')}"
            text = f"{healthy} without memory errors or slowdown, {hottest} C at most"
            if any(gpu.persistent == 0 for gpu in gpus):
                text += "; persistence mode is off, so the first use of a GPU takes seconds longer"
            found.append(check_results.ok("gpu health", text))
    return found


def _of_node(node: str, finding: Finding) -> Finding:
    return replace(finding, text=f"{node}: {finding.text}")


def complaints(node: str, gpu: GpuHealth) -> list[Finding]:
    """Return what is wrong with one GPU of a node; the texts do not name the node."""
    which = f"GPU {gpu.uuid} ({gpu.name})"
    found = []
    exclude = f"report it to the site, and exclude the node meanwhile: --exclude {node}"
    if gpu.uncorrected:
        text = f"{which} has had {gpu.uncorrected} uncorrectable memory errors since its driver was loaded"
        found.append(check_results.failed("gpu health", text, exclude))
    if gpu.remapping and (gpu.remapping[2] or gpu.remapping[3]):
        text = f"{which} has memory rows that a GPU reset has to remap, or that cannot be remapped"
        found.append(check_results.failed("gpu health", text, exclude))
    if gpu.retirement_pending:
        text = f"{which} has memory pages that a GPU reset has to retire"
        found.append(check_results.failed("gpu health", text, exclude))
    if gpu.slowed:
        text = f"{which} is throttled: {', '.join(gpu.slowed)}"
        found.append(check_results.warning("gpu health", text, exclude))
    if gpu.others > GB:
        text = f"{which}: processes outside of this run hold {gpu.others / GB:.1f} GB of its memory"
        found.append(check_results.warning("gpu health", text, f"see nvidia-smi on {node}; --exclude {node} meanwhile"))
    return found
