"""How long it takes to read event files: our reader beside TensorBoard's own, and the whole of `aggregate`."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.measure import interleave, median, ratio
from benchmarks.project import MGPU, Project, project
from benchmarks.report import Row, Section
from mgpu_slurm.metrics.event_reader import read_files

ROUNDS = 12
RUNS = 100
TAGS = ("train/loss", "train/lr", "valid/loss", "valid/accuracy")
STEPS = 250
RATIO_TARGET = 0.05

Scalars = dict[str, list[tuple[int, float, float]]]
"""Step, value and time of each point, by tag."""


def run() -> Section:
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as base, project() as made:
        folder = Path(base)
        _write_runs(folder)
        paths = sorted(folder.glob("*/*tfevents*"))
        if [_ours(path) for path in paths] != [_theirs(path) for path in paths]:
            raise RuntimeError("the two readers found different points")
        cases = {
            "ours": partial(_timed, lambda: read_files(paths)),
            "theirs": partial(_timed, lambda: [_accumulated(path) for path in paths]),
            "command": partial(_aggregated, made, folder),
        }
        seconds = interleave(cases, ROUNDS)
    whole = f"{RUNS} runs x {len(TAGS) * STEPS:,} scalars"
    rows = [
        Row("our reader / EventAccumulator", ratio(seconds["ours"], seconds["theirs"]), "", 3, RATIO_TARGET),
        Row(f"our reader, {whole}", median(seconds["ours"]), "s", 3),
        Row(f"EventAccumulator, {whole}", median(seconds["theirs"]), "s", 3),
        Row(f"`mgpu-slurm aggregate` of them, the whole command, {whole}", median(seconds["command"]), "s", 2),
    ]
    return Section("curves", _ABOUT, rows, _NOTES)


def _write_runs(folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for number in range(RUNS):
        with SummaryWriter(str(folder / f"seed-{number}")) as writer:
            for step in range(STEPS):
                for place, tag in enumerate(TAGS):
                    writer.add_scalar(tag, math.exp(-step / 100) + number + place, step * 10)


def _timed(read: Callable[[], object]) -> float:
    start = time.perf_counter()
    read()
    return time.perf_counter() - start


def _accumulated(path: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}


def _theirs(path: Path) -> Scalars:
    return {
        tag: [(point.step, point.value, point.wall_time) for point in points]
        for tag, points in _accumulated(path).items()
    }


def _ours(path: Path) -> Scalars:
    (file,) = read_files([path])
    return {
        tag: list(zip(points.steps.tolist(), points.values.tolist(), points.times.tolist(), strict=True))
        for tag, points in file.scalars.items()
    }


def _aggregated(made: Project, folder: Path) -> float:
    return made.wall_time([*MGPU, "aggregate", str(folder), "--out", str(made.base / "out")])


_ABOUT = (
    f"{RUNS} event files of torch's SummaryWriter with {len(TAGS)} tags of {STEPS} points each. Both readers take every"
    " point of every file, in one process, and are checked to find the same steps, values and times first. Files are in"
    " the page cache."
)
_NOTES = [
    "Our reader checks both checksums of every record, as EventAccumulator does.",
    "The command reads all runs, takes them together with a bootstrap interval for each of"
    f" {len(TAGS) * STEPS:,} points, and writes CSV, Parquet and seven runs for TensorBoard.",
]
