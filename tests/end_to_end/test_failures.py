"""Whatever goes wrong, a run ends soon, says why, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, log, processes_of, wait_until

FAILS = """
    import os, signal, subprocess, sys, time
    from pathlib import Path

    def raises(run, config):
        if run.rank == 1:
            raise RuntimeError("the data is broken")
        run.mean(1, 1)

    def killed(run, config):
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.mean(1, 1)

    def lonely_report(run, config):
        if run.is_main:
            run.report(1, loss=0.0)
        run.mean(1, 1)

    def lonely_report_in_training(run, config):
        import torch
        from torch.utils.data import TensorDataset

        model = run.wrap(torch.nn.Linear(2, 1))
        for (batch,) in run.loader(TensorDataset(torch.randn(16, 2)), batch_size=4):
            run.backward(model(batch).mean())
            if run.is_main:
                run.report(1, loss=0.0)

    def lonely_report_at_the_end(run, config):
        if run.is_main:
            run.report(1, loss=0.0)

    def sleeps(run, config):
        # a daemon of the user's own, in a session of its own
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(run.folder, f"asleep-{run.rank}").touch()
        time.sleep(600)
"""


@pytest.fixture
def failing(project: Project) -> Project:
    project.write("fails.py", FAILS)
    return project


def test_exception_on_one_rank_fails_the_run_and_shows_its_traceback(failing: Project) -> None:
    done = failing.call("submit", "fails:raises", "--nodes", "2", "--executor", "local")
    assert done.returncode == 1
    assert "-- rank 1 on local2 failed first:" in done.stdout
    assert done.stdout.index("RuntimeError: the data is broken") < done.stdout.index("FAILED")
    (facts,) = failing.json("status")
    assert facts["state"] == "FAILED"
    assert facts["reason"] == "rank 1 on local2: RuntimeError: the data is broken"
    assert "the data is broken" in log(failing.runs / facts["run"], 1)


BLOCKED = """
    import atexit
    import sys
    import threading
    from pathlib import Path

    import torch.distributed as dist


    def block(run):
        \"""Whatever may hold a rank on its way out: a thread, and a group that waits for ranks that do not come.\"""

        def destroy(*group):
            # failed ranks tell why before anything else
            told = any(run.folder.glob(f"logs/*-{run.rank}.failure.json"))
            Path(run.folder, f"destroys-{run.rank}").write_text(f"told {told}")
            threading.Event().wait()

        dist.destroy_process_group = destroy
        if run.rank == 1:
            threading.Timer(3600, print).start()


    def train(run, config):
        block(run)
        if run.rank == 1:
            raise ValueError("rank 1 fails")
        run.mean(1, 1)


    def threaded(run, config):
        atexit.register(lambda: Path(run.folder, "atexit").touch())
        threading.Timer(2.0, Path(run.folder, "thread").touch).start()


    if __name__ == "__main__":
        from mgpu_slurm import attach

        train(attach(), {})
"""


@pytest.mark.parametrize("way", ["function", "attached script"])
def test_failed_rank_exits_despite_blocked_threads_and_process_group(way: str, project: Project) -> None:
    project.write("blocked.py", BLOCKED)
    words = ["blocked.py"] if way == "function" else ["--", "python", "blocked.py"]
    folder, facts = project.run("--nodes", "2", "--stuck-after", "0", *words)
    assert facts["state"] == "FAILED"
    assert "rank 1" in facts["reason"]
    assert "ValueError: rank 1 fails" in facts["reason"]
    if way == "function":
        assert (folder / "destroys-1").read_text() == "told True"


DISCONNECTED = """
    import os, socket, time
    from torch.utils.data import TensorDataset
    import torch

    def break_connections(port):
        for name in os.listdir("/proc/self/fd"):
            try:
                connection = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue
            with connection:
                try:
                    if connection.getpeername()[1] == port:
                        connection.shutdown(socket.SHUT_RDWR)
                except (OSError, TypeError, IndexError):
                    pass

    def train(run, config):
        if run.attempt == 1 and run.rank == 1:
            break_connections(int(os.environ["MASTER_PORT"]))
        data = run.loader(TensorDataset(torch.ones(10**6 if run.attempt == 1 else 10, 1)), batch_size=1)
        for _ in data:
            time.sleep(0.01)
"""


