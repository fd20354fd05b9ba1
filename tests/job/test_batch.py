"""The batch step with a stand-in for srun that starts real ranks and, as srun does, ends them all when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import processes
from mgpu_slurm.core.files import read_json
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import sbatch
from mgpu_slurm.trackers import outcome
from tests.support import processes_of, wait_until
from tests.web_hook import web_hook

SRUN = """
import os, signal, subprocess, sys
command = sys.argv[1:]
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
signal.signal(signal.SIGTERM, lambda *_: None)
step = {"SLURM_STEP_NODELIST": f"n[1-{nodes}]", "SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})"}
alive = {}
for rank in range(nodes):
    place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURMD_NODENAME": f"n{rank + 1}"}
    alive[subprocess.Popen(command, env=os.environ | step | place, start_new_session=True).pid] = rank
highest = 0
while alive:
    pid, status = os.wait()
    rank, code = alive.pop(pid), os.waitstatus_to_exitcode(status)
    if code:
        how = os.environ.get("SRUN_SAYS") or (signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}")
        print(f"srun: error: n{rank + 1}: task {rank}: {how}", file=sys.stderr, flush=True)
        for other in alive:
            os.killpg(other, signal.SIGTERM)
    highest = max(highest, 128 - code if code < 0 else code)
sys.exit(highest)
"""

StartBatch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "try")
    folder.create()
    folder.code.mkdir()
    return folder


@pytest.fixture
def scontrol(tmp_path: Path) -> Path:
    """A scontrol that notes what it was asked to change; its path."""
    path = tmp_path / "bin" / "scontrol"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\n[ "$1" = show ] || echo "$@" >> {path}.calls\n')
    path.chmod(0o755)
    # no step is left
    squeue = path.with_name("squeue")
    squeue.write_text("#!/bin/sh\n")
    squeue.chmod(0o755)
    return path


@pytest.fixture
def start_batch(folder: RunFolder, tmp_path: Path, scontrol: Path) -> StartBatch:
    """Starts the batch step of job 9 as its batch script would, with its output in the launch log."""
    srun = tmp_path / "srun.py"
    srun.write_text(SRUN)

    def start(target: Target, nodes: int = 2, **options: Any) -> subprocess.Popen[str]:
        Spec("try", target, "slurm", Resources(nodes=nodes), python=sys.executable, **options).write(folder)
        command = [sys.executable, "-m", "mgpu_slurm.job", "batch", str(folder.path), "--token", "mgpu-1", "--"]
        command += [sys.executable, str(srun), sys.executable, "-m", "mgpu_slurm.job", "rank", str(folder.path)]
        slurm = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": f"n[1-{nodes}]", "SLURM_JOB_NUM_NODES": str(nodes)}
        path = f"{scontrol.parent}:{os.environ['PATH']}"
        with open(folder.launch_log("9"), "a") as log:
            return subprocess.Popen(command, env=os.environ | slurm | {"PATH": path}, stdout=log, stderr=log, text=True)

    return start


def shell(script: str) -> Target:
    return Target(command=("sh", "-c", script))


def test_rank_that_asks_for_a_restart_lets_the_others_save(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path
) -> None:
    # rank 0 still saves when rank 1 has left
    saves = (
        f"if [ $RANK = 1 ]; then exit 75; fi; until [ -e {folder.requeue_request(1)} ]; do :; done; echo saved; exit 75"
    )
    assert start_batch(shell(saves)).wait() == 75
    assert folder.rank_log(1, 0).read_text() == "saved\n"
    assert Path(f"{scontrol}.calls").read_text() == "requeue 9\n"
    assert records.read_state(folder).state == "REQUEUED"
    assert [event.event for event in records.events(folder)] == ["started", "ended", "requeued"]
    assert not folder.failure.exists()


def test_abort_at_interpreter_exit_does_not_fail_the_job(
    folder: RunFolder, start_batch: StartBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a thread that is still inside torch may abort then."""
    customized = tmp_path / "customized"
    customized.mkdir()
    (customized / "sitecustomize.py").write_text(
        'import atexit, os, sys\natexit.register(lambda: "--token" in sys.argv and os.abort())\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(customized), prepend=":")
    assert start_batch(shell("echo here")).wait() == 0
    assert records.read_state(folder).state == "COMPLETED"


def test_run_without_requeues_left_ends_as_timeout(folder: RunFolder, start_batch: StartBatch, scontrol: Path) -> None:
    # those of the job that was resumed do not count, and neither does a preemption
    for token in ("mgpu-0", "mgpu-0", "mgpu-1"):
        records.record_event(folder, "requeued", token=token)
    assert start_batch(shell("exit 75"), max_requeues=1).wait() == 75
    state = records.read_state(folder)
    assert state.state == "TIMEOUT"
    assert "--max-requeues 1" in state.reason
    assert not Path(f"{scontrol}.calls").exists()


@pytest.mark.parametrize("saves", [True, False])
def test_two_time_limits_without_a_newer_checkpoint_end_the_run(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path, saves: bool
) -> None:
    squeue = scontrol.with_name("squeue")

    def attempt(left: str) -> str:
        squeue.write_text(f"#!/bin/sh\necho {left}\n")
        save = f"mkdir -p {folder.checkpoint(1)}; " if saves else ""
        assert start_batch(shell(f"{save}exit 75"), nodes=1, lead=60).wait() == 75
        return str(records.read_state(folder).state)

    # the first saves; the third leaves for another reason, such as a preemption
    assert [attempt(left) for left in ("0:45", "0:45", "5:00")] == ["REQUEUED"] * 3
    # a command that saves nothing here may save elsewhere
    assert attempt("0:45") == ("TIMEOUT" if saves else "REQUEUED")
    if saves:
        reason = "two attempts in a row reached the time limit without a newer checkpoint than step-000000001"
        assert records.read_state(folder).reason == reason


def test_refused_requeue_and_submission_are_quoted_in_the_reason(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path
) -> None:
    scontrol.write_text("#!/bin/sh\necho 'Requested operation is presently disabled for job 9' >&2; exit 1\n")
    sbatch = scontrol.with_name("sbatch")
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: submissions from nodes are not allowed' >&2; exit 1\n")
    sbatch.chmod(0o755)
    assert start_batch(shell("exit 75")).wait() == 75
    state = records.read_state(folder)
    assert state.state == "TIMEOUT"
    assert "Requested operation is presently disabled" in state.reason
    assert "submissions from nodes are not allowed" in state.reason
    assert state.reason.endswith("continue with `resume`")


def test_cancel_during_requeue_ends_the_run(folder: RunFolder, start_batch: StartBatch, scontrol: Path) -> None:
    """SLURM requeues a job even if it was cancelled a moment before."""
    scontrol.write_text(f"#!/bin/sh\ntouch {folder.cancel_request}\n")
    scancel = scontrol.with_name("scancel")
    scancel.write_text(f'#!/bin/sh\necho "$@" >> {scancel}.calls\nexit 1\n')
    scancel.chmod(0o755)
    assert start_batch(shell("exit 75")).wait() == 75
    assert Path(f"{scancel}.calls").read_text() == "9\n"
    # it could not be cancelled, and starts once more
    assert start_batch(shell("echo here")).wait() == 143
    state = records.read_state(folder)
    assert (state.state, state.reason, state.attempts) == ("CANCELLED", "cancelled", 1)


def test_second_job_of_a_submission_leaves_the_run_unchanged(folder: RunFolder, start_batch: StartBatch) -> None:
    sbatch.claim(folder, "mgpu-1", "8")
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert start_batch(shell("echo here")).wait() == 0
    after = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    log = folder.launch_log("9")
    assert after.pop(log).decode() == "mgpu_slurm: run try belongs to job 8: job 9 has nothing to do\n"
    del after[folder.spec]
    assert after == before


@pytest.mark.parametrize("code", [0, 3, 75])
def test_abandoned_attempt_does_not_change_the_state_of_the_next(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path, code: int
) -> None:
    """SLURM has lost its node and restarted the run, while the node keeps running."""
    gate = folder.path / "gate"
    batch = start_batch(shell(f"echo here; until [ -e {gate} ]; do sleep 0.01; done; exit {code}"), nodes=1)
    wait_until(lambda: folder.rank_log(1, 0).exists())
    records.record_event(folder, "started", attempt=2, job_id="9", nodes=["n2"])
    records.update_state(folder, attempts=2)
    gate.touch()
    assert batch.wait() == code
    state = records.read_state(folder)
    assert (state.state, state.reason) == ("RUNNING", "")
    assert not folder.failure.exists()
    assert not Path(f"{scontrol}.calls").exists()


def rank_1_is_killed(folder: RunFolder, attempts: int) -> Target:
    """A command whose rank 1 is killed in the first attempts, when rank 0 has started: before, the signal that ends
    rank 0 then would be its end too."""
    here = f"{folder.path}/here-$MGPU_ATTEMPT"
    return shell(
        f"if [ $MGPU_ATTEMPT -gt {attempts} ]; then echo on; exit; fi;"
        f" if [ $RANK = 1 ]; then until [ -e {here} ]; do sleep 0.01; done; kill -9 $$; fi; touch {here}; sleep 600"
    )


def test_killed_rank_is_retried_in_the_same_job(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with web_hook() as (address, posted):
        assert start_batch(rank_1_is_killed(folder, attempts=1), notify=address).wait() == 0
    # only the end of the run is posted
    assert [(each["run"], each["state"], each["attempts"]) for each in posted] == [("try", "COMPLETED", 2)]
    assert [event.event for event in records.events(folder)] == ["started", "ended", "retried", "started", "ended"]
    state = records.read_state(folder)
    assert (state.state, state.reason, state.attempts, state.job_id) == ("COMPLETED", "", 2, "9")
    assert folder.rank_log(2, 1).read_text() == "on\n"
    assert not folder.failure.exists()
    assert not Path(f"{scontrol}.calls").exists()


def test_node_that_kills_ranks_twice_is_excluded_on_requeue(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path
) -> None:
    sbatch = scontrol.with_name("sbatch")
    sbatch.write_text(
        f'#!/bin/sh\necho "$@" >> {sbatch}.calls\n'
        "echo 'sbatch: Job 10 to start at 2030-01-01T00:00:00 using 2 processors on nodes n[3-4] in partition batch'\n"
    )
    sbatch.chmod(0o755)
    assert start_batch(rank_1_is_killed(folder, attempts=2)).wait() == 75
    assert Path(f"{scontrol}.calls").read_text().splitlines() == ["requeue 9", "update JobId=9 ExcNodeList=n2"]
    assert "--test-only --exclude=n2" in Path(f"{sbatch}.calls").read_text()
    state = records.read_state(folder)
    assert (state.state, state.attempts) == ("REQUEUED", 2)
    assert state.reason.startswith("restarting (2 of 3): rank 1 on n2")


def test_run_without_another_node_retries_in_its_job_and_then_fails(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path
) -> None:
    sbatch = scontrol.with_name("sbatch")
    sbatch.write_text(
        "#!/bin/sh\necho 'allocation failure: Requested node configuration is not available' >&2; exit 1\n"
    )
    sbatch.chmod(0o755)
    assert start_batch(rank_1_is_killed(folder, attempts=3), retries=2).wait() == 137
    assert not Path(f"{scontrol}.calls").exists()
    state = records.read_state(folder)
    assert (state.state, state.attempts) == ("FAILED", 3)


def test_sigterm_between_attempts_prevents_the_next_attempt(folder: RunFolder, start_batch: StartBatch) -> None:
    batch = start_batch(shell("kill -9 $$"), nodes=1)
    # the second failure in a row makes it wait
    wait_until(lambda: sum(event.event == "retried" for event in records.events(folder)) == 2)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait() == 143
    assert records.read_state(folder).attempts == 2


def test_cancel_before_the_first_failure_prevents_a_retry(folder: RunFolder, start_batch: StartBatch) -> None:
    batch = start_batch(shell(f"touch {folder.cancel_request}; kill -9 $$"), nodes=1)
    assert batch.wait() == 143
    state = records.read_state(folder)
    assert (state.state, state.reason, state.attempts) == ("CANCELLED", "cancelled", 1)


@pytest.mark.parametrize(("left", "attempts"), [("0:45", 1), ("1:03", 2)])
def test_retry_near_the_time_limit_becomes_a_requeue(
    folder: RunFolder, start_batch: StartBatch, scontrol: Path, left: str, attempts: int
) -> None:
    """New ranks would not be warned of the limit. There is a pause before a second attempt that starts from the same
    step as the first."""
    scontrol.with_name("squeue").write_text(f"#!/bin/sh\necho {left}\n")
    assert start_batch(rank_1_is_killed(folder, attempts=2), lead=60).wait() == 75
    # the node that has killed twice is left for others
    calls = ["requeue 9", "update JobId=9 ExcNodeList=n2"]
    assert Path(f"{scontrol}.calls").read_text().splitlines() == calls[:attempts]
    assert [event.event for event in records.events(folder)] == ["started", "ended", "retried"] * attempts


def test_srun_that_cannot_confirm_its_job_is_started_again(
    folder: RunFolder, start_batch: StartBatch, tmp_path: Path
) -> None:
    """As with a step manager that is not there yet, on SLURM 24.11."""
    fails_once = f"""
import pathlib, sys
try:
    pathlib.Path({str(tmp_path / "failed")!r}).touch(exist_ok=False)
    sys.exit("srun: error: Unable to confirm allocation for job 9: Unspecified error")
except FileExistsError:
    pass
"""
    (tmp_path / "srun.py").write_text(fails_once + SRUN)
    assert start_batch(shell("echo here")).wait() == 0
    assert [event.event for event in records.events(folder)] == ["started", "ended", "retried", "started", "ended"]
    assert folder.rank_log(2, 0).read_text() == "here\n"


def test_run_is_not_retried_if_squeue_fails(folder: RunFolder, start_batch: StartBatch, scontrol: Path) -> None:
    scontrol.with_name("squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Access denied' >&2; exit 1\n")
    assert start_batch(rank_1_is_killed(folder, attempts=1)).wait() == 137
    state = records.read_state(folder)
    assert (state.state, state.attempts) == ("FAILED", 1)
    assert "rank 1 on n2" in state.reason
    assert "it was not restarted:" in state.reason


@pytest.mark.parametrize(
    ("end", "how"), [("kill -9 $$", "was killed by SIGKILL"), ("exit 4", "ended with exit code 4: last words")]
)
def test_first_failed_rank_is_named_whatever_srun_reports(
    folder: RunFolder, start_batch: StartBatch, end: str, how: str
) -> None:
    """The other rank, which srun ends by SIGTERM, has the higher exit code."""
    folder.failure.write_text('{"message": "of the attempt before"}')
    start_batch(shell(f"if [ $RANK = 1 ]; then echo last words; {end}; fi; sleep 600"), retries=0).wait()
    state = records.read_state(folder)
    assert (state.state, state.reason) == ("FAILED", f"rank 1 on n2 {how}")


def test_rank_out_of_memory_gives_the_out_of_memory_state(
    folder: RunFolder, start_batch: StartBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRUN_SAYS", "Out Of Memory")
    start_batch(shell("kill -KILL $$"), nodes=1).wait()
    state = records.read_state(folder)
    assert (state.state, state.reason) == ("OUT_OF_MEMORY", "rank 0 on n1: Out Of Memory")


@pytest.mark.parametrize("code", [0, 1])
def test_state_of_a_job_ended_by_slurm_is_left_to_slurm(folder: RunFolder, start_batch: StartBatch, code: int) -> None:
    batch = start_batch(shell(f"trap 'exit {code}' TERM; echo ready; while true; do sleep 1 & wait; done"))
    logs = [folder.rank_log(1, rank) for rank in (0, 1)]
    wait_until(lambda: all(log.exists() and log.read_text() for log in logs))
    # SLURM signals the batch step and every process of the ranks
    batch.send_signal(signal.SIGTERM)
    for pid in processes_of(folder.path):
        # the signal before may have ended it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert batch.wait() == code
    assert records.read_state(folder).state == "RUNNING"


def test_ranks_terminated_by_someone_else_count_as_failed(folder: RunFolder, start_batch: StartBatch) -> None:
    assert start_batch(shell("kill -TERM $$")).wait() == 143
    assert records.read_state(folder).state == "FAILED"


def test_lead_signal_at_interpreter_exit_keeps_the_run_completed(folder: RunFolder, start_batch: StartBatch) -> None:
    (folder.code / "late.py").write_text(
        "import os, signal\n\n\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGUSR2):\n"
        "        kill(pid, signum)\n\n\n"
        "late = Late()\n\n\n"
        "def train(run, config):\n"
        "    return 1.0\n"
    )
    assert start_batch(Target(function="late:train"), nodes=1).wait() == 0
    assert records.read_state(folder).state == "COMPLETED"
    result = read_json(folder.result)
    assert result is not None
    assert result["result"] == {"value": 1.0}


REPORT = '{"progress": 1, "step": 3, "time": "2026-11-01T12:00:00.000+00:00", "attempt": 1, "metrics": {"loss": 0.5}}'


def test_trackers_have_all_reports_when_the_job_of_a_completed_run_ends(
    folder: RunFolder, start_batch: StartBatch, mlflow_file: Path
) -> None:
    sink = f"mlflow=sqlite:///{mlflow_file}#project"
    assert start_batch(shell(f"echo '{REPORT}' > {folder.metrics}"), nodes=1, sinks=(sink,)).wait() == 0
    assert [(sent.reports, sent.problem) for sent in outcome.read_sent(folder)] == [(1, "")]
    assert f"mgpu_slurm: mlflow    sqlite:///{mlflow_file} (run " in folder.launch_log("9").read_text()


def test_a_run_has_ended_before_its_job_waits_for_trackers(folder: RunFolder, start_batch: StartBatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sink = f"mlflow=http://127.0.0.1:{server.getsockname()[1]}#project"
        batch = start_batch(shell(f"echo '{REPORT}' > {folder.metrics}"), nodes=1, sinks=(sink,))
        with server.accept()[0]:
            wait_until(lambda: records.read_state(folder).state == "COMPLETED")
            assert batch.poll() is None
            # as its timer does
            processes.end_marked(processes.SINK_VARIABLE, str(folder.path))
            assert batch.wait() == 0
    said = folder.launch_log("9").read_text()
    assert (
        "mlflow    0 of 1 report sent (it took longer than 30 s); send all: mgpu-slurm export try --to mlflow" in said
    )
