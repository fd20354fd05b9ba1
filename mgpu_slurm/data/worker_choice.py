"""Choose a loader's workers from the cores of its rank: `num_workers="auto"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_slurm.core.errors import UserError

AUTO = "auto"

MOST_WORKERS = 16
"""Maximum number of workers that are chosen: each holds batches in memory."""

BATCHES_AHEAD = 4
"""Least number of batches that workers hold together: one slow batch does not stop the training."""

_ONLY_WITH_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


def with_workers(call: str, options: Mapping[str, Any], cores: int, is_stream: bool) -> dict[str, Any]:
    """Return a loader's options with `num_workers` as a number. Those that the job gives are not changed, but without
    workers the options for them are left out.

    Args:
        call: the call with these options, for the error.
        cores: number of cores of this rank, of which it needs one itself.
        is_stream: whether each worker reads the whole dataset, so that more of them only share `collate_fn`.

    Raises:
        UserError: `num_workers` is neither a number nor "auto".
    """
    asked = options.get("num_workers", 0)
    if asked != AUTO:
        if not isinstance(asked, int):
            raise UserError(f'{call}(num_workers={asked!r}): expected a number of processes, or "{AUTO}"')
        return {**options}
    workers = min(cores - 1, 1 if is_stream else MOST_WORKERS)
    if not workers:
        return {name: value for name, value in options.items() if name not in _ONLY_WITH_WORKERS} | {"num_workers": 0}
    # torch's default is two for each worker
    chosen = {"prefetch_factor": max(2, BATCHES_AHEAD // workers), "persistent_workers": not is_stream}
    return {**chosen, **options, "num_workers": workers}
