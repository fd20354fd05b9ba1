"""A rank's output outlives a disk that is full for a while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# the device that is always full stands in for a file, which then takes its place
SCRIPT = """
import os, sys
from pathlib import Path
from mgpu_slurm.job import output

output.send_to(Path("/dev/full"))
print("a line")
for number in range({lines}):
    print(f"line {{number}}", "x" * 90)
print("an error", file=sys.stderr)
os.system("echo of a child >&2")
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)
{then}
output.flush()
"""


def written(path: Path, lines: int, then: str) -> list[str]:
    script = SCRIPT.format(lines=lines, then=then)
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path.read_text().splitlines()


def test_output_printed_while_the_disk_is_full_is_written_later(tmp_path: Path) -> None:
    assert written(tmp_path / "log", 0, "print('at last')") == ["a line", "at last", "an error"]


def test_pending_output_is_written_without_further_prints(tmp_path: Path) -> None:
    assert written(tmp_path / "log", 0, "") == ["a line", "an error"]


def test_too_much_pending_output_keeps_the_end_and_counts_lost_bytes(tmp_path: Path) -> None:
    lines = written(tmp_path / "log", 2000, "")
    assert lines[:2] == [
        "",
        f"mgpu_slurm: WARNING: the disk was full: {len(full(2000)) - (1 << 16)} bytes of output are lost here",
    ]
    assert lines[-2:] == [f"line 1999 {'x' * 90}", "an error"]


def full(lines: int) -> str:
    return "a line\n" + "".join(f"line {number} {'x' * 90}\n" for number in range(lines))
