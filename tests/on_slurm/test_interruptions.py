"""What stops a run on a real SLURM, what is said of it meanwhile, and that its work goes on from where it was."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.api import Handle
from mgpu_slurm.executors import slurm_states
from mgpu_slurm.reports.attempts import Before, before
from mgpu_slurm.reports.diagnosis import why
from mgpu_slurm.run_folder import failures, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from tests import wrappers
from tests.chaos.training import words_of
from tests.on_slurm.cluster import Cluster
from tests.support import Project, log, make_project, processes_of, wait_until

JOB = '''
    """Seven steps an epoch, dropout at each of them; waits to be stopped where it is told to."""
    import threading
    import time
    from dataclasses import dataclass
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset


    @dataclass
    class Config:
        wait_at: int = 0
        """The step of the first attempt before which every rank waits to be stopped; 0 for never."""
        block_at: int = 0
        """The step of the first attempt after which rank 1 is blocked, and rank 0 waits for it; 0 for never."""
        fail_at: int = 0
        """The step after which rank 1 fails; 0 for never."""


    def train(run, config: Config):
        run.seed(3)
        features = torch.randn(52, 8, generator=torch.Generator().manual_seed(0))
        model = run.wrap(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = run.loader(TensorDataset(features), batch_size=8, shuffle=True)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(3):
            for (batch,) in data:
                run.backward(model(batch).square().mean())
                run.update(optimizer, clip=1.0)
                if run.attempt == 1 and run.step == config.wait_at:
                    Path(run.folder, f"waits-{run.rank}").touch()
                    while not run._loop_control.stop.asked:
                        time.sleep(0.01)
                if run.attempt == 1 and run.rank == 1 and run.step == config.block_at:
                    Path(run.folder, "is-blocked").touch()
                    threading.Event().wait()
                if run.rank == 1 and run.step == config.fail_at:
                    raise RuntimeError("the data is broken")
            run.report(epoch, draw=torch.rand(1).item())
        inner = model.module if hasattr(model, "module") else model
        if run.is_main:
            torch.save([inner.state_dict(), torch.rand(3)], run.folder / "final.pt")
        return {"code": 1}
'''
STEPS = 21
WAIT_AT = 9
"""In the middle of the second epoch."""

HELD_BACK = ("PENDING", "BeginTime", 1)
"""SLURM has put a run back into the queue after its first attempt, to start in a while."""

WAITS = "echo attempt $MGPU_ATTEMPT on $(hostname); until test -e {gate}; do sleep 0.05; done"
LOOK_EVERY = 0.2
"""Seconds; each time SLURM is asked."""
NO_GPUS = ("--gpus-per-node", "0")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project on this machine alone."""
    return with_job(make_project(tmp_path_factory.mktemp("here")))


@pytest.fixture(scope="module")
def undisturbed(here: Project) -> bytes:
    """The final weights of two ranks that nobody stopped."""
    run, facts = here.run("train", "--nodes", "2")
    assert (facts["state"], facts["step"]) == ("COMPLETED", STEPS)
    return (run / "final.pt").read_bytes()


