"""Query SLURM's accounting for what the ranks of ended jobs used: the steps of the jobs have that, not the jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import commands

_FIELDS = ("JobID", "Start", "NNodes", "ElapsedRaw", "TotalCPU", "MaxRSS", "TRESUsageInTot")

_STEP = re.compile(r"(?P<job>[0-9]{1,18}(?:_[0-9]{1,18})?)\.[0-9]{1,18}")
"""A step of ranks; the batch step and other steps have names."""
_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,9})?)(?P<unit>[KMGTP]?)[cn]?")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_CLOCK = re.compile(
    r"(?:(?P<days>[0-9]{1,9})-)?(?:(?P<hours>[0-9]{1,9}):)?(?P<minutes>[0-9]{1,9}):(?P<seconds>[0-9]{1,9}(?:\.[0-9]{1,9})?)"
)


@dataclass(frozen=True)
class AccountedStep:
    """The ranks of an attempt in SLURM's accounting."""

    job_id: str
    start: str
    """As accounting prints it, in this machine's zone."""
    seconds: int
    cpu: float
    """CPU seconds of all ranks."""
    mem: int
    """Bytes of memory that a node needed: the sum of the highest of its ranks, as a mean over the nodes; SLURM looks
    every 30 s by default."""


def steps_command(job_ids: Sequence[str]) -> list[str]:
    """Return the command that lists the steps of jobs, also those of earlier starts of requeued jobs."""
    assert job_ids
    return ["sacct", "--noheader", "-P", "-D", "-o", ",".join(_FIELDS), "-j", ",".join(job_ids)]


def accounted_steps(job_ids: Sequence[str]) -> list[AccountedStep] | None:
    """Return the ranks' steps of these jobs; None if there is no accounting, or it does not answer."""
    try:
        return parse_steps(commands.run(steps_command(job_ids)))
    except ClusterError:
        return None


def parse_steps(output: str) -> list[AccountedStep]:
    """Return the ranks' steps of sacct's answer."""
    found = []
    for line in output.splitlines():
        row = dict(zip(_FIELDS, line.split("|"), strict=False))
        match = _STEP.fullmatch(row.get("JobID", ""))
        start = commands.time_of(row.get("Start", "")) if match is not None else None
        if match is None or start is None or len(row) < len(_FIELDS):
            continue
        nodes = commands.number_of(row["NNodes"]) or 1
        used = dict(part.partition("=")[::2] for part in row["TRESUsageInTot"].split(","))
        mem = max(_bytes(used.get("mem", "")) // max(1, nodes), _bytes(row["MaxRSS"]))
        found.append(
            AccountedStep(
                match["job"], start, commands.number_of(row["ElapsedRaw"]) or 0, _seconds(row["TotalCPU"]), mem
            )
        )
    return found


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    return round(float(match["number"]) * _UNITS[match["unit"]]) if match else 0


def _seconds(text: str) -> float:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return 0.0
    hours = int(match["days"] or 0) * 24 + int(match["hours"] or 0)
    return (hours * 60 + int(match["minutes"])) * 60 + float(match["seconds"])
