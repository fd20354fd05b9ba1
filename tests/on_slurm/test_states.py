"""What `status`, `wait` and `logs --follow` say of runs is true, whatever SLURM forgets or leaves unanswered."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import IO

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from tests.on_slurm.cluster import Cluster
from tests.support import Project, log, wait_until

SLEEP = ("--", "sleep", "600")
SILENCE = "SLURM's controller does not answer"


def submit(project: Project, *words: str) -> Path:
    return project.submit("--gpus-per-node", "0", *words)


def start(project: Project, *words: str) -> Path:
    """Submits a run; it runs."""
    run = submit(project, *words)
    wait_until(lambda: recorded(run).state == "RUNNING")
    return run


def recorded(run: Path) -> RunState:
    """What the run itself has written down, without a question to anybody."""
    return records.read_state(RunFolder(run))


def job_of(run: Path) -> str:
    (submission,) = records.submissions(RunFolder(run))
    assert submission.job_id is not None
    return submission.job_id


def state_of(project: Project, run: Path) -> tuple[str, str]:
    """State and reason."""
    (facts,) = project.json("status", run.name)
    return facts["state"], facts["reason"]


def states(project: Project, *runs: Path) -> list[str]:
    return [facts["state"] for facts in project.json("status", *(run.name for run in runs))]


def read_until(stream: IO[str] | None, words: str) -> list[str]:
    """The lines of a process up to the one with these words, which it prints sooner or later."""
    assert stream is not None
    lines = [stream.readline()]
    while lines[-1] and words not in lines[-1]:
        lines.append(stream.readline())
    return [line.rstrip("\n") for line in lines]


def commands(asked: Path) -> list[str]:
    """What was called since the last look."""
    found = [line.split()[0] for line in asked.read_text().splitlines()]
    asked.write_text("")
    return found


def test_status_asks_squeue_once_and_nothing_about_ended_runs(
    slurm_project: Project, asked: Path, cluster: Cluster
) -> None:
    done, held = submit(slurm_project, "--", "true"), submit(slurm_project, "--sbatch", "hold", *SLEEP)
    running = start(slurm_project, *SLEEP)
    wait_until(lambda: recorded(done).state == "COMPLETED")
    commands(asked)
    assert states(slurm_project, done, held, running) == ["COMPLETED", "PENDING", "RUNNING"]
    assert len(slurm_project.json("status")) == 3
    assert commands(asked) == ["squeue", "squeue"]

    jobs = [job_of(held), job_of(running)]
    cluster.run("scancel", *jobs)
    accounts = ("sacct", "-n", "-P", "-X", "-o", "State", "-j", ",".join(jobs))
    wait_until(lambda: [line.split()[0] for line in cluster.run(*accounts).stdout.splitlines()] == ["CANCELLED"] * 2)
    cluster.forget_jobs()
    submit(slurm_project, "--sbatch", "hold", *SLEEP)
    commands(asked)
    found = {facts["run"]: facts["state"] for facts in slurm_project.json("status")}
    assert [found[run.name] for run in (done, held, running)] == ["COMPLETED", "CANCELLED", "CANCELLED"]
    assert commands(asked) == ["squeue", "sacct"]
    assert states(slurm_project, done, held, running) == ["COMPLETED", "CANCELLED", "CANCELLED"]
    assert commands(asked) == []


class TestControllerDown:
    def test_wait_and_follow_continue_and_end_with_the_run(self, slurm_project: Project, cluster: Cluster) -> None:
        gate = slurm_project.folder / "gate"
        script = f"echo begin; until test -e {gate}; do sleep 0.05; done; echo end"
        words = ("--executor", "slurm", "--gpus-per-node", "0", "--follow", "--", "sh", "-c", script)
        submitting = slurm_project.start("submit", *words)
        wait_until(lambda: any(slurm_project.runs.glob("sh-*/logs/1-0.log")))
        (run,) = slurm_project.runs.glob("sh-*")
        endless = start(slurm_project, *SLEEP)
        waiting, for_long = slurm_project.start("wait", run.name), slurm_project.start("wait", endless.name)
        following = slurm_project.start("logs", run.name, "--follow")
        assert read_until(following.stdout, "begin") == ["-- started on n1", "begin"]
        cluster.stop_controller()

        shown = slurm_project.call("status", "--json")
        facts = json.loads(shown.stdout)
        assert [one["state"] for one in facts] == ["RUNNING", "RUNNING"]
        assert all(SILENCE in one["reason"] for one in facts)
        assert shown.stderr == f"mgpu-slurm: {SILENCE}: showing the last known states\n"
        assert slurm_project.call("logs", run.name).stdout == "begin\n"
        assert [process.poll() for process in (submitting, waiting, for_long, following)] == [None] * 4

        told = f"{SILENCE}: showing the last known states; asking again"
        assert read_until(waiting.stderr, SILENCE) == [f"mgpu-slurm: {told}"]
        assert read_until(for_long.stderr, SILENCE) == [f"mgpu-slurm: {told}"]
        assert read_until(following.stdout, SILENCE) == [f"-- {told}"]
        assert read_until(submitting.stdout, SILENCE)[-2:] == ["begin", f"-- {told}"]
        gate.touch()
        out, err = waiting.communicate(timeout=60)
        assert (waiting.returncode, err) == (0, "")
        assert out.startswith(f"COMPLETED  {run.name}")
        assert following.communicate(timeout=60)[0].splitlines()[0] == "end"
        out, _ = submitting.communicate(timeout=60)
        assert (submitting.returncode, out.splitlines()[0]) == (0, "end")
        assert f"COMPLETED  {run.name}" in out
        assert cluster.run("scontrol", "ping").returncode != 0

        cluster.start_controller()
        assert state_of(slurm_project, endless) == ("RUNNING", "")
        assert for_long.poll() is None
        cluster.run("scancel", job_of(endless))
        out, err = for_long.communicate(timeout=60)
        assert (for_long.returncode, err) == (1, "")
        assert out.startswith(f"CANCELLED  {endless.name}")


class TestWithoutAccounting:
    def test_final_states_are_correct_before_and_after_slurm_forgets_them(
        self, slurm_project: Project, cluster: Cluster
    ) -> None:
        cluster.change_site(accounting=False)
        two_nodes = ("--nodes", "2", "--nodelist", "n3,n4", "--max-requeues", "0")
        runs = {
            "CANCELLED": start(slurm_project, "--nodelist", "n1", *SLEEP),
            "NODE_FAIL": start(slurm_project, *two_nodes, *SLEEP),
            "COMPLETED": submit(slurm_project, "--nodelist", "n1", "--", "true"),
            "FAILED": submit(slurm_project, "--nodelist", "n1", "--", "false"),
        }
        cluster.run("scancel", job_of(runs["CANCELLED"]))
        cluster.node_down("n4")
        for state, run in runs.items():
            cluster.until_job(job_of(run), state)
        unseen = {run: (run / "state.json").read_text() for run in runs.values()}
        assert states(slurm_project, *runs.values()) == list(runs)
        for run, text in unseen.items():
            (run / "state.json").write_text(text)
        cluster.forget_jobs()
        assert cluster.run("squeue", "--noheader", "--states=all").stdout == ""
        assert states(slurm_project, *runs.values()) == list(runs)
        assert slurm_project.call("wait", runs["NODE_FAIL"].name).returncode == 1

    def test_run_cancelled_before_its_start_is_not_lost(self, slurm_project: Project, cluster: Cluster) -> None:
        cluster.change_site(accounting=False)
        run = submit(slurm_project, "--sbatch", "hold", *SLEEP)
        assert slurm_project.call("cancel", run.name).returncode == 0
        cluster.forget_jobs()
        assert state_of(slurm_project, run) == ("CANCELLED", "cancelled")

    def test_job_that_vanished_is_lost_and_can_be_resumed(self, slurm_project: Project, cluster: Cluster) -> None:
        cluster.change_site(accounting=False)
        run = start(slurm_project, "--", "sh", "-c", "test $MGPU_ATTEMPT = 2 || exec sleep 600; echo back")
        waiting = slurm_project.start("wait", run.name)
        cluster.forget_jobs()
        out, _ = waiting.communicate(timeout=60)
        assert waiting.returncode == 1
        assert out.startswith(f"FAILED  {run.name}: lost: ")
        state, reason = state_of(slurm_project, run)
        assert (state, reason.partition(":")[0]) == ("FAILED", "lost")
        assert slurm_project.call("resume", run.name).returncode == 0
        assert slurm_project.finish(run)["attempts"] == 2
        assert slurm_project.call("logs", run.name).stdout == "back\n"


def test_run_of_another_cluster_on_shared_files_is_left_alone(
    slurm_project: Project, asked: Path, cluster: Cluster, tmp_path: Path
) -> None:
    """Its job id may be another job's here, and a job that this SLURM does not know is not lost there."""
    run, waits = start(slurm_project, *SLEEP), submit(slurm_project, "--sbatch", "hold", *SLEEP)
    group = submit(slurm_project, "--seeds", "2", "--sbatch", "hold", "--", "echo", "{seed}")
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text("# of the other one\nclustername = neighbour\n")
    there = slurm_project.environ["SLURM_CONF"]
    slurm_project.environ["SLURM_CONF"] = str(elsewhere)
    commands(asked)
    found = slurm_project.json("status")
    seen = "last known state (its job is on cluster testbed, this is neighbour)"
    assert sorted((facts["state"], facts["reason"]) for facts in found) == [("PENDING", seen)] * 3 + [("RUNNING", seen)]
    assert {facts["job_id"] for facts in found} >= {job_of(run), job_of(waits), f"{job_of(group)}_1"}
    refused = f"run {run.name} has its job on cluster testbed, this is neighbour: run this on a login node there"
    for words in (
        ("cancel", run.name),
        ("shell", run.name, "--", "true"),
        ("submit", "--after", run.name, "--", "true"),
    ):
        done = slurm_project.call(*words)
        assert (done.returncode, done.stderr) == (3, f"mgpu-slurm: {refused}\n"), words
    assert "is RUNNING: " in slurm_project.call("resume", run.name).stderr
    assert set(commands(asked)) <= {"sinfo"}
    assert cluster.job(job_of(run))["JobState"] == "RUNNING"

    slurm_project.environ["SLURM_CONF"] = there
    slurm_project.call("cancel", *(each.name for each in (run, waits, group)))
    assert slurm_project.finish(run)["state"] == "CANCELLED"
    # what has ended there has ended everywhere
    slurm_project.environ["SLURM_CONF"] = str(elsewhere)
    assert states(slurm_project, run, waits, group) == ["CANCELLED"] * 4