@pytest.fixture
def project(slurm_project: Project, here: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    # what is known there of the job need not be found out again
    slurm_project.environ["XDG_STATE_HOME"] = here.environ["XDG_STATE_HOME"]
    # SLURM's commands for this process too, which looks at runs without starting the program each time
    monkeypatch.setenv("PATH", slurm_project.environ["PATH"])
    return with_job(slurm_project)


def with_job(project: Project) -> Project:
    project.write("train.py", JOB)
    # the last bits depend on it
    project.environ["OMP_NUM_THREADS"] = "1"
    return project


def training(project: Project, *words: str, ranks: int = 2) -> Path:
    """A run that has come to the step where it waits to be stopped."""
    run = project.submit("train", *NO_GPUS, f"wait_at={WAIT_AT}", *words)
    wait_until(lambda: all((run / f"waits-{rank}").exists() for rank in range(ranks)))
    return run


def running(project: Project, script: str, *words: str, ranks: int = 1) -> Path:
    """A run of a shell's script whose every rank has printed something."""
    run = project.submit(*NO_GPUS, *words, "--", "sh", "-c", script)
    logs = [RunFolder(run).rank_log(1, rank) for rank in range(ranks)]
    wait_until(lambda: all(path.exists() and path.read_text() != "" for path in logs))
    return run


def facts_of(run: Path) -> dict[str, Any]:
    """What `status` shows."""
    return Handle(RunFolder(run)).facts


def standing(run: Path) -> tuple[str, str, int]:
    """The state, the first word of its reason, and the attempts so far."""
    facts = facts_of(run)
    return facts["state"], facts["reason"].partition(",")[0], facts["attempts"]


def finish(run: Path) -> dict[str, Any]:
    """Waits for a run's end; how it ended. `wait` would ask SLURM ever less often."""
    wait_until(lambda: not states.is_alive(facts_of(run)["state"]), seconds=90, pause=LOOK_EVERY)
    return facts_of(run)


def kept(run: Path) -> int:
    """The step of the newest checkpoint, which is where the run was stopped."""
    step = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    # the ranks agree on a stop while they do another step
    assert step in (WAIT_AT, WAIT_AT + 1)
    return step


def attempts(run: Path) -> list[list[str]]:
    """The nodes of each attempt."""
    return [event.nodes for event in records.events(RunFolder(run)) if event.event == "started"]


def ended(run: Path) -> list[int]:
    """The attempts that have ended, in this order."""
    return [event.attempt for event in records.events(RunFolder(run)) if event.event == "ended"]


def cause_of(run: Path) -> failures.Cause | None:
    """As `why` tells it."""
    found = why(RunFolder(run), Handle(RunFolder(run)).current)
    return None if found is None else found.cause


def until_told(run: Path, expected: Before) -> None:
    """Accounting hears of it some seconds after SLURM itself."""
    wait_until(lambda: before(RunFolder(run)) == [expected], pause=LOOK_EVERY)


def is_batch_step(pid: int, run: Path) -> bool:
    return {"mgpu_slurm.job", "batch", str(run)} <= {*words_of(pid)}


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def process_of_rank(run: Path, rank: int) -> int:
    """Of those that belong to it the first, which is the rank itself."""
    return min(pid for pid in processes_of(run) if f"SLURM_PROCID={rank}" in environment_of(pid))


def environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:  # it has ended
        return []


@contextlib.contextmanager
def seen(run: Path) -> Iterator[list[str]]:
    """The states in which the run is seen meanwhile by one who looks all the time."""
    found: list[str] = []
    problems: list[Exception] = []
    enough = threading.Event()

    def look() -> None:
        is_last = False
        try:
            while not is_last:
                is_last = enough.wait(LOOK_EVERY)
                state = facts_of(run)["state"]
                if found[-1:] != [state]:
                    found.append(state)
        except Exception as problem:
            problems.append(problem)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        enough.set()
        looking.join()
    assert problems == []


def ends(seen: list[str]) -> list[str]:
    return [state for state in seen if not states.is_alive(state)]


# -- told to end


# on this machine: tests/end_to_end/test_resume.py
@pytest.mark.long
def test_cancelled_training_resumes_with_identical_weights(
    project: Project, cluster: Cluster, undisturbed: bytes
) -> None:
    run = training(project, "--nodes", "2")
    assert "asked to save and end" in project.call("cancel", run.name).stdout
    first = finish(run)
    done = project.call("wait", run.name)
    assert done.returncode == 1
    assert done.stdout.startswith(f"CANCELLED  {run.name}  in ")
    assert (first["state"], first["reason"], first["attempts"]) == ("CANCELLED", "cancelled", 1)
    assert first["step"] == kept(run)
    assert "already ended" in project.call("cancel", run.name).stdout
    cluster.until_job(first["job_id"], "CANCELLED")

    done = project.call("resume", run.name, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-- started on n[1-2], attempt 2\n" in done.stdout
    assert f"restored step {first['step']} from " in done.stdout
    again = facts_of(run)
    assert (again["state"], again["step"], again["attempts"]) == ("COMPLETED", STEPS, 2)
    assert (run / "final.pt").read_bytes() == undisturbed
    assert again["job_id"] != first["job_id"]


def test_queued_run_can_be_cancelled_and_resumed(project: Project, cluster: Cluster) -> None:
    run = project.submit(*NO_GPUS, "--sbatch", "hold", "--", "true")
    assert "cancelled; continue later" in project.call("cancel", run.name).stdout
    facts = finish(run)
    assert (facts["state"], facts["reason"], facts["attempts"]) == ("CANCELLED", "cancelled", 0)
    assert cluster.job(facts["job_id"])["JobState"] == "CANCELLED"
    assert project.call("resume", run.name).returncode == 0
    assert facts_of(run)["state"] == "PENDING"


# -- a failure


@pytest.mark.long
def test_failed_training_resumes_with_new_code_and_resources(project: Project, cluster: Cluster) -> None:
    done = project.call("submit", "train", *NO_GPUS, "--nodes", "2", f"fail_at={WAIT_AT}", "--follow")
    assert done.returncode == 1
    assert "-- rank 1 on n2 failed first:\nTraceback" in done.stdout
    (run,) = project.runs.iterdir()
    failed = facts_of(run)
    assert (failed["state"], failed["reason"]) == ("FAILED", "rank 1 on n2: RuntimeError: the data is broken")
    cluster.until_job(failed["job_id"], "FAILED")

    project.write("train.py", JOB.replace('"code": 1', '"code": 2'))
    done = project.call("resume", run.name, "--nodes", "1", "--time", "5", "--code", "new", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    # from the end of the epoch before
    assert f"restored step {STEPS // 3} from " in done.stdout
    facts = facts_of(run)
    assert (facts["state"], facts["reason"], facts["nodes"], facts["ranks"]) == ("COMPLETED", "", 1, 1)
    assert (facts["step"], facts["attempts"]) == (STEPS, 2)
    assert json.loads((run / "result.json").read_text())["result"] == {"code": 2}
    assert attempts(run) == [["n1", "n2"], ["n1"]]
    assert cluster.job(facts["job_id"])["TimeLimit"] == "00:05:00"


# -- the time limit


@pytest.mark.timeout(300)
def test_time_limit_requeues_training_and_ends_a_run_that_ignores_signals(
    project: Project, cluster: Cluster, undisturbed: bytes
) -> None:
    """All three run at the same time: SLURM checks limits every 30 s, and waits another 15 s before it kills."""
    deaf = running(project, "trap '' USR2 TERM INT HUP; echo ready; while :; do sleep 0.2; done")
    run = training(project, "--nodes", "2", "--time", "3", "--signal", "USR2@30")
    blocked = project.submit(
        "train", *NO_GPUS, "--ntasks-per-node", "2", "block_at=9", "--time", "3", "--signal", "USR2@30"
    )
    wait_until((blocked / "is-blocked").exists)
    job, blocked_job = facts_of(run)["job_id"], facts_of(blocked)["job_id"]
    with seen(run) as states_seen, seen(deaf) as states_of_deaf:
        # at SLURM's next look: the lead signal comes up to 30 s early, and the limit late
        for each in (job, blocked_job):
            cluster.run("scontrol", "update", f"JobId={each}", "EndTime=now+45seconds")
        cluster.run("scontrol", "update", f"JobId={facts_of(deaf)['job_id']}", "EndTime=now+1seconds")
        cluster.until_job(job, "PENDING")
        wait_until(lambda: standing(run) == HELD_BACK, pause=LOOK_EVERY)
        step = kept(run)
        cluster.start_now(job)
        facts = finish(run)
        facts_of_deaf = finish(deaf)
        # it may have been held back for long enough meanwhile
        wait_until(lambda: standing(blocked) == HELD_BACK or facts_of(blocked)["attempts"] == 2, pause=LOOK_EVERY)
        if standing(blocked) == HELD_BACK:
            cluster.start_now(blocked_job)
        facts_of_blocked = finish(blocked)
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", STEPS, 2)
    assert facts["job_id"] == job
    assert (facts_of_blocked["state"], facts_of_blocked["attempts"]) == ("COMPLETED", 2)
    assert "this rank exits, because it cannot save from here:" in log(blocked, 0)
    assert f"restored step {STEPS // 3} from " in log(blocked, 0, attempt=2)
    assert (blocked / "final.pt").read_bytes() == undisturbed
    assert f"restored step {step} from " in log(run, 0, attempt=2)
    assert (run / "final.pt").read_bytes() == undisturbed
    assert [event.event for event in records.events(RunFolder(run))][2:] == [
        *("started", "ended", "requeued"),
        *("started", "ended"),
    ]
    assert ends(states_seen) == ["COMPLETED"]
    assert (facts_of_deaf["state"], facts_of_deaf["reason"]) == ("TIMEOUT", "TimeLimit")
    assert states_of_deaf == ["RUNNING", "TIMEOUT"]
    # what there is to go by where SLURM has forgotten the job
    last = slurm_states.ending(RunFolder(deaf), facts_of_deaf["job_id"])
    assert last is not None
    assert last.state == "TIMEOUT"
    # a shell tells of a child that is killed before it
    assert log(deaf, 0) in ("ready\n", "ready\nKilled\n")
    assert cause_of(deaf) is failures.TIME_LIMIT
    assert before(RunFolder(run)) == [Before(1, "it stopped before its time limit to be requeued", "restarted")]
    assert project.call("wait", deaf.name).returncode == 1


def test_run_without_requeues_left_ends_as_timeout(project: Project, cluster: Cluster) -> None:
    run = project.submit(*NO_GPUS, "--max-requeues", "1", "--", "sh", "-c", "exit 75")
    wait_until(lambda: standing(run) == HELD_BACK, pause=LOOK_EVERY)
    cluster.start_now(facts_of(run)["job_id"])
    facts = finish(run)
    assert (facts["state"], facts["attempts"]) == ("TIMEOUT", 2)
    assert facts["reason"] == "stopped to be requeued, but --max-requeues 1 allows no more"


@pytest.mark.every_slurm
def test_two_time_limits_without_a_newer_checkpoint_end_the_run(project: Project, cluster: Cluster) -> None:
    saves = "mkdir -p $MGPU_RUN_FOLDER/checkpoints/step-000000001; exit 75"
    # the lead signal comes as early as that: the limit is near from the start
    run = project.submit(*NO_GPUS, "--time", "1", "--signal", "USR2@50", "--", "sh", "-c", saves)
    for attempt in (1, 2):
        wait_until(lambda now=("PENDING", attempt): standing(run)[::2] == now, pause=LOOK_EVERY)
        cluster.start_now(facts_of(run)["job_id"])
    facts = finish(run)
    reason = "two attempts in a row reached the time limit without a newer checkpoint than step-000000001"
    assert (facts["state"], facts["attempts"], facts["reason"]) == ("TIMEOUT", 3, reason)
    assert cause_of(run) is failures.NO_CHECKPOINT_IN_TIME


# -- what kills ranks


def test_killed_rank_is_retried_on_the_same_nodes(project: Project, cluster: Cluster, undisturbed: bytes) -> None:
    run = training(project, "--nodes", "2")
    job = facts_of(run)["job_id"]
    with seen(run) as states_seen:
        os.kill(process_of_rank(run, 1), signal.SIGKILL)
        facts = finish(run)
    assert (facts["state"], facts["step"], facts["attempts"], facts["job_id"]) == ("COMPLETED", STEPS, 2, job)
    assert attempts(run)[0] == attempts(run)[1]
    (event,) = [each for each in records.events(RunFolder(run)) if each.event == "retried"]
    assert (event.why, event.node, event.checkpoint) == ("rank 1 on n2: Killed", "n2", 7)
    assert (run / "final.pt").read_bytes() == undisturbed
    assert ends(states_seen) == ["COMPLETED"]


def test_ranks_whose_srun_was_killed_end_and_the_run_is_retried(project: Project, cluster: Cluster) -> None:
    gate = project.folder / "gate"
    run = running(project, WAITS.format(gate=gate), "--nodes", "2", ranks=2)
    first = [pid for pid in processes_of(run) if name_of(pid) == "sh"]
    for pid in [pid for pid in processes_of(run) if name_of(pid) == "srun"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: RunFolder(run).rank_log(2, 0).exists())
    assert not set(first) & set(processes_of(run))
    gate.touch()
    facts = finish(run)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)


def test_node_that_kills_ranks_twice_is_excluded(project: Project, cluster: Cluster) -> None:
    script = "[ $SLURMD_NODENAME != n1 ] || kill -9 $$; echo here; sleep 1"
    run = project.submit(*NO_GPUS, "--nodes", "2", "--", "sh", "-c", script)
    wait_until(lambda: standing(run)[::2] == ("PENDING", 2), pause=LOOK_EVERY)
    cluster.start_now(facts_of(run)["job_id"])
    facts = finish(run)
    assert (facts["state"], facts["reason"], facts["attempts"]) == ("COMPLETED", "", 3)
    first, second, third = attempts(run)
    assert (first, second) == (["n1", "n2"], ["n1", "n2"])
    assert "n1" not in third


# -- what SLURM does to a run


HASTE = """
from mgpu_slurm.job import srun_watch

srun_watch.PATIENCE = srun_watch.AGAIN_AFTER = 2.0
"""

HANGING_SRUN = """#!/bin/sh
# the first start of a job gets no step, and is not told why
[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 1000
exec /usr/bin/srun "$@"
"""


def submit_hasty(project: Project, *setup: str) -> Path:
    """A run on two nodes whose ranks are missed after some seconds, and not only after a minute."""
    hasty = project.folder / "hasty"
    Project(hasty).write("sitecustomize.py", HASTE)
    lines = json.dumps([f"export PYTHONPATH={hasty}", *setup])
    project.write("mgpu.yaml", f"clusters: {{testbed: {{setup: {lines}}}}}\n")
    return project.submit(*NO_GPUS, "--cluster", "testbed", "--nodes", "2", "--", "sh", "-c", "echo here")


def test_job_whose_step_never_starts_is_requeued(project: Project, cluster: Cluster) -> None:
    bin_folder = project.folder / "hanging"
    Project(bin_folder).write("srun", HANGING_SRUN)
    (bin_folder / "srun").chmod(0o755)
    run = submit_hasty(project, f"export PATH={bin_folder}:$PATH")
    wait_until(lambda: standing(run)[::2] == ("PENDING", 1), pause=LOOK_EVERY)
    cluster.start_now(facts_of(run)["job_id"])
    facts = finish(run)
    assert (facts["state"], facts["reason"], facts["attempts"]) == ("COMPLETED", "", 2)
    assert log(run, 0, attempt=2) == "here\n"
    (found,) = before(RunFolder(run))
    assert re.fullmatch(r"srun waited for \d s, and SLURM did not start the ranks' step", found.ended)


def test_step_that_waits_for_another_step_of_the_job_is_waited_for(project: Project, cluster: Cluster) -> None:
    gate = project.folder / "gate"
    holds = f"srun --exclusive --nodes=2 --job-name=other sh -c 'until test -e {gate}; do sleep 0.1; done' &"
    see = "until scontrol show step $SLURM_JOB_ID | grep -q Name=other; do sleep 0.1; done"
    run = submit_hasty(project, f"{holds} {see}")
    wait_until(lambda: standing(run) == ("RUNNING", "", 1), pause=LOOK_EVERY)
    # three times the patience
    time.sleep(6)
    gate.touch()
    facts = finish(run)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 1)


def test_step_that_waits_for_a_slow_prolog_is_waited_for(project: Project, cluster: Cluster) -> None:
    prolog = cluster.folder / "prolog"
    prolog.write_text("#!/bin/sh\n[ $SLURMD_NODENAME = n1 ] || sleep 6\n")
    prolog.chmod(0o755)
    # a step manager has flags that include this one
    flags = () if cluster.site.step_manager else ("PrologFlags=Alloc",)
    cluster.change_site(lines=("Prolog=/run/cluster/prolog", *flags))
    facts = finish(submit_hasty(project))
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 1)


