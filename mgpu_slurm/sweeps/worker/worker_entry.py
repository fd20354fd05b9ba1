"""Entry point of each rank of a sweep's worker, instead of `mgpu_slurm.training.entry`.

Signals are handled before the heavy imports: a time limit may be near when ranks restart in place.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mgpu_slurm.job.rank_process import exit_process, without_collections
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training import entry


def run_rank(folder: RunFolder) -> int:
    return entry.run_rank(folder, work)


def work(rank: Rank) -> int:
    # half of the lead time is for a checkpoint at the next step; a trial that saves none leaves anyway
    stop = StopFlag(leave_after=(rank.spec.lead or 0) / 2)
    stop.listen()
    if (count := _trials_at_once(rank)) > 1:
        return _supervise(rank, count, stop)
    return entry.guarded(rank, stop, lambda: _serve(rank, stop))


def _trials_at_once(rank: Rank) -> int:
    if rank.process or rank.facts.world_size > 1:
        # each trial has one rank: a thousand ranks need not read the file
        return 1
    # it may have changed since the submission
    from mgpu_slurm.sweeps.search import sweep_file

    return sweep_file.load(rank.folder.sweep).trials_per_worker


def _supervise(rank: Rank, count: int, stop: StopFlag) -> int:
    from mgpu_slurm.sweeps.worker import side_by_side

    with entry.reporting_errors(rank):
        return side_by_side.supervise(rank, count, stop)


def _serve(rank: Rank, stop: StopFlag) -> None:
    # importing torch and optuna takes seconds
    with without_collections():
        from mgpu_slurm.sweeps.worker import trial_loop

    trial_loop.serve(rank, stop)


if __name__ == "__main__":
    exit_process(entry.start(RunFolder(Path(sys.argv[1])), work))
