"""The line of the user's code that is shown for a thread."""

from __future__ import annotations

import traceback

import pytest

from mgpu_slurm.job import stacks

USERS = traceback.FrameSummary("/home/me/train.py", 12, "train")


@pytest.mark.parametrize(
    "file",
    [
        traceback.__file__,
        stacks.__file__,
        "<frozen importlib._bootstrap>",
        # a module of the cluster, or Debian's Python, which an environment with system site-packages uses
        "/opt/pytorch/lib/python3.11/site-packages/torch/autograd/graph.py",
        "/usr/lib/python3/dist-packages/torch/autograd/graph.py",
    ],
)
def test_library_frames_are_skipped(file: str) -> None:
    assert stacks.place([USERS, traceback.FrameSummary(file, 979, "backward")]) == "train.py:12 in train"


def test_innermost_frame_is_shown_without_a_user_frame() -> None:
    assert stacks.place([traceback.FrameSummary(stacks.__file__, 3, "place")]) == "stacks.py:3 in place"