def test_preempted_training_resumes_with_identical_weights(
    project: Project, cluster: Cluster, undisturbed: bytes
) -> None:
    run = training(project, "--nodes", "2")
    job = facts_of(run)["job_id"]
    with seen(run) as states_seen:
        taker = cluster.preempt(["n1", "n2", "n3", "n4"])
        wait_until(lambda: standing(run) == HELD_BACK, pause=LOOK_EVERY)
        step = kept(run)
        cluster.start_now(job)
        assert facts_of(run)["state"] == "PENDING"
        cluster.release(taker)
        facts = finish(run)
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", STEPS, 2)
    assert facts["job_id"] == job
    assert f"restored step {step} from " in log(run, 0, attempt=2)
    assert (run / "final.pt").read_bytes() == undisturbed
    assert ends(states_seen) == ["COMPLETED"]
    taken = f"{failures.PREEMPTED.words} (job {taker} of root in partition high)"
    until_told(run, Before(1, taken, "SLURM restarted it"))


@pytest.mark.every_slurm
def test_preempted_script_is_requeued_whatever_its_exit_code(project: Project, cluster: Cluster) -> None:
    script = "[ $MGPU_ATTEMPT = 1 ] || exit 0; trap 'exit {}' TERM; echo ready; while :; do sleep 0.1; done"
    done, failed = (running(project, script.format(code)) for code in (0, 1))
    with seen(done) as states_of_done, seen(failed) as states_of_failed:
        taker = cluster.preempt(["n1", "n2", "n3", "n4"])
        wait_until(lambda: standing(done) == standing(failed) == HELD_BACK, pause=LOOK_EVERY)
        cluster.release(taker)
        for run in (done, failed):
            cluster.start_now(facts_of(run)["job_id"])
        for run in (done, failed):
            assert finish(run)["state"] == "COMPLETED"
    assert ends(states_of_done) == ends(states_of_failed) == ["COMPLETED"]


