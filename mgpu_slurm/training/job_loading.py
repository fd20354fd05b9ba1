"""Load the job function of a run: by its import path from the run's code snapshot, or from a pickle."""

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
    """Return the run's job function, from the run's code snapshot."""
    from mgpu_slurm.request import target

    if spec.target.function is None:
        return _unpickled(spec, folder)
    return target.load(spec.target.function, _stand_in(spec, folder))


def _stand_in(spec: Spec, folder: RunFolder) -> Path:
    """Make this process use the run's code snapshot, and return the working directory there."""
    from mgpu_slurm.request import target

    workdir = folder.code / spec.workdir
    target.stand_in(workdir)
    sys.argv = [spec.target.label]
    return workdir


def _unpickled(spec: Spec, folder: RunFolder) -> JobFunction:
    """Load the job function from its pickle.

    Raises:
        UserError: the pickle belongs to another user, whose code would run when it is loaded.
    """
    _stand_in(spec, folder)
    import cloudpickle  # type: ignore[import-untyped]

    with open(folder.function, "rb") as file:
        # compare with the owner of this rank's log: a file server may map all files of a user to another owner
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (os.geteuid(), os.fstat(1).st_uid):
            raise UserError(f"{str(folder.function)!r} belongs to user {owner}: submit the function yourself")
        *loaded, types_of_fields = cloudpickle.load(file)
    configs.settle_classes(types_of_fields)
    if len(loaded) == 1:
        job: JobFunction = loaded[0]
        return job
    # v0.1 stored the function and one config, which was the same for all runs of a group
    function, config = loaded
    return JobFunction(spec.target.label, function, None if isinstance(config, dict) else type(config))
