"""The command that starts a rank: Python with this package, in the run's container if it has one."""

from __future__ import annotations

import os
from pathlib import Path

from mgpu_slurm.core import interpreter
from mgpu_slurm.request.container import Mount, inside, without_covered
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder

PACKAGE = Path(__file__).resolve().parents[1]


def words(spec: Spec, folder: RunFolder, python: str) -> list[str]:
    """Return the command, without its last word, which is the run's folder.

    Args:
        folder: the run or its group.
        python: the interpreter of a rank that is in no container.
    """
    container = spec.container
    command = interpreter.command(python if container is None else container.python, "mgpu_slurm.job", spec.rank_part)
    if container is None:
        return command
    packages = str(folder.package)
    if "PYTHONPATH" in spec.environment:
        packages += f":{spec.environment['PYTHONPATH']}"
    workdir = str(folder.group.path)
    return container.wrapped(inside(command, packages), mounts(spec, folder), workdir, bool(spec.resources.gpus))


def srun_options(spec: Spec, folder: RunFolder) -> list[str]:
    """Return the options with which srun starts ranks in a container."""
    if spec.container is None:
        return []
    return spec.container.srun_options(mounts(spec, folder), str(folder.group.path))


def mounts(spec: Spec, folder: RunFolder) -> list[Mount]:
    """Return what a container mounts: what the user has named, what the run needs, and this package."""
    package = Mount(str(PACKAGE), str(folder.package / PACKAGE.name))
    return [*mounts_without_package(spec, folder), package]


def mounts_without_package(spec: Spec, folder: RunFolder) -> list[Mount]:
    assert spec.container is not None
    # relative paths in a config start in the project; checkpoints and the code are in the runs folder
    needed = [spec.project, str(folder.group.path.parent), *spec.stage]
    if spec.stage and spec.stage_to is not None:
        # its variables have their values on the node
        needed.append(str(Path(spec.stage_to.partition("$")[0])))
    named = [Mount.parse(each) for each in spec.container.mounts]
    targets = {mount.target for mount in named}
    # a run can be resumed although its project has moved, and what is on nodes only is named by the user
    own = [Mount(path, path) for path in needed if path not in targets and os.path.exists(path)]
    return without_covered([*named, *own])