@pytest.mark.every_slurm
def test_run_that_loses_a_node_restarts_without_it(project: Project, cluster: Cluster) -> None:
    gate = project.folder / "gate"
    run = running(project, WAITS.format(gate=gate), "--nodes", "2", "--exclude", "n4", ranks=2)
    job = facts_of(run)["job_id"]
    with seen(run) as states_seen:
        cluster.node_down("n2")
        cluster.until_job(job, "PENDING")
        wait_until(lambda: standing(run) == HELD_BACK, pause=LOOK_EVERY)
        cluster.start_now(job)
        wait_until(lambda: RunFolder(run).rank_log(2, 1).exists())
        assert facts_of(run)["state"] == "RUNNING"
        gate.touch()
        facts = finish(run)
    assert (facts["state"], facts["reason"], facts["attempts"], facts["job_id"]) == ("COMPLETED", "", 2, job)
    assert attempts(run) == [["n1", "n2"], ["n1", "n3"]]
    until_told(run, Before(1, failures.NODE.words, "SLURM restarted it"))
    assert log(run, 1, attempt=2) == "attempt 2 on n3\n"
    assert ends(states_seen) == ["COMPLETED"]


SAVES = """
    import time
    from pathlib import Path

    def train(run, config):
        for epoch in run.restore().epochs(1000):
            Path("{place}", f"{{run.attempt}}").touch()
            if Path("{place}", "gate").exists():
                return {{"value": 1.0}}
            time.sleep(0.05)
"""


