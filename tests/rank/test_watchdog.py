"""The thread that sees whether a rank comes on, in processes of their own: it ends them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mgpu_slurm.core.files import write_json
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.watchdog import Watchdog
from tests.support import wait_until

SCRIPT = """
import sys, threading, time
from pathlib import Path
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.watchdog import Watchdog

folder = Path(sys.argv[1])
facts = RankInfo(node_name="n1")
watchdog = Watchdog({seconds}, facts, folder / "record.json", {stacks})
watchdog.watch(lambda: 7)
watchdog.alive()
(folder / "ready").touch()
{body}
# as a run does at its end, which takes a while on a busy machine
watchdog.rest()
"""


def started(folder: Path, seconds: float, body: str, stacks: str = "None") -> subprocess.Popen[str]:
    script = SCRIPT.format(seconds=seconds, body=body, stacks=stacks)
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)


def test_stuck_process_reports_its_stack_and_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, 0.5, "threading.Event().wait()")
    told, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert re.match(r"mgpu_slurm: stuck: no progress for \d s since step 7: it is at <string>:13 in <module>;", told)
    assert "Current thread" in told
    assert '"consequence": false' in (tmp_path / "record.json").read_text()


def test_rank_that_may_be_silent_for_longer_ends_with_the_first_stuck_one(tmp_path: Path) -> None:
    watchdog = Watchdog(5.0, RankInfo(rank=10, world_size=11), tmp_path / "1-10.failure.json")
    assert not watchdog.is_stuck(silent=6.0, longest=4.0)
    # of another attempt, of another kind
    write_json(tmp_path / "2-1.failure.json", {"error": "Stuck"})
    write_json(tmp_path / "1-2.failure.json", {"error": "ValueError"})
    assert not watchdog.is_stuck(silent=6.0, longest=4.0)
    write_json(tmp_path / "1-1.failure.json", {"error": "Stuck"})
    assert watchdog.is_stuck(silent=6.0, longest=4.0)
    assert not watchdog.is_stuck(silent=2.0, longest=4.0)


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(20):\n    time.sleep(0.1)\n    watchdog.alive()",
        "watchdog.rest()\ntime.sleep(2)",
    ],
    ids=["makes progress", "no longer watched"],
)
def test_process_that_is_not_stuck_is_left_alone(tmp_path: Path, body: str) -> None:
    process = started(tmp_path, 1.0, body)
    assert process.communicate() == ("", None)
    assert process.returncode == 0


def test_suspended_process_is_not_stuck(tmp_path: Path) -> None:
    """As SLURM does with a whole job."""
    process = started(tmp_path, 2.0, "time.sleep(1)")
    wait_until(lambda: (tmp_path / "ready").exists())
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate() == ("", None)
    assert process.returncode == 0


def test_stack_is_shown_while_c_code_holds_the_gil(tmp_path: Path) -> None:
    script = SCRIPT.format(seconds=0.5, stacks="None", body='import re\nre.match("(a+)+$", 40 * "a" + "b")')
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # else the lines of one that shows nothing would never end
    last = threading.Timer(60, process.kill)
    last.start()
    with process:
        # by a timer of the system; none of its own threads can run
        assert any(line.startswith('  File "<string>", line 14') for line in process.stderr)
        process.kill()
    last.cancel()


def test_shown_stack_is_cleared_after_progress_resumes(tmp_path: Path) -> None:
    shown, gate = tmp_path / "stacks", tmp_path / "gate"
    os.mkfifo(gate)
    body = f"""
import ctypes, os
# of C, and it keeps the interpreter's lock
ctypes.PyDLL(None).read(os.open({str(gate)!r}, os.O_RDWR), ctypes.create_string_buffer(1), 1)
while Path({str(shown)!r}).stat().st_size:
    time.sleep(0.05)
    watchdog.alive()
print("comes on")
"""
    with started(tmp_path, 0.5, body, stacks=f"Path({str(shown)!r})") as process:
        wait_until(lambda: shown.exists() and "Current thread" in shown.read_text())
        gate.write_text(".")
        assert process.communicate() == ("comes on\n", None)
    assert process.returncode == 0


def test_slow_start_is_not_stuck_and_children_show_no_stack(tmp_path: Path) -> None:
    shown = tmp_path / "stacks"
    # of C, and it keeps the interpreter's lock for longer than a busy machine would
    stalls = "import ctypes; ctypes.PyDLL(None).usleep(1_500_000)"
    # Python 3.12 and later warn of the fork
    body = f"""
import os, warnings
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    watchdog.alive()
    time.sleep(2)
    os._exit(Path({str(shown)!r}).exists())
{stalls}
time.sleep(2)
assert os.waitpid(child, 0)[1] == 0
print(Path({str(shown)!r}).exists())
"""
    script = SCRIPT.replace("watchdog.alive()\n", "", 1)
    command = [sys.executable, "-c", script.format(seconds=0.5, stacks=f"Path({str(shown)!r})", body=body)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)


def test_forked_child_exits(tmp_path: Path) -> None:
    body = "import os\nchild = os.fork()\nif child: sys.exit(os.waitpid(child, 0)[1])"
    process = started(tmp_path, 60.0, body)
    assert process.communicate() == ("", None)
    assert process.returncode == 0
