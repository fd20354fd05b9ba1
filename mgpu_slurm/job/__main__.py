"""Start a process of a run: `python -m mgpu_slurm.job batch|rank|worker|supervisor|coordinator|tracker ...`."""

from __future__ import annotations

import runpy
import sys

from mgpu_slurm.job import PARTS

runpy.run_module(PARTS[sys.argv.pop(1)], run_name="__main__", alter_sys=True)