def test_job_function_on_a_lost_node_is_not_recorded_as_completed(project: Project, cluster: Cluster) -> None:
    """It saves and exits, and srun exits with 0 although a node has failed."""
    project.write("saves.py", SAVES.format(place=project.folder))
    run = project.submit("--gpus-per-node", "0", "--nodelist", "n1", "saves.py")
    wait_until((project.folder / "1").exists)
    job = facts_of(run)["job_id"]
    with seen(run) as states_seen:
        cluster.node_given_up("n1")
        cluster.until_job(job, "PENDING")
        wait_until(lambda: standing(run)[0] == "PENDING", pause=LOOK_EVERY)
        cluster.reconnect("n1")
        cluster.start_now(job)
        cluster.until_job(job, "RUNNING")
        wait_until((project.folder / "2").exists)
        running_again = json.loads((run / "state.json").read_text())
        (project.folder / "gate").touch()
        facts = finish(run)
    assert (running_again["state"], running_again["ended"]) == ("RUNNING", None)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)
    assert ends(states_seen) == ["COMPLETED"]


def test_attempt_on_a_disconnected_node_does_not_change_the_run_state(project: Project, cluster: Cluster) -> None:
    gate = project.folder / "gate"
    run = running(project, WAITS.format(gate=gate))
    job = facts_of(run)["job_id"]
    launchers = [pid for pid in processes_of(run) if name_of(pid) == "srun"]
    batch = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_batch_step(pid, run)}
    assert launchers != []
    assert batch != set()
    with seen(run) as states_seen:
        cluster.cut("n1")
        cluster.until_job(job, "PENDING")
        wait_until(lambda: standing(run) == HELD_BACK, pause=LOOK_EVERY)
        cluster.start_now(job)
        wait_until(lambda: RunFolder(run).rank_log(2, 0).exists())
        # the first attempt comes to a bad end, of which srun would tell only after 20 s of looking for the controller
        for pid in launchers:
            # two that need each other
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(is_batch_step(pid, run) for pid in batch))
        assert ended(run) == [1]
        assert standing(run) == ("RUNNING", "", 2)
        gate.touch()
        facts = finish(run)
    assert (facts["state"], facts["reason"], facts["attempts"], facts["job_id"]) == ("COMPLETED", "", 2, job)
    assert attempts(run) == [["n1"], ["n2"]]
    assert not RunFolder(run).failure.exists()
    assert ends(states_seen) == ["COMPLETED"]


