"""What an environment on a slow shared disk costs at the start, and a copy of it on the node's own disk saves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.measure import Estimate, difference, interleave, median
from benchmarks.report import Row, Section

MICROSECONDS = 100
"""Delay of a file operation: that of a busy parallel file system."""
ROUNDS = 10
PROGRAM = "import torch, torch.distributed"


def run() -> Section:
    with tempfile.TemporaryDirectory() as base:
        library = Path(base, "slow_disk.so")
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        copy = Path(base, "site-packages")
        shutil.copytree(sysconfig.get_paths()["purelib"], copy)
        slow = {"LD_PRELOAD": str(library), "SLOW_FOLDER": sys.prefix, "SLOW_COUNT": f"{base}/count"}
        slow["SLOW_MICROSECONDS"] = str(MICROSECONDS)
        cases = {
            "fast": {},
            "slow": slow,
            "copy": slow | {"PYTHONPATH": str(copy)},
        }
        seconds = interleave({name: partial(_seconds, more) for name, more in cases.items()}, ROUNDS)
        operations = {name: _operations(cases[name], Path(base, "count")) for name in ("slow", "copy")}
    return Section("slow disk", _ABOUT, [*_rows(seconds), *(_count(name, operations[name]) for name in operations)], [])


def _seconds(more: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | more, check=True)
    return time.perf_counter() - began


def _operations(more: Mapping[str, str], count: Path) -> int:
    count.unlink(missing_ok=True)
    _seconds(more)
    return sum(map(int, count.read_text().split()))


def _rows(seconds: dict[str, list[float]]) -> list[Row]:
    return [
        *(Row(f"import of torch, {_NAMES[name]}", median(seconds[name]), "s", 2) for name in _NAMES),
        Row("a slow disk costs", difference(seconds["slow"], seconds["fast"]), "s", 2),
        Row("a copy saves of that", difference(seconds["slow"], seconds["copy"]), "s", 2),
    ]


def _count(name: str, operations: int) -> Row:
    exact = Estimate(operations, operations, operations, 1)
    return Row(f"operations on the environment, {_NAMES[name]}", exact, "", 0)


_NAMES = {
    "fast": "environment on a fast disk",
    "slow": "on a slow one",
    "copy": "on a slow one, its site-packages copied to a fast one",
}
_ABOUT = (
    f"`{PROGRAM}` in a new process. On the slow disk, each operation on a path of the environment (open, stat, access,"
    f" readlink, opendir) takes {MICROSECONDS} us longer; reads, and what the loader of libraries opens, do not. Python"
    " itself, with its standard library, is on a fast disk in all cases. The copy is found by `PYTHONPATH`. Local"
    " ranks are forked from one process, which imports torch once; under SLURM, each rank imports it."
)