def test_lost_state_is_corrected_once_the_database_is_back(slurm_project: Project, cluster: Cluster) -> None:
    cancelled, vanished = start(slurm_project, *SLEEP), start(slurm_project, *SLEEP)
    cluster.run("scancel", job_of(cancelled))
    cluster.until_job(job_of(cancelled), "CANCELLED")
    cluster.forget_jobs()
    cluster.stop_database()
    assert state_of(slurm_project, cancelled) == ("CANCELLED", "cancelled")
    state, reason = state_of(slurm_project, vanished)
    assert (state, reason.partition(",")[0]) == ("FAILED", "lost: SLURM no longer lists it")
    assert "its accounting does not answer" in reason
    cluster.start_database()
    # the word of accounting on a job whose controller has lost it
    wait_until(lambda: state_of(slurm_project, vanished) == ("CANCELLED", ""))


class TestAlive:
    @pytest.mark.every_slurm
    def test_held_suspended_and_requeued_held_jobs_are_alive(self, slurm_project: Project, cluster: Cluster) -> None:
        held = submit(slurm_project, "--sbatch", "hold", "--", "true")
        suspended, requeued, special = (start(slurm_project, *SLEEP) for _ in range(3))
        cluster.run("scontrol", "suspend", job_of(suspended))
        cluster.run("scontrol", "requeuehold", job_of(requeued))
        cluster.run("scontrol", "requeuehold", "State=SpecialExit", job_of(special))
        cluster.until_job(job_of(requeued), "PENDING")
        cluster.until_job(job_of(special), "SPECIAL_EXIT")
        found = {facts["run"]: (facts["state"], facts["reason"]) for facts in slurm_project.json("status")}
        assert found == {
            held.name: ("PENDING", "JobHeldUser"),
            suspended.name: ("RUNNING", "SUSPENDED"),
            # no start is expected, though SLURM names one
            requeued.name: ("PENDING", "job requeued in held state"),
            special.name: ("REQUEUED", "job requeued in held state"),
        }
        cluster.run("scontrol", "resume", job_of(suspended))
        cluster.run("scontrol", "release", job_of(held))
        assert state_of(slurm_project, suspended) == ("RUNNING", "")
        assert slurm_project.finish(held)["state"] == "COMPLETED"
        assert slurm_project.call("cancel", suspended.name, requeued.name, special.name).returncode == 0
        assert slurm_project.call("wait", suspended.name, requeued.name, special.name).returncode == 1
        assert states(slurm_project, suspended, requeued, special) == ["CANCELLED"] * 3

    def test_configuring_and_completing_jobs_are_alive(
        self, slurm_project: Project, cluster: Cluster, tmp_path: Path
    ) -> None:
        lines = []
        for name in ("Prolog", "Epilog"):
            script = tmp_path / name
            script.write_text(f"#!/bin/sh\nuntil test -e {script}.go; do sleep 0.05; done\n")
            script.chmod(0o755)
            lines.append(f"{name}Slurmctld={script}")
        cluster.change_site(lines=tuple(lines))
        run = submit(slurm_project, *SLEEP)
        cluster.until_job(job_of(run), "CONFIGURING")
        assert state_of(slurm_project, run) == ("PENDING", "CONFIGURING")
        (tmp_path / "Prolog.go").touch()
        wait_until(lambda: recorded(run).state == "RUNNING")
        assert state_of(slurm_project, run) == ("RUNNING", "")
        cluster.run("scancel", job_of(run))
        cluster.until_job(job_of(run), "COMPLETING", "CANCELLED")
        assert state_of(slurm_project, run) == ("RUNNING", "COMPLETING")
        (tmp_path / "Epilog.go").touch()
        assert slurm_project.finish(run)["state"] == "CANCELLED"

    @pytest.mark.every_slurm
    def test_pending_run_shows_the_reason_and_the_expected_start(
        self, slurm_project: Project, cluster: Cluster
    ) -> None:
        alone = ("--nodelist", "n1", "--sbatch", "exclusive", "--time", "10")
        start(slurm_project, *alone, *SLEEP)
        run = submit(slurm_project, *alone, *SLEEP)
        wait_until(lambda: "expected" in state_of(slurm_project, run)[1])
        state, reason = state_of(slurm_project, run)
        found = re.fullmatch(r"(Resources|Priority), expected to start at (.+)", reason)
        assert found is not None, reason
        expected = datetime.fromisoformat(found[2]) - datetime.now()
        assert state == "PENDING"
        assert 8 * 60 < expected.total_seconds() <= 11 * 60
        shown = slurm_project.call("status", run.name).stdout
        assert f"{found[1]}, expected to start at" in shown