def test_lost_node_ends_a_run_without_requeues(project: Project, cluster: Cluster) -> None:
    run = running(project, "echo here; exec sleep 600", "--nodes", "2", "--max-requeues", "0", ranks=2)
    cluster.node_down("n2")
    facts = finish(run)
    assert (facts["state"], facts["reason"], facts["attempts"]) == ("NODE_FAIL", "NodeDown", 1)
    assert cause_of(run) is failures.NODE
    assert project.call("wait", run.name).returncode == 1
    assert project.call("resume", run.name, "--time", "5").returncode == 0
    wait_until(lambda: standing(run) == ("RUNNING", "", 2), pause=LOOK_EVERY)


def test_script_behind_any_launcher_gets_sigterm_and_saves(slurm_project: Project) -> None:
    """SLURM signals every process of the step; a launcher that this ends does not take its script with it, nor the
    scripts of other ranks."""
    run = wrappers.start(slurm_project)
    assert slurm_project.call("cancel", run.name).returncode == 0
    assert slurm_project.finish(run)["state"] == "CANCELLED"
    found = {name: wrappers.heard(slurm_project, name) for name in wrappers.RANKS}
    # one that passes it on as well makes two
    assert found.pop("forwards") in (["ready", *asked, "saved"] for asked in (["SIGTERM"], ["SIGTERM"] * 2))
    assert found == {name: ["ready", "SIGTERM", "saved"] for name in found}
