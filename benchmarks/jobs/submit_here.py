"""From submission to result on SLURM, as a person's script does it with mgpu_slurm.

Called with a folder for the ranks' times and a cluster of `mgpu.yaml`.
"""

from __future__ import annotations

import sys
import time

from mgpu_slurm import submit

if __name__ == "__main__":
    start = time.perf_counter()
    run = submit(
        "benchmarks.jobs.three_steps_function",
        {"out": sys.argv[1]},
        executor="slurm",
        cluster=sys.argv[2],
        nodes=2,
        ntasks_per_node=2,
        gpus_per_node=0,
    )
    assert run.result()["steps"] == 3.0
    print(time.perf_counter() - start)
