"""One GPU: what `run` costs per step of a ResNet-50, against a bare loop and Lightning, and how fast it computes; a GPT
of 1.4 billion parameters in lower precisions."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.measure import Estimate, median, ratio
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row, Section

BATCH = 256
RATIO_TARGET = 1 / 0.97

_LOOPS = {
    "run": "`run`",
    "bare": "bare loop",
    "lightning": "Lightning Fabric",
    "ahead": "`run`, batches from main memory, copied ahead",
    "waiting": "`run`, batches from main memory, copied when they are needed",
}
_GPTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bf16": (("--precision", "bf16", "--compile"), ()),
    "fp8": (("--precision", "fp8", "--compile"), ()),
    "bf16, AdamW in 8 bits": (("--precision", "bf16", "--compile"), ("optimizer=adamw8bit",)),
}
"""Options and config of a run, by what they are."""


def run() -> Section:
    with project("jobs") as made:
        rows = [*_resnet(made), *(row for name in _GPTS for row in _gpt(made, name))]
    return Section("gpu", _ABOUT, rows, [])


def _resnet(made: Project) -> list[Row]:
    options = ("--gpus-per-node", "1", "--precision", "bf16", "--compile")
    folder = _finished(made, *options, f"{JOBS}.resnet_blocks", f"batch_size={BATCH}")
    found: dict[str, Any] = json.loads((folder / "blocks.json").read_text())
    seconds: dict[str, list[float]] = found["seconds"]
    images = {name: _per_second(BATCH, median(seconds[name])) for name in _LOOPS}
    utilization = images["run"].scaled(100 * found["flops"] / found["peak_flops"]) if found["peak_flops"] else None
    return [
        Row("ResNet-50, a step: `run` / bare loop", ratio(seconds["run"], seconds["bare"]), "", 4, RATIO_TARGET),
        Row("ResNet-50, a step: `run` / Lightning Fabric", ratio(seconds["run"], seconds["lightning"]), "", 4, 1.0),
        Row("ResNet-50, a step: copied ahead / when needed", ratio(seconds["ahead"], seconds["waiting"]), "", 4),
        *(Row(f"ResNet-50, images per second: {name}", images[case], "", 0) for case, name in _LOOPS.items()),
        *([Row("ResNet-50, model FLOPs utilization: `run`", utilization, "%", 1)] if utilization else []),
    ]


def _gpt(made: Project, name: str) -> list[Row]:
    options, config = _GPTS[name]
    folder = _finished(made, "--gpus-per-node", "1", *options, f"{JOBS}.gpt_steps", *config)
    result = json.loads((folder / "result.json").read_text())["result"]
    kinds = {"tokens per second": ("tokens_per_second", 1.0, "", 0), "loss after 105 steps": ("loss", 1.0, "", 3)}
    kinds |= {"peak of allocated memory": ("allocated", 2**-30, "GiB", 1)}
    return [
        Row(f"GPT, {name}: {what}", median([result[key] * factor]), unit, digits)
        for what, (key, factor, unit, digits) in kinds.items()
    ]


def _finished(made: Project, *words: str) -> Any:
    """Run a job to its end; return its folder."""
    _, folder = made.submit(*words)
    made.wait(folder)
    return folder


def _per_second(count: int, seconds: Estimate) -> Estimate:
    # the slowest step has the fewest
    return Estimate(count / seconds.value, count / seconds.high, count / seconds.low, seconds.count)


_ABOUT = (
    f"ResNet-50, bfloat16, channels_last, compiled, {BATCH} images that lie on the GPU. Loops take turns in one"
    " process, block by block of 20 steps: `run.wrap`, `run.backward` and `run.update` under `--precision bf16"
    " --compile`, also with images in pinned main memory; a bare loop (`torch.autocast`, `model.compile()`, SGD); and"
    " Lightning Fabric with `bf16-mixed` and the same compiled model. GPT with 1.4 billion parameters, 28 blocks of"
    " width 2048, batches of 4 x 1,024 tokens, AdamW, compiled by block: 100 steps after 5 of"
    " warm-up, once."
)
