"""Finds where a thread is in the user's code. Does not import torch, which the thread itself may be importing."""

from __future__ import annotations

import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_OTHERS = tuple(
    str(Path(folder).resolve())
    for folder in {
        *site.getsitepackages(),
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        str(Path(__file__).parents[1]),
    }
)


def place_of(thread: threading.Thread) -> str:
    """Return the innermost line of the user's code in a thread of this process."""
    assert thread.ident is not None
    return place(stack(sys._current_frames()[thread.ident]))


def stack(innermost: FrameType) -> traceback.StackSummary:
    """Return the stack that ends in this frame."""
    # without source lines: reading them could block on the very disk that everything waits for
    return traceback.StackSummary.extract(reversed(list(traceback.walk_stack(innermost))), lookup_lines=False)


def place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of the user's code."""
    own = [frame for frame in frames if not _is_library(frame.filename)]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def _is_library(file: str) -> bool:
    # a cluster's torch is often outside the environment that uses it
    return file.startswith(("<frozen", *_OTHERS)) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