TRAINING = '''
    """Two epochs of two steps; the first attempt waits after the first two to be stopped."""
    import time
    from dataclasses import dataclass

    import torch


    @dataclass
    class Config:
        seed: int = 0


    def train(run, config: Config):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = run.restore(model=model, optimizer=optimizer)
        for epoch in state.epochs(2):
            for _ in range(2):
                run.backward(model(torch.ones(1, 1)).sum())
                run.update(optimizer)
                print("step", run.step, flush=True)
            while epoch == 1 and run.attempt == 1 and not run._loop_control.stop.asked:
                time.sleep(0.01)
            run.report(epoch, seed=config.seed)
'''


def test_requeue_by_an_admin_adds_an_attempt_and_keeps_the_work(slurm_project: Project, cluster: Cluster) -> None:
    slurm_project.write("train.py", TRAINING)
    group = submit(slurm_project, "--seeds", "1", "train")
    run = group / "tasks" / "0"
    wait_until(lambda: (run / "logs/1-0.log").exists() and "step 2" in log(run, 0))
    task = f"{job_of(group)}_0"
    assert cluster.run("scontrol", "requeue", task).returncode == 0
    cluster.until_job(task, "PENDING")
    (facts,) = slurm_project.json("status", group.name)
    assert (facts["state"], facts["attempts"]) == ("PENDING", 1)
    assert facts["reason"].startswith("BeginTime, expected to start at")
    cluster.start_now(task)
    assert slurm_project.call("wait", group.name).returncode == 0
    (facts,) = slurm_project.json("status", group.name)
    assert (facts["state"], facts["attempts"], facts["step"]) == ("COMPLETED", 2, 4)
    assert re.findall(r"^step \d", log(run, 0, attempt=2), re.MULTILINE) == ["step 3", "step 4"]


