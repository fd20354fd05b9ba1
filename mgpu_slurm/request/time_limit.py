"""Read time limits, and the signals that announce them."""

from __future__ import annotations

import re
import signal as signals

from mgpu_slurm.core.errors import UserError

DEFAULT_LEAD = 120
"""Default seconds between the signal and the time limit, if the limit is long enough."""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


def parse_time(text: str) -> int:
    """Return the seconds of a time limit in sbatch's format: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`.

    See sbatch(1), --time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(f"--time {text!r}: expected minutes or one of M:S, H:M:S, D-H, D-H:M, D-H:M:S")
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    total = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise UserError(f"--time {text!r}: must be greater than 0")
    return total


def parse_signal(text: str, limit: int | None) -> tuple[str, int | None]:
    """Return name and lead (seconds, None without a time limit) of `USR2@120` or `USR2`.

    If not given, the lead is at most a fifth of the time limit.
    """
    name, at, lead_text = text.partition("@")
    name = name.upper().removeprefix("SIG")
    if f"SIG{name}" not in signals.Signals.__members__ or name in ("KILL", "STOP", "TERM", "CHLD", "HUP"):
        raise UserError(f"--signal {text!r}: {name!r} cannot announce the time limit; use USR1 or USR2")
    if not at:
        return name, None if limit is None else min(DEFAULT_LEAD, max(1, limit // 5))
    if not lead_text.isdigit():
        raise UserError(f"--signal {text!r}: expected NAME@SECONDS, for example USR2@120")
    lead = int(lead_text)
    if limit is None:
        raise UserError(f"--signal {text!r}: seconds before the limit need a --time")
    if lead >= limit:
        raise UserError(f"--signal {text!r}: the lead of {lead} s must be shorter than the time limit of {limit} s")
    return name, lead


def announcement(text: str, limit: int | None, is_queued: bool) -> tuple[str, int | None]:
    """Return name and lead of the signal before a run's time limit; see `parse_signal`.

    Args:
        is_queued: whether it runs in a partition, which has a time limit even if none was requested.
    """
    name, lead = parse_signal(text, limit)
    return name, DEFAULT_LEAD if lead is None and is_queued else lead
