"""The task of `doctor --nodes all` on one node: it measures the node, then the network to those that `doctor` names."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core import node_gpus
from mgpu_slurm.core.files import append_jsonl, read_jsonl
from mgpu_slurm.doctor import partners
from mgpu_slurm.doctor.in_job import bandwidth, gpus
from mgpu_slurm.doctor.node_reports import GpuFacts, NodeFacts
from mgpu_slurm.job import store_server
from mgpu_slurm.rank import rank_info
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run

if TYPE_CHECKING:
    import torch

WRITTEN = 256 << 20
WRITE_WITHIN = 1.0
"""Bytes written to the disk, at most, and seconds, before they are flushed: a full second on a slow disk, and no more
on a fast one than does not disturb others."""

COMPUTED = 1.0
"""Seconds of matrix products: by then a GPU has the clock that it keeps, unless it gets hot over minutes."""

SIZE = 8192
"""Rows and columns of the matrices: large enough to use all of a GPU, and small enough for any GPU's memory."""

ORDERED_WITHIN = 120.0
"""Seconds without an order after which `doctor` counts as gone."""

LOOK_EVERY = 0.2


def probe(run: Run, config: dict[str, Any]) -> dict[str, float]:
    """Check this node, as a normal job function. Its findings are in the run's folder."""
    folder = RunFolder(run.folder)
    if not run.is_main:
        return {}
    with closing(store_server.bind("")) as listener:
        bandwidth.serve(listener)
        facts = node_facts(read_spec(folder).resources.gpus_per_node or 0)
        append_jsonl(folder.checkup, {"facts": asdict(facts), "port": listener.getsockname()[1]})
        for order in followed_orders(folder):
            append_jsonl(folder.checkup, {"partner": order["node"], **measured(order["node"], order["port"])})
    return {}


def followed_orders(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield whom to measure with, until this node may leave."""
    done = 0
    give_up = time.monotonic() + ORDERED_WITHIN
    while time.monotonic() < give_up:
        for order in list(read_jsonl(partners.orders(folder)))[done:]:
            if order.get("leave"):
                return
            if "node" in order:
                yield order
            done += 1
            give_up = time.monotonic() + ORDERED_WITHIN
        time.sleep(LOOK_EVERY)


def measured(node: str, port: int) -> dict[str, Any]:
    try:
        return {"rate": bandwidth.measure(node, port), "problem": ""}
    except OSError as error:
        return {"rate": None, "problem": str(error) or type(error).__name__}


def node_facts(asked_gpus: int) -> NodeFacts:
    """Measure this node.

    Args:
        asked_gpus: the number of GPUs that the task has.
    """
    seen, driver, broken, slow = gpu_facts()
    if len(seen) < asked_gpus:
        broken = [f"torch sees {len(seen) or 'none'} of {asked_gpus} GPUs", *broken]
    # tempfile would silently use another folder than a full one
    place = os.environ.get("TMPDIR") or tempfile.gettempdir()
    free = write = None
    try:
        free, write = disk(place)
    except OSError as error:
        broken.append(f"cannot write to {place}: {error.strerror}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return NodeFacts(driver, tuple(seen), place, free, write, memory, tuple(broken), tuple(slow))


def disk(place: str) -> tuple[int, float]:
    """Return the free bytes of a folder, and the bytes per second that it takes."""
    room = os.statvfs(place)
    block = os.urandom(4 << 20)
    with tempfile.TemporaryFile(dir=place) as file:
        begun = time.perf_counter()
        while file.tell() < WRITTEN and time.perf_counter() < begun + WRITE_WITHIN:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return room.f_bavail * room.f_frsize, file.tell() / (time.perf_counter() - begun)


def gpu_facts() -> tuple[list[GpuFacts], str, list[str], list[str]]:
    """Return the GPUs that torch sees, the version of their driver, and what is broken and what slow about them."""
    import torch

    devices = [torch.device("cuda", index) for index in range(rank_info.visible_gpus())]
    names = [torch.cuda.get_device_name(device) for device in devices]
    if not devices:
        return [], "", [], []
    work = [_Products(device) for device in devices]
    for each in work:
        each.start()
    try:
        library = node_gpus.load()
    except Exception:
        # its binding is not installed, or the library is not, as on nodes with GPUs of another maker
        return [GpuFacts(name, flops=each.flops()) for name, each in zip(names, work, strict=True)], "", [], []
    try:
        # while they compute
        driver, clocks, broken, slow = read_gpus(library, [rank_info.gpu_identity(device) or "" for device in devices])
    finally:
        library.nvmlShutdown()
    facts = [GpuFacts(name, *clock, each.flops()) for name, clock, each in zip(names, clocks, work, strict=True)]
    return facts, driver, broken, slow


def read_gpus(library: Any, uuids: list[str]) -> tuple[str, list[tuple[int | None, int | None]], list[str], list[str]]:
    """Return the driver's version, each GPU's present and highest clock, and what is broken and what slow about them.

    Args:
        library: the binding of NVML.
        uuids: of the GPUs, as torch reports them.
    """
    found: dict[str, tuple[int | None, int | None]] = {}
    broken: list[str] = []
    slow: list[str] = []
    for uuid in uuids:
        for handle in node_gpus.handles(library, {uuid}):
            found[uuid] = (
                _clock(library, library.nvmlDeviceGetClockInfo, handle),
                _clock(library, library.nvmlDeviceGetMaxClockInfo, handle),
            )
            for finding in gpus.complaints(os.uname().nodename, gpus.read_gpu(library, handle)):
                (broken if finding.level == "failed" else slow).append(finding.text)
    clocks = [found.get(uuid, (None, None)) for uuid in uuids]
    return node_gpus.as_text(library.nvmlSystemGetDriverVersion()), clocks, broken, slow


def _clock(library: Any, read: Any, handle: Any) -> int | None:
    try:
        return int(read(handle, library.NVML_CLOCK_SM))
    except library.NVMLError:
        return None


class _Products:
    """Products of matrices on one GPU, as many as take about a second."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._matrix = torch.randn(SIZE, SIZE, device=device, dtype=torch.float16)
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream(device)
        # loads the library, and raises the clock
        self._run(3)
        self._times = max(1, round(COMPUTED / (self._run(3) / 3)))

    def start(self) -> None:
        self._record(self._times)

    def flops(self) -> float:
        """Wait for the end; return the operations per second."""
        return self._times * 2 * SIZE**3 / self._seconds()

    def _run(self, times: int) -> float:
        self._record(times)
        return self._seconds()

    def _record(self, times: int) -> None:
        self._begin.record(self._stream)
        for _ in range(times):
            self._matrix @ self._matrix
        self._end.record(self._stream)

    def _seconds(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000
