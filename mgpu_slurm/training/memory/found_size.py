"""How many samples fit into memory at once: found when it runs out, and kept for later steps and attempts."""

from __future__ import annotations

from contextlib import suppress

import torch

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import write_json
from mgpu_slurm.data.batching.batch_cutting import MicroBatchSize
from mgpu_slurm.rank.communication.codec import StateDict
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import MemoryRecord

_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of the messages of errors other than `torch.OutOfMemoryError`."""


def is_memory_error(error: BaseException) -> bool:
    """Return whether an error says that a device, or main memory, has no room for a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)
    )


class FoundSize:
    """The number of samples that each rank computes at once, on this kind of device and in this layout."""

    def __init__(
        self, size: MicroBatchSize, layout: Layout, device: torch.device, files: RunFolder, attempt: int, rank: int
    ) -> None:
        """
        Args:
            size: splits batches.
        """
        self._size = size
        self._strategy = layout.strategy
        self._device = device
        self._files = files
        self._attempt = attempt
        self._is_main = rank == 0
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        division = f"shard {layout.shards}, tensor {layout.tensor}, pipeline {layout.pipeline}"
        self._place = f"{gpu}, {layout.strategy}, {division}, {layout.precision}"
        self._first = 0

    def state_dict(self) -> StateDict | None:
        """Return the size found, and for what; None if none was needed."""
        return None if self._size.limit is None else {"samples": self._size.limit, "of": self._place}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue with a size found on the same kind of device, in the same layout; ignore any other."""
        if state["of"] == self._place:
            self._size.limit = state["samples"]

    def first(self) -> int:
        """Return how many samples at once this attempt should begin with, because an earlier one failed with more; 0
        for any number."""
        record = records.read_memory(self._files)
        return record.first if record is not None and record.of == self._place else 0

    def begin_with(self, first: int) -> None:
        """Compute at most this number of samples at once; 0 for any number."""
        self._first = first
        if first:
            self._size.limit = min(first, self._size.limit or first)

    @property
    def is_last_chance(self) -> bool:
        """Whether the step under way computes a single sample at once."""
        return self._size.current == 1

    def halve(self) -> None:
        """Compute half as many samples at once as those of the step under way, which did not fit.

        Raises:
            UserError: it was one.
        """
        failed = self._size.current
        if failed <= 1:
            raise UserError(f"out of memory with a single sample: {self._advice()}")
        self._size.limit = failed // 2
        log_lines.say(f"{failed} samples at once do not fit into memory: trying {failed // 2}")
        if self._is_main:
            self._write(MemoryRecord(samples=failed // 2, of=self._place, first=self._first))

    def note_failure(self, error: BaseException) -> None:
        """If this rank has run out of memory in a step that cannot be repeated, write down with how many samples at
        once the next attempt should begin."""
        if not is_memory_error(error):
            return
        failed = self._size.current
        if failed > 1:
            half = failed // 2
            log_lines.say(f"{failed} samples at once do not fit into memory: the next attempt begins with {half}")
            self._write(MemoryRecord(samples=half, of=self._place, first=half, attempt=self._attempt))
        elif failed:
            log_lines.say(f"out of memory with a single sample: {self._advice()}")

    def _write(self, record: MemoryRecord) -> None:
        with suppress(OSError):
            write_json(self._files.memory, record.to_json())

    def _advice(self) -> str:
        if self._strategy in ("single", "ddp", "dp"):
            return "use --strategy fsdp on more GPUs, run.wrap(recompute=True), or a smaller model"
        return "use run.wrap(recompute=True, offload=True), more GPUs, or a smaller model"
