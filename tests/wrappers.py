"""A script that counts the requests to save that reach it, behind the launchers that people put before one."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import Project, wait_until

SCRIPT = """
    import pathlib, signal, sys, time

    heard = pathlib.Path(sys.argv[1])
    asked = []

    def hear(signum, frame):
        asked.append(signum)
        with heard.open("a") as file:
            file.write(signal.Signals(signum).name + "\\n")

    for signum in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(signum, hear)
    heard.write_text("ready\\n")
    while not asked:
        time.sleep(0.02)
    # another one may be passed on
    end = time.monotonic() + 2
    while time.monotonic() < end:
        time.sleep(0.02)
    with heard.open("a") as file:
        file.write("saved\\n")
"""

FORWARD = """
    # as uv run, timeout and torchrun do
    import signal, subprocess, sys, time

    child = subprocess.Popen(sys.argv[1:])

    def forward(signum, frame):
        time.sleep(0.3)
        child.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(signum, forward)
    sys.exit(child.wait())
"""

RANKS = {
    "shells": 'exec env A=1 bash -c "bash -c \\"{python} hear.py {heard}; true\\"; true"',
    "trap": 'exec bash -c "trap true TERM USR2; {python} hear.py {heard}; true"',
    # not its console script, which imports timm, and so torchvision, if that is installed
    "accelerate": "exec {python} -m accelerate.commands.launch --cpu --num_processes 1 hear.py {heard}",
    "forwards": "exec {python} forward.py {python} hear.py {heard}",
}
"""What ranks run, one each."""


def start(project: Project, *options: str) -> Path:
    """Submits a run with a launcher on each rank; each script listens."""
    project.write("hear.py", SCRIPT)
    project.write("forward.py", FORWARD)
    lines = []
    for rank, (name, line) in enumerate(RANKS.items()):
        words = {"python": sys.executable, "heard": project.folder / name}
        lines.append(f"{rank}) {line.format(**words)} ;;")
    ranks = ("--ntasks-per-node", str(len(RANKS)), "--gpus-per-node", "0")
    folder = project.submit(*ranks, *options, "--", "sh", "-c", f"case $RANK in {' '.join(lines)} esac")
    wait_until(lambda: all(heard(project, name)[:1] == ["ready"] for name in RANKS), pause=0.1)
    return folder


def heard(project: Project, name: str) -> list[str]:
    path = project.folder / name
    return path.read_text().split() if path.exists() else []
