"""What runs take on disk, as a table."""

from __future__ import annotations

from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.registry.cleanup import usage

HEADER = ["RUN", "CHECKPOINTS", "LOGS", "TENSORBOARD", "CODE", "OTHER", "TOTAL"]


def usage_table(folders: list[RunFolder]) -> str:
    from tabulate import tabulate

    found = [(folder.run, usage(folder)) for folder in folders]
    rows = [HEADER]
    for run, use in found:
        sizes = (use.checkpoints, use.logs, use.tensorboard, use.code, use.other, use.total)
        rows.append([run, *map(human_size, sizes)])
    if len(found) > 1:
        rows.append(["all", "", "", "", "", "", human_size(sum(use.total for _, use in found))])
    return tabulate(rows, tablefmt="plain", disable_numparse=True, stralign="right", colalign=("left",))