def test_empty_squeue_output_does_not_mean_that_the_job_is_gone(slurm_project: Project, tmp_path: Path) -> None:
    """Some sites' wrappers print nothing while the controller is down; a second source is asked then."""
    run = start(slurm_project, *SLEEP)
    real = slurm_project.environ["PATH"]
    folder = tmp_path / "mute"
    folder.mkdir()
    (folder / "squeue").write_text("#!/bin/sh\n")
    (folder / "squeue").chmod(0o755)
    slurm_project.environ["PATH"] = f"{folder}:{real}"
    assert state_of(slurm_project, run) == ("RUNNING", "")
    assert slurm_project.call("wait", run.name, "--timeout", "1").returncode == 124
    refused = slurm_project.call("resume", run.name)
    assert (refused.returncode, "is RUNNING" in refused.stderr) == (2, True)
    (folder / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (folder / "scontrol").chmod(0o755)
    state, reason = state_of(slurm_project, run)
    assert (state, reason.partition(":")[0]) == ("RUNNING", "not listed by squeue")
    assert slurm_project.call("resume", run.name).returncode == 2
    slurm_project.environ["PATH"] = real
    assert state_of(slurm_project, run) == ("RUNNING", "")


@pytest.mark.every_slurm
def test_another_job_that_reuses_the_job_id_is_left_alone(slurm_project: Project, cluster: Cluster) -> None:
    run = submit(slurm_project, "--sbatch", "hold", *SLEEP)
    other = cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").stdout.strip()
    cluster.until_job(other, "RUNNING")
    # as after a reset of the controller, which counts anew: long ago, the run's job had the id of the other one
    history = (run / "attempts.jsonl").read_text().replace(f'"{job_of(run)}"', f'"{other}"')
    (run / "attempts.jsonl").write_text(re.sub(r'"time": ?"\d+', '"time": "2025', history))
    assert job_of(run) == other
    state, reason = state_of(slurm_project, run)
    assert (state, reason.partition(":")[0]) == ("FAILED", "lost")
    assert "already ended" in slurm_project.call("cancel", run.name).stdout
    assert cluster.job(other)["JobState"] == "RUNNING"
