"""Load the job function of a run: by its import path from the run's own code, or as it was pickled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.job_function import JobFunction
from mgpu_slurm.request.spec import (
    Spec,
)


def job_function(spec: Spec, folder: RunFolder) -> JobFunction:
    """Return the run's job function, from the run's own code."""
    from mgpu_slurm.request import target

    if spec.target.function is None:
        return _unpickled(spec, folder)
    return target.load(spec.target.function, _stand_in(spec, folder))


def _stand_in(spec: Spec, folder: RunFolder) -> Path:
    """Make this process one of the run's code, and return its working directory there."""
    from mgpu_slurm.request import target

    workdir = folder.code / spec.workdir
    target.stand_in(workdir)
    sys.argv = [spec.target.label]
    return workdir


def _unpickled(spec: Spec, folder: RunFolder) -> JobFunction:
    """
    Raises:
        UserError: it is somebody else's, and whoever wrote a pickle decides what code runs when it is loaded.
    """
    _stand_in(spec, folder)
    import cloudpickle  # type: ignore[import-untyped]

    with open(folder.function, "rb") as file:
        # compared with this rank's own log: a file server may give all files of a user to somebody else
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (os.geteuid(), os.fstat(1).st_uid):
            raise UserError(f"{str(folder.function)!r} belongs to user {owner}: submit the function yourself")
        *loaded, types_of_fields = cloudpickle.load(file)
    configs.settle_classes(types_of_fields)
    if len(loaded) == 1:
        job: JobFunction = loaded[0]
        return job
    # v0.1 kept the function and one config, which was the same for all runs of a group
    function, config = loaded
    return JobFunction(spec.target.label, function, None if isinstance(config, dict) else type(config))
