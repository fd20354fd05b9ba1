"""`python -m mgpu_slurm.job rank` at the name of version 0.1 (see `mgpu_slurm.runtime`)."""

from __future__ import annotations

import runpy

from mgpu_slurm.job import PARTS

if __name__ == "__main__":
    runpy.run_module(PARTS["rank"], run_name="__main__", alter_sys=True)
