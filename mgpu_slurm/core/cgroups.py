"""The CPU time that control groups allow: containers often limit it by a quota, and leave all cores visible.

See cgroups(7), "CPU controller" of Linux's cgroup-v2 documentation, and "CFS Bandwidth Control" for version 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cpu_quota() -> float | None:
    """Return how many cores this process, and those that share its control groups, may use at once on average; None
    for no limit."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except (OSError, ValueError):
        return None
    return min((quota for line in lines for folder in _folders(line) for quota in _quotas(folder)), default=None)


def _folders(line: str) -> Iterator[Path]:
    """Yield the folders of a control group and those above it.

    Args:
        line: number, controllers and path; version 2 has no controllers.
    """
    _, controllers, path = line.split(":", 2)
    if not controllers:
        roots = [ROOT, ROOT / "unified"]
    elif "cpu" in controllers.split(","):
        # some distributions name the folder in another order
        roots = [ROOT / "cpu", ROOT / controllers]
    else:
        return
    for root in roots:
        folder = root / path.removeprefix("/")
        # a path may begin above what a container sees
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _quotas(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        microseconds = int((folder / "cpu.cfs_quota_us").read_text())
        if microseconds > 0:
            yield microseconds / int((folder / "cpu.cfs_period_us").read_text())