def test_rank_that_loses_the_rendezvous_exits_and_the_run_restarts(project: Project) -> None:
    """If it kept training, it would not receive requests to save or stop."""
    project.write("disconnected.py", DISCONNECTED)
    folder, facts = project.run("--nodes", "2", "--stuck-after", "0", "disconnected.py")
    assert facts["state"] == "COMPLETED"
    assert facts["attempts"] == 2
    assert "thread 'boundaries' of this process failed" in log(folder, 1)
    (retried,) = [event for event in records.events(RunFolder(folder)) if event.event == "retried"]
    # by whether the thread waited already as it broke, and by the version of torch
    ends = "Connection was likely closed|Connection reset|Broken pipe|failed to recv, got 0 bytes"
    assert re.search(f"DistNetworkError: .*({ends})", retried.why)


def test_successful_rank_waits_for_threads_and_exit_handlers(project: Project) -> None:
    project.write("blocked.py", BLOCKED)
    folder, facts = project.run("blocked.py:threaded")
    assert facts["state"] == "COMPLETED"
    assert (folder / "thread").exists()
    assert (folder / "atexit").exists()


def test_failed_script_shows_the_log_tail_of_the_first_failed_rank(project: Project) -> None:
    project.write("script.py", 'import os\nif os.environ["RANK"] == "1":\n    raise ValueError("crash on one")\n')
    done = project.call("submit", "--executor", "local", "--nodes", "2", "--", "python", "script.py")
    assert done.returncode == 1
    assert "-- rank 1 failed first; the end of its log:\nTraceback" in done.stdout
    (facts,) = project.json("status")
    assert facts["reason"] == "rank 1 ended with exit code 1: ValueError: crash on one"


def test_killed_rank_ends_the_other_ranks_within_seconds(failing: Project) -> None:
    folder, facts = failing.run("fails:killed", "--nodes", "2", "--retries", "0")
    assert facts["state"] == "FAILED"
    assert facts["reason"] == "rank 1 was killed by SIGKILL"
    wait_until(lambda: processes_of(folder) == [], seconds=20)


@pytest.mark.parametrize(
    ("function", "place"),
    [
        ("lonely_report", "rank 1 at run.mean()"),
        ("lonely_report_in_training", "rank 1 at the next batch of a loader"),
        ("lonely_report_at_the_end", "rank 1 at the end of the job function"),
    ],
)
def test_report_on_one_rank_only_is_an_error_that_names_both_ranks(failing: Project, function: str, place: str) -> None:
    folder, facts = failing.run(f"fails:{function}", "--nodes", "2")
    assert facts["state"] == "FAILED"
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["error"] == "CollectiveMismatch"
    assert "rank 0 at run.report()" in failure["message"]
    assert place in failure["message"]


def test_killed_supervisor_fails_the_run_and_leaves_no_process(failing: Project) -> None:
    folder = failing.submit("fails:sleeps", "--nodes", "2")
    wait_until(lambda: (folder / "asleep-0").exists() and (folder / "asleep-1").exists())
    # 2 ranks with a daemon each, and the batch step
    assert len(processes_of(folder)) >= 4
    supervisor = int(json.loads((folder / "state.json").read_text())["job_id"])
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: processes_of(folder) == [])
    facts = failing.finish(folder)
    assert facts["state"] == "FAILED"
    assert "supervisor" in facts["reason"]


def test_cancel_ends_unresponsive_ranks_and_their_children(failing: Project) -> None:
    failing.write("mgpu.yaml", "clusters: {local: {kill-wait: 1}}\n")
    folder = failing.submit("fails:sleeps", "--nodes", "2")
    wait_until(lambda: (folder / "asleep-0").exists() and (folder / "asleep-1").exists())
    assert failing.call("cancel", folder.name).returncode == 0
    assert failing.finish(folder)["state"] == "CANCELLED"
    wait_until(lambda: processes_of(folder) == [], seconds=20)
    assert "already ended" in failing.call("cancel", folder.name).stdout


STUBBORN = """
    import signal, sys, time

    def note(signum, frame):
        print(signal.Signals(signum).name, flush=True)

    signal.signal(signal.SIGUSR2, note)
    signal.signal(signal.SIGTERM, note)
    print("ready", flush=True)
    while True:
        time.sleep(600)
"""


