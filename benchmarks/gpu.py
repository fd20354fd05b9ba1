"""A ResNet-50 on one GPU: what `run` costs per step, against a bare loop and Lightning."""

from __future__ import annotations

import json

from benchmarks.measure import Estimate, median, ratio
from benchmarks.project import JOBS, project
from benchmarks.report import Row, Section

BATCH = 256
RATIO_TARGET = 1 / 0.97

_NAMES = {"run": "`run`", "bare": "bare loop", "lightning": "Lightning Fabric"}


def run() -> Section:
    with project() as made:
        options = ("--gpus-per-node", "1", "--precision", "bf16", "--compile")
        _, folder = made.submit(*options, f"{JOBS}.resnet_blocks", f"batch_size={BATCH}")
        made.wait(folder)
        seconds: dict[str, list[float]] = json.loads((folder / "blocks.json").read_text())
    return Section("gpu", _ABOUT, [*_ratios(seconds), *(_images(name, seconds[name]) for name in _NAMES)], [])


def _ratios(seconds: dict[str, list[float]]) -> list[Row]:
    return [
        Row("time of a step: `run` / bare loop", ratio(seconds["run"], seconds["bare"]), "", 4, RATIO_TARGET),
        Row("time of a step: `run` / Lightning Fabric", ratio(seconds["run"], seconds["lightning"]), "", 4, 1.0),
    ]


def _images(name: str, seconds: list[float]) -> Row:
    found = median(seconds)
    # the slowest step has the fewest images
    per_second = Estimate(BATCH / found.value, BATCH / found.high, BATCH / found.low, found.count)
    return Row(f"images per second: {_NAMES[name]}", per_second, "", 0)


_ABOUT = (
    f"ResNet-50, bfloat16, channels_last, compiled, {BATCH} images that lie on the GPU. Three loops take turns in one"
    " process, block by block of 20 steps: `run.wrap`, `run.backward` and `run.update` under `--precision bf16"
    " --compile`; a bare loop (`torch.autocast`, `model.compile()`, SGD); and Lightning Fabric with `bf16-mixed` and"
    " the same compiled model."
)
