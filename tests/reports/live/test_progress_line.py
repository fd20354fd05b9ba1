"""A run that is followed in a terminal shows how far it is, below its log."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest

from mgpu_slurm.reports.live import progress_line
from mgpu_slurm.reports.live.progress_line import ProgressLine
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from tests.support import Project, wait_until

ERASE = "\r\x1b[K"


class Terminal:
    """A terminal, and what was written to it."""

    def __init__(self) -> None:
        self._reader, self.end = os.openpty()
        os.set_blocking(self._reader, False)
        self._text = ""

    def text(self) -> str:
        with suppress(BlockingIOError):
            while piece := os.read(self._reader, 1 << 16):
                self._text += piece.decode()
        return self._text

    def shown(self) -> str:
        """Return what stays on the screen."""
        return "\n".join(line.split(ERASE)[-1] for line in self.text().replace("\r\n", "\n").split("\n"))

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.end)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    found = Terminal()
    yield found
    found.close()


def test_line_is_erased_before_each_line_of_the_log(terminal: Terminal) -> None:
    with open(os.dup(terminal.end), "w") as stream, ProgressLine(stream) as screen:
        screen.draw("1/4")
        screen.draw("1/4")
        screen.write("first\n")
        # nothing is drawn behind a part of a line
        screen.write("sec")
        screen.draw("2/4")
        screen.write("ond\n")
        screen.draw("3/4")
    assert terminal.text() == f"\r1/4\x1b[K{ERASE}first\r\nsecond\r\n\r3/4\x1b[K{ERASE}"
    assert terminal.shown() == "first\nsecond\n"


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_nothing_is_drawn_if_the_terminal_cannot(
    name: str, value: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with open(os.dup(terminal.end), "w") as stream, ProgressLine(stream) as screen:
        screen.draw("1/4")
        screen.write("first\n")
    assert terminal.text() == "first\r\n"


def test_line_shows_progress_metrics_and_time_left() -> None:
    now = datetime.now(timezone.utc).isoformat()
    state = RunState(run="x", state="RUNNING", progress=3, total=12, step=180, metrics={"loss": 0.12345})
    known = {"total": 12, "pace": [61.5, 61.5], "reported": now}
    assert progress_line.of_run(state) == "[=====>              ] 3/12  step 180  loss 0.1235"
    shown = progress_line.of_run(RunState(run="x", state="RUNNING", progress=3, **known))
    assert re.fullmatch(r"\[=====>              \] 3/12  61\.5 s each  left 9m1\ds", shown)
    assert progress_line.of_run(RunState(run="x", state="RUNNING", step=7)) == "step 7"
    # a plain command reports nothing, and one in the queue is not there yet
    assert progress_line.of_run(RunState(run="x", state="RUNNING")) == ""
    assert progress_line.of_run(RunState(run="x", state="REQUEUED", progress=3, **known)) == ""


def test_bar_is_full_only_at_the_end() -> None:
    assert [progress_line.bar(done, 10).count("=") for done in (0, 1, 9, 10, 12)] == [0, 2, 18, 20, 20]
    assert {len(progress_line.bar(done, 7)) for done in range(9)} == {progress_line.WIDTH + 2}


def test_group_and_sweep_count_what_has_ended(tmp_path: Path) -> None:
    group = RunFolder(tmp_path / "group")
    runs = [RunState(run=f"group/{n}", state=state) for n, state in enumerate(["COMPLETED", "RUNNING", "PENDING"])]
    assert progress_line.of_group(group, runs) == "[======>             ] 1/3 runs  1 running"
    assert progress_line.of_group(group, runs[:1]) == ""
    sweep = RunFolder(tmp_path / "sweep")
    sweep.create()
    sweep.sweep.write_text("{}")
    sweep.summary.write_text('{"metric": "loss", "trials": {"COMPLETE": 3, "PRUNED": 2, "WAITING": 5}}')
    workers = [RunState(run="sweep/0", kind="worker", state="RUNNING")]
    assert progress_line.of_group(sweep, workers) == "[==========>         ] 5/10 trials  1 running"


WAITS = """
    import time
    from pathlib import Path

    def train(run, gate: str = ""):
        for epoch in run.restore().epochs(4):
            run.report(epoch, loss=1.0)
            while epoch == 1 and not Path(gate).exists():
                time.sleep(0.02)
"""


def test_followed_run_shows_it_below_its_log_until_the_end(project: Project, terminal: Terminal) -> None:
    project.write("waits.py", WAITS)
    gate = project.folder / "gate"
    folder = RunFolder(project.submit("waits.py", f"gate={gate}"))
    left = project.start("logs", folder.run, "--follow", stdout=terminal.end)
    wait_until(lambda: "[=====>              ] 1/4" in terminal.text())
    # an interrupted display leaves no line behind
    left.send_signal(signal.SIGINT)
    left.communicate(timeout=60)
    assert left.returncode == 130
    assert "1/4" not in terminal.shown()
    seen = len(terminal.shown())
    follower = project.start("logs", folder.run, "--follow", stdout=terminal.end)
    other = project.start("logs", folder.run, "--follow")
    wait_until(lambda: terminal.text().count("1/4") == 2)
    gate.touch()
    follower.communicate(timeout=60)
    assert follower.returncode == 0
    out, _ = other.communicate(timeout=60)
    assert records.read_state(folder).total == 4
    assert "\r" not in out
    # what stays on the screen is what another program reads
    assert terminal.shown()[seen:] == out
