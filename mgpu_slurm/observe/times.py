"""Times and their lengths, as people read them."""

from __future__ import annotations

from datetime import datetime


def time_of(text: str | None) -> datetime | None:
    """The time that ISO 8601 says, None for none."""
    return datetime.fromisoformat(text) if text else None


def duration(seconds: float) -> str:
    """A length of time in two letters' precision: `42s`, `3m10s`, `5h02m`, `3d04h`."""
    seconds = int(max(0, seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
