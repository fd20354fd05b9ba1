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
ROUNDS = 8
PROGRAM = "import torch, torch.distributed"
RANK = """
import os
from mgpu_slurm.job import node_process, rank_process
from mgpu_slurm.training import entry

def run():
    entry.import_for_ranks()
    return 0

if os.environ["FORKS"] == "1":
    rank = int(os.environ["SLURM_LOCALID"])
    code = node_process.run(node_process.Task(rank, 2, entry.import_for_ranks, run, frozenset()))
else:
    code = run()
rank_process.exit_process(code)
"""
"""One of two ranks of a node, which imports what a rank of a job function with DDP imports."""


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
        timed = {name: partial(_seconds, more) for name, more in cases.items()}
        timed |= {name: partial(_seconds_of_two, slow | {"FORKS": flag}) for name, flag in _OF_TWO.items()}
        seconds = interleave(timed, ROUNDS)
        operations = {name: _operations(cases[name], Path(base, "count")) for name in ("slow", "copy")}
    return Section("slow disk", _ABOUT, [*_rows(seconds), *(_count(name, operations[name]) for name in operations)], [])


def _seconds(more: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | more, check=True)
    return time.perf_counter() - began


def _seconds_of_two(more: Mapping[str, str]) -> float:
    """Seconds until both ranks of a node have imported torch."""
    began = time.perf_counter()
    # SLURM_JOB_ID tells the tasks of this step from others
    step = {"SLURM_JOB_ID": str(time.monotonic_ns()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env={**os.environ, **more, **step, "SLURM_LOCALID": str(rank)})
        for rank in range(2)
    ]
    if codes := [rank.wait() for rank in ranks if rank.wait()]:
        raise RuntimeError(f"a rank ended with {codes[0]}")
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
        Row("two ranks of a node, both import torch from a slow disk", median(seconds["each"]), "s", 2),
        Row("two ranks of a node, forked from one process that does", median(seconds["forked"]), "s", 2),
        Row("forks save of that", difference(seconds["each"], seconds["forked"]), "s", 2),
    ]


def _count(name: str, operations: int) -> Row:
    exact = Estimate(operations, operations, operations, 1)
    return Row(f"operations on the environment, {_NAMES[name]}", exact, "", 0)


_OF_TWO = {"each": "0", "forked": "1"}
_NAMES = {
    "fast": "environment on a fast disk",
    "slow": "on a slow one",
    "copy": "on a slow one, its site-packages copied to a fast one",
}
_ABOUT = (
    f"`{PROGRAM}` in a new process. On the slow disk, each operation on a path of the environment (open, stat, access,"
    f" readlink, opendir) takes {MICROSECONDS} us longer; reads, and what the loader of libraries opens, do not. Python"
    " itself, with its standard library, is on a fast disk in all cases. The copy is found by `PYTHONPATH`. Two"
    " ranks are processes on these two cores, as srun would start them, that also import torch's compiler, as"
    " DistributedDataParallel does. strace counts 27,900 system calls on files in such an import, 17,900 of them stat;"
    " the operations below are those on paths of the environment."
)
