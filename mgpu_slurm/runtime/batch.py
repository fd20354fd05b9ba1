"""`mgpu_slurm.job.batch` at the name of version 0.1 (see `mgpu_slurm.runtime`)."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("mgpu_slurm.job.batch", run_name="__main__", alter_sys=True)
