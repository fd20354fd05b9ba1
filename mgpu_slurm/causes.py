"""What an attempt failed of, by what was recorded of it, and whose doing that is.

What the program did it would do again. What the cluster did (a rank killed by nobody knows whom, a connection lost, a
disk or GPU that gave up) is worth another try.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cause:
    """One kind of failure."""

    name: str
    is_clusters: bool = True
    """Whether the program has no part in it."""
    spoils_node: bool = False
    """Whether what runs on the same node next will fail of it too."""


PROGRAM = Cause("program", is_clusters=False)

_DISK = "|".join(
    str(number)
    for number in (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO)
)

# of a GPU, in the words of cudaGetErrorString and of torch
_GPU = "|".join(
    [
        "uncorrectable ECC error",
        "uncorrectable NVLink error",
        "hardware stack error",
        "GPU is lost",
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "no CUDA-capable device is detected",
        "No CUDA GPUs are available",
        "CUDA driver initialization failed",
        "system not yet initialized",
        "CUDA unknown error",
    ]
)

_TABLE = (
    (re.compile(_GPU), Cause("gpu", spoils_node=True)),
    (re.compile(rf"\[Errno (?:{_DISK})\]"), Cause("disk")),
    # by a shell's word for it, and by srun's
    (re.compile(r"^(?:[\w\- ]+ on \S+|[\w ]+) was ended by SIGKILL|^ranks? \S+ on \S+: Killed$"), Cause("killed")),
    (re.compile(r"^srun: error: .*(?:launch|Node failure|communication|Socket timed out)", re.IGNORECASE),
     Cause("launch")),
)  # fmt: skip


def cause_of(failure: Mapping[str, Any]) -> Cause:
    """What a `failure.json` tells of.

    Args:
        failure: with `consequence` where no rank had an error of its own, but saw another one's end.
    """
    if failure.get("consequence"):
        return Cause("connection")
    text = str(failure.get("message", ""))
    return next((cause for pattern, cause in _TABLE if pattern.search(text)), PROGRAM)


def node_of(failure: Mapping[str, Any]) -> str | None:
    """Where it happened, if that was on one node and somebody said so."""
    named = re.match(r"ranks? \S+ on ([\w.-]+)(?:: | )", str(failure.get("message", "")))
    node: str | None = failure.get("node") or (named[1] if named else None)
    return node
