"""Count the floating-point operations of a model, and say which part of those that its GPU can do that is."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import torch

from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.wrap import Models

COUNTED = 2
"""The step of an attempt whose forward passes are counted: the first one allocates memory, and may compile."""
PASSES = 3
"""FLOPs of forward and backward pass, in units of the forward pass. See Chowdhery et al., PaLM, 2022, appendix B."""

PEAKS = {
    # part of the GPU's name: TFLOP/s in half precision, TF32, FP32 and FP8; 0 for what it does not have
    "H100 PCIe": (756, 378, 51, 1513),
    "H100 NVL": (835, 417, 60, 1671),
    "H200 NVL": (835, 417, 60, 1671),
    "H100": (989, 494, 67, 1979),
    "H200": (989, 494, 67, 1979),
    "GH200": (989, 494, 67, 1979),
    "A100": (312, 156, 19.5, 0),
    "A30": (165, 82, 10.3, 0),
    "A40": (150, 75, 37.4, 0),
    "A10": (125, 62.5, 31.2, 0),
    "L40S": (362, 183, 91.6, 733),
    "L4": (121, 60, 30.3, 242),
    "V100-SXM2": (125, 0, 15.7, 0),
    "V100-PCIE": (112, 0, 14, 0),
    "T4": (65, 0, 8.1, 0),
}
"""The first entry that matches counts. From NVIDIA's data sheets, without sparsity."""


def peak_flops(name: str, precision: str) -> float | None:
    """Return the FLOP/s of a GPU in a precision; None if they are not known.

    `fp32` counts as `tf32` if the GPU has that: convolutions use it by default, and `--precision tf32` would use it for
    all layers.
    """
    found = next((peaks for part, peaks in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)
    # a part of a GPU has a part of its units
    if found is None or "MIG" in name:
        return None
    half, tf32, fp32, fp8 = found
    by_precision = {"bf16": half, "fp16": half, "fp8": fp8, "tf32": tf32 or fp32, "fp32": tf32 or fp32}
    return by_precision[precision] * 1e12 or None


class FlopCount:
    """Counts the forward passes of one step. Attention is counted by torch's formulas, whatever kernel computes it."""

    def __init__(self, models: Models, layout: Layout, device: torch.device) -> None:
        self._models = models
        self._ranks = layout.data * layout.ranks_per_batch
        self._peak: float | None = None
        # a stage has only a part of the layers; torch calls compiled ones as they are if it counts, which takes memory
        if device.type == "cuda" and layout.pipeline == 1 and not layout.compile:
            self._peak = peak_flops(torch.cuda.get_device_name(device), layout.precision)
        self._steps = 0
        self._hooks = ExitStack()
        self._counter: _ForwardPasses | None = None
        self._of_sample = 0.0

    def step_done(self, samples: int) -> None:
        """Record the end of a step.

        Args:
            samples: number of this rank's samples in it.
        """
        self._steps += 1
        if self._peak is None or self._steps > COUNTED:
            return
        if self._steps == COUNTED - 1:
            self._begin()
        elif self._counter is not None:
            self._hooks.close()
            self._of_sample = PASSES * self._counter.flops / samples if samples else 0.0
            self._counter = None

    def utilization(self, samples_per_second: float) -> float | None:
        """Return the part of the ranks' peak FLOP/s that training takes (MFU); None if either is not known."""
        if self._peak is None or not self._of_sample:
            return None
        return self._of_sample * samples_per_second / (self._ranks * self._peak)

    def close(self) -> None:
        """Stop counting."""
        self._hooks.close()

    def _begin(self) -> None:
        models = self._models.held()
        if any(map(torch_adapter.has_compiled, models)):
            return
        self._counter = _ForwardPasses()
        for model in models:
            if not isinstance(model, torch.jit.ScriptModule):
                self._hooks.callback(model.register_forward_pre_hook(self._counter.enter).remove)
                self._hooks.callback(model.register_forward_hook(self._counter.leave, always_call=True).remove)


class _ForwardPasses:
    """Counts the FLOPs of forward passes that are trained by; those of a model within another one count once."""

    def __init__(self) -> None:
        self.flops = 0
        self._depth = 0
        self._counter: Any = None

    def enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._counter = torch_adapter.flop_counter()
            self._counter.__enter__()

    def leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            self.flops += counter.get_total_flops()
