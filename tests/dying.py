"""Where a rank can die while it saves. Jobs of tests import it too, from a copy beside them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from mgpu_slurm.checkpoints import folder, writer

PHASES: dict[str, tuple[Any, str]] = {
    "before anything is written": (folder, "write_part"),
    "in the middle of the tensors": (writer, "_write_all"),
    "between tensors and record": (folder, "write_whole"),
    "after the record": (folder, "sync_folder"),
    "before the name": (folder, "publish"),
    "while older ones are deleted": (shutil, "rmtree"),
    "before the link to the best": (folder, "point_to_best"),
}
"""By the function at whose next call it dies."""

OF_RANK_0 = ("before the name", "while older ones are deleted", "before the link to the best")
"""What no other rank does."""


def die_in(phase: str, before: Callable[[], object] = lambda: None) -> None:
    """Kill this process when it next comes to the phase.

    Args:
        before: is called just before that.
    """
    module, name = PHASES[phase]
    real: Callable[..., Any] = getattr(module, name)

    def die(*arguments: Any, **options: Any) -> NoReturn:
        if name == "_write_all":
            descriptor, piece = arguments
            real(descriptor, piece[: len(piece) // 2])
        before()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    setattr(module, name, die)
