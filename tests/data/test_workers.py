"""Busy workers of a loader: a stop of the run leaves them at work, and their rank ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import wait_until, with_long

SCRIPT = '''
import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children, forkserver, resource_tracker
from pathlib import Path

from torch.utils.data import Dataset

FOLDER = Path(sys.argv[1])
METHOD = sys.argv[2]


def note(what, text=""):
    (FOLDER / what).write_text(str(text))


def started_programs_end():
    """Also where the caller is a worker, which itself has SIGTERM blocked."""
    for options in ({}, {"preexec_fn": os.getpid}):
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], **options)
        program.terminate()
        assert program.wait() == -signal.SIGTERM
    child = os.fork()
    if not child:
        time.sleep(3600)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


class Slow(Dataset):
    """The second sample waits for the test, the third for ever."""

    def __init__(self, turn):
        self.turn = turn

    def __setstate__(self, state):
        """In a worker that is starting, and not one that is a copy of its rank."""
        vars(self).update(state)
        signals = {signal.SIGUSR2} if METHOD == "forkserver" else {signal.SIGUSR2, signal.SIGINT, signal.SIGTERM}
        for signum in signals:
            os.kill(os.getpid(), signum)
        note(f"starting-{self.turn}")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 0:
            started_programs_end()
        elif index == 1:
            note(f"busy-{self.turn}", os.getpid())
            while not (FOLDER / f"go-{self.turn}").exists():
                time.sleep(0.01)
        else:
            note(f"stuck-{self.turn}")
            time.sleep(3600)
        return os.getpid()


def set_up(worker):
    note("set-up", signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGTERM})


def helpers_of_python_outlive_a_lead_signal():
    for pid in (resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid):
        if pid is not None:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            assert int(status["SigBlk"], 16) >> (signal.SIGUSR2 - 1) & 1


def main():
    import mgpu_slurm

    run = mgpu_slurm.attach()
    for turn in range(2):
        data = run.loader(
            Slow(turn), batch_size=1, num_workers=1, multiprocessing_context=METHOD, worker_init_fn=set_up,
            persistent_workers=turn == 0,
        )
        for number, (worker,) in enumerate(data):
            helpers_of_python_outlive_a_lead_signal()
            if number == 1:
                while not (FOLDER / f"stuck-{turn}").exists():
                    time.sleep(0.01)
                break
        if turn == 1:
            raise ValueError("the rank fails")
        del data
        # torch 2.6 leaves it to others to wait for the end of a worker that it has terminated
        for child in active_children():
            child.join(10)
        assert not Path(f"/proc/{worker}").exists()
        note("left")


if __name__ == "__main__":
    main()
'''

METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """The folder, exit code and errors of each; all at once, as torch waits some seconds for a worker that is busy."""
    base = tmp_path_factory.mktemp("workers")
    script = base / "slow.py"
    script.write_text(SCRIPT)
    environ = os.environ | {"MGPU_RUNS": str(base / "runs")}
    started = {}
    for method in METHODS:
        (base / method).mkdir()
        command = [sys.executable, str(script), str(base / method), method]
        started[method] = subprocess.Popen(command, text=True, env=environ, stderr=subprocess.PIPE)
    for turn in range(2):
        for method, process in started.items():
            busy = base / method / f"busy-{turn}"
            wait_until(lambda process=process, busy=busy: process.poll() is not None or _has_text(busy))
            if process.poll() is None:
                stop(int(busy.read_text()))
            (base / method / f"go-{turn}").touch()
    errors = {method: process.communicate(timeout=60)[1] for method, process in started.items()}
    return {method: (base / method, process.returncode, errors[method]) for method, process in started.items()}


def _has_text(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


def stop(worker: int) -> None:
    """As SLURM stops a step: all of its processes get it, and who sends it is not the rank."""
    for _ in range(3):
        os.kill(worker, signal.SIGTERM)


@pytest.mark.parametrize("method", with_long(METHODS, METHODS[:1]))
def test_busy_worker_survives_sigterm_and_ends_with_its_rank(
    method: str, ended: dict[str, tuple[Path, int, str]]
) -> None:
    folder, code, said = ended[method]
    assert said.endswith("ValueError: the rank fails\n"), said
    assert code == 1
    assert "DataLoader worker" not in said
    assert (folder / "set-up").exists(), "the user's own worker_init_fn was not called"
    assert (folder / "set-up").read_text() == "True", "a worker has other signals blocked than SIGTERM"
    assert (folder / "starting-1").exists() == (method != "fork")
    assert (folder / "left").exists(), "a worker outlived its loader"