def test_cancel_right_after_submission_is_recorded_as_cancelled(failing: Project) -> None:
    """The supervisor is still importing torch then, and no rank has started that could receive it."""
    failing.write("mgpu.yaml", "clusters: {local: {kill-wait: 1}}\n")
    failing.submit("fails:sleeps", "--nodes", "2")
    # the second submission of the same code waits for no import
    folder = failing.submit("fails:sleeps", "--nodes", "2")
    assert failing.call("cancel", folder.name).returncode == 0
    facts = failing.finish(folder)
    assert (facts["state"], facts["reason"]) == ("CANCELLED", "cancelled")
    failing.call("cancel", *(path.name for path in failing.runs.iterdir()))


def test_cancel_right_after_resume_is_recorded_as_cancelled(project: Project) -> None:
    """The supervisor's Python is still starting then."""
    gate = project.folder / "gate"
    folder, _ = project.run("--", "sh", "-c", f"test -e {gate} && exec sleep 600")
    gate.touch()
    does = "import sys; from mgpu_slurm import runs; (run,) = runs(); run.resume(); run.cancel(); print(run.wait())"
    command = [sys.executable, "-c", does]
    environ = os.environ | project.environ
    said = subprocess.run(command, cwd=project.folder, env=environ, capture_output=True, text=True, check=False)
    assert said.stdout == "CANCELLED\n", said.stderr
    assert project.json("status", folder.name)[0]["reason"] == "cancelled"


def test_wait_timeout_has_its_own_exit_code(project: Project) -> None:
    folder = project.submit("--", "sleep", "600")
    waited = project.call("wait", folder.name, "--timeout", "0.1")
    assert waited.returncode == 124
    assert waited.stderr == f"mgpu-slurm: timed out after 0.1 s; still running: {folder.name}\n"
    project.call("cancel", folder.name)


def test_time_limit_sends_lead_signal_then_sigterm_then_sigkill(failing: Project) -> None:
    failing.write("mgpu.yaml", "clusters: {local: {kill-wait: 1}}\n")
    failing.write("stubborn.py", STUBBORN)
    folder, facts = failing.run("--time", "0:04", "--signal", "USR2@1", "--", "python", "stubborn.py")
    assert facts["state"] == "TIMEOUT"
    assert "time limit of 4 s" in facts["reason"]
    assert log(folder, 0).split() == ["ready", "SIGUSR2", "SIGTERM"]
    assert json.loads((folder / "failure.json").read_text())["message"] == "rank 0 was killed by SIGKILL"
    wait_until(lambda: processes_of(folder) == [], seconds=20)


def test_retry_near_the_time_limit_gets_the_full_time_limit(project: Project) -> None:
    """The lead signal was due during the five seconds before the retry."""
    script = "[ $MGPU_ATTEMPT -ge 3 ] || kill -9 $$; sleep 2; echo through"
    folder, facts = project.run("--time", "0:06", "--signal", "USR2@2", "--", "sh", "-c", script)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 3)
    assert log(folder, 0, 3) == "through\n"


def test_exit_code_75_restarts_a_command(project: Project) -> None:
    folder, facts = project.run("--", "sh", "-c", "echo try $MGPU_ATTEMPT; test $SLURM_RESTART_COUNT -ge 2 || exit 75")
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 3)
    assert [log(folder, 0, attempt) for attempt in (1, 2, 3)] == ["try 1\n", "try 2\n", "try 3\n"]


def test_missing_program_is_named_in_the_log(project: Project) -> None:
    # which program a run of a group starts is known in the run only
    group = project.submit("--seeds", "1", "--", "no-such-program-{seed}")
    assert project.call("wait", group.name, "--timeout", "90").returncode == 1
    assert "'no-such-program-0' is not on PATH" in log(group / "tasks" / "0", 0)


def test_supervisor_with_threads_starts_ranks_in_new_interpreters(project: Project) -> None:
    """Some libraries start threads on import; a fork would copy their locks in whatever state they are."""
    project.write(
        "site/sitecustomize.py",
        """
        import sys, threading

        if "supervisor" in sys.orig_argv:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        """,
    )
    project.write(
        "job.py",
        """
        import sys

        def train(run, config):
            print("rank" in sys.orig_argv)
            return run.mean(run.rank, 1)
        """,
    )
    project.environ["PYTHONPATH"] = str(project.folder / "site")
    folder, facts = project.run("job", "--nodes", "2")
    assert facts["state"] == "COMPLETED"
    assert json.loads((folder / "result.json").read_text())["result"] == {"value": 0.5}
    assert log(folder, 1) == "True\n"
