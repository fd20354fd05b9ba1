"""Submissions whose answer is lost, late or killed: there is one job, or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from mgpu_slurm import api
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.executors import slurm_queue
from mgpu_slurm.registry import current_state, lookup
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import layout, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import commands, sbatch
from mgpu_slurm.slurm.sbatch import MayBeQueued
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.plan import Request
from mgpu_slurm.submission.resume_overrides import Change
from tests.slurm_stand_in import StandIn, stand_in
from tests.support import REPOSITORY, Project, wait_until

QUICKLY = (
    "from mgpu_slurm.cli.main import main\n"
    "from mgpu_slurm.slurm import commands\n"
    "commands.OUTAGE_PAUSES = (0.05,)\n"
    "main()\n"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    slurm = stand_in(tmp_path / "slurm")
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MGPU_RUNS", raising=False)
    monkeypatch.setattr(commands, "OUTAGE_PAUSES", (0.1,))
    return slurm


def let_it_hang_for_a_moment(happens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that hangs is given up soon; others, and what it does before, may take as long as they need here."""
    if happens.endswith("hang"):
        monkeypatch.setattr(sbatch, "TIME_LIMIT", 3)


@pytest.fixture
def here(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project.folder)
    return project.folder


@pytest.fixture
def notes() -> list[str]:
    return []


def submit(notes: list[str], **options: object) -> submitting.Submission:
    request = Request(command=("echo", "{seed}"), executor="slurm", **options)  # type: ignore[arg-type]
    return submitting.submit(request, notes.append)


def runs_of(here: Path) -> list[str]:
    """What the runs folder holds, hidden entries too."""
    return sorted(path.name for path in (here / "runs").glob("*"))


def only_run(here: Path) -> RunFolder:
    (name,) = runs_of(here)
    return RunFolder(here / "runs" / name)


def events(folder: RunFolder) -> list[str]:
    return [event.event for event in records.events(folder)]


# -- lost answers


@pytest.mark.parametrize(
    "happens", ["take-and-time-out", "take-later", "take-and-hang", "take-and-die", "take-and-say-nothing"]
)
def test_job_queued_without_an_answer_is_found_not_resubmitted(
    slurm: StandIn, here: Path, notes: list[str], happens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_hang_for_a_moment(happens, monkeypatch)
    slurm.plan(happens)
    submission = submit(notes)
    assert slurm.calls == [happens]
    assert submission.job_id == "42"
    (queued,) = slurm.queue
    assert events(only_run(here)) == ["submitting", "submitted"]
    assert queued == f"42|{records.events(only_run(here))[0].token}"
    assert notes[0].startswith("SLURM's controller does not answer; trying again until ")


@pytest.mark.parametrize("happens", ["time-out", "hang", "unreached", "busy"])
def test_transient_sbatch_failure_is_retried(
    slurm: StandIn, here: Path, notes: list[str], happens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_hang_for_a_moment(happens, monkeypatch)
    slurm.plan(happens, happens, "take-with-banners")
    assert submit(notes).job_id == "42"
    assert slurm.calls == [happens, happens, "take-with-banners"]
    assert len(slurm.queue) == 1
    assert len(notes) == 1


def test_refused_submission_is_not_retried_and_leaves_nothing(slurm: StandIn, here: Path, notes: list[str]) -> None:
    slurm.plan("refuse")
    with pytest.raises(ClusterError, match="Invalid partition name specified"):
        submit(notes)
    assert slurm.calls == ["refuse"]
    assert runs_of(here) == []
    assert notes == []


def test_invalid_flag_value_leaves_nothing(slurm: StandIn, here: Path, notes: list[str]) -> None:
    with pytest.raises(UserError, match="line break"):
        submit(notes, flags={"account": "a\nb"})
    assert (slurm.calls, runs_of(here)) == ([], [])


def test_long_controller_outage_leaves_nothing(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "OUTAGE_SECONDS", 0.2)
    slurm.go_down()
    # what the plan asks for is known already
    with pytest.raises(ClusterError, match=r"\(connect failure\); nothing was queued: try again later$") as caught:
        submit(notes, flags={"gpus-per-node": 0})
    assert caught.value.exit_code == 3
    assert runs_of(here) == []
    assert len(notes) == 1


def test_outage_after_sbatch_keeps_the_run_and_names_its_token(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "OUTAGE_SECONDS", 0.2)
    slurm.write("squeue", "exit 1\n")
    slurm.plan("take-and-time-out")
    with pytest.raises(MayBeQueued) as caught:
        submit(notes)
    folder = only_run(here)
    assert events(folder) == ["submitting"]
    assert f"look for {records.events(folder)[0].token} in squeue" in str(caught.value)


def test_planning_queries_also_wait_during_an_outage(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "OUTAGE_SECONDS", 0.2)
    slurm.go_down()
    with pytest.raises(ClusterError, match=r"sinfo failed .* \(connect failure\)"):
        submit(notes)
    assert runs_of(here) == []
    assert len(notes) == 1


def test_started_job_is_found_by_its_claim(slurm: StandIn, here: Path, notes: list[str]) -> None:
    """SLURM forgets jobs that have ended; some sites make it forget them soon."""
    slurm.write(
        "real-sbatch", f"for run in {here}/runs/*; do mkdir $run/claims; echo -n 77 > $run/claims/mgpu-1; done\n"
    )
    slurm.plan("take-and-time-out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sbatch, "new_token", lambda: "mgpu-1")
        assert submit(notes).job_id == "77"


def test_runs_whose_array_was_refused_can_be_resumed(slurm: StandIn, here: Path, notes: list[str]) -> None:
    """The group needs several job arrays, and the second one is refused."""
    slurm.write("scontrol", "echo 'MaxArraySize = 2'\n")
    slurm.plan("take", "refuse")
    with pytest.raises(ClusterError, match=r"/2 are queued as job 42, and `resume` submits the others$"):
        submit(notes, seeds="5")
    folder = only_run(here)
    assert [state.state for _, state in current_state.current([folder])] == [*["PENDING"] * 2, *["FAILED"] * 3]
    found = api.find(folder.run)
    found.resume()
    assert [line.partition("|")[0] for line in slurm.queue] == ["42", "43", "44"]
    assert [facts["job_id"] for facts in found.all_facts] == ["42_0", "42_1", "43_0", "43_1", "44_0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_submission_of_another_user_is_left_alone(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "OUTAGE_SECONDS", 0.0)
    slurm.write("squeue", "exit 1\n")
    slurm.plan("time-out")
    with pytest.raises(MayBeQueued):
        submit(notes)
    slurm.write("squeue", "")
    folder = only_run(here)
    later(folder)
    os.chown(folder.path, 12345, -1)
    assert [state.state for _, state in lookup.all_states()] == ["PENDING"]
    os.chown(folder.path, os.geteuid(), -1)
    assert lookup.all_states() == []


# -- resume


def ended_run(here: Path, notes: list[str]) -> RunFolder:
    submit(notes)
    folder = only_run(here)
    records.record_event(folder, "started", attempt=1)
    records.update_state(folder, state="TIMEOUT", reason="ended", job_id="42")
    return folder


def test_refused_resume_leaves_the_run_unchanged(slurm: StandIn, here: Path, notes: list[str]) -> None:
    folder = ended_run(here, notes)
    slurm.plan("refuse")
    with pytest.raises(ClusterError, match="Invalid partition"):
        api.Handle(folder).resume(Change({"time": "5"}))
    assert read_spec(folder).resources.time is None
    assert (api.Handle(folder).state, api.Handle(folder).facts["reason"]) == ("TIMEOUT", "ended")


def test_unconfirmed_resume_is_pending_and_found_later(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended_run(here, notes)
    slurm.plan("take-and-time-out")
    answering = (slurm.state / "bin" / "squeue").read_text()
    slurm.write("squeue", "exit 1\n")
    monkeypatch.setattr(commands, "OUTAGE_SECONDS", 0.0)
    with pytest.raises(MayBeQueued):
        api.Handle(folder).resume(Change({"time": "5"}))
    assert read_spec(folder).resources.time == "5"
    assert records.read_state(folder).state == "PENDING"
    (slurm.state / "bin" / "squeue").write_text(answering)
    monkeypatch.setattr(records, "SUBMISSION_TAKES", timedelta(0))
    assert api.Handle(folder).facts["job_id"] == "43"


def test_refused_resume_leaves_never_queued_runs_resumable(slurm: StandIn, here: Path, notes: list[str]) -> None:
    slurm.write("scontrol", "echo 'MaxArraySize = 3'\n")
    slurm.plan("take", "refuse")
    with pytest.raises(ClusterError, match="`resume` submits the others"):
        submit(notes, seeds="5")
    folder = only_run(here)
    slurm.plan("refuse")
    with pytest.raises(ClusterError, match="Invalid partition"):
        api.Group(folder).resume()
    found = [(state.state, state.reason[:16]) for _, state in current_state.current([folder])]
    assert found == [("PENDING", "Priority")] * 3 + [("FAILED", "was never queued")] * 2
    assert api.Group(folder).resume() == "43"


# -- cancel


def test_cancel_finds_a_job_that_was_not_recorded(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(notes)
    folder = only_run(here)
    # as if killed before it wrote down the answer
    first_event = folder.attempts.read_text().splitlines(keepends=True)[0]
    folder.attempts.write_text(first_event)
    assert api.Handle(folder).cancel()
    assert (slurm.state / "cancelled").read_text() == "42\n"


def test_cancel_fails_while_slurm_does_not_know_the_job(slurm: StandIn, here: Path, notes: list[str]) -> None:
    submit(notes)
    folder = only_run(here)
    first_event = folder.attempts.read_text().splitlines(keepends=True)[0]
    folder.attempts.write_text(first_event)
    (slurm.state / "queue").write_text("")
    with pytest.raises(ClusterError, match="does not know its job yet"):
        api.Handle(folder).cancel()


def test_cancel_of_a_group_cancels_the_jobs_slurm_knows(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.write("scontrol", "echo 'MaxArraySize = 3'\n")
    submit(notes, seeds="5")
    folder = only_run(here)
    lines = folder.attempts.read_text().splitlines(keepends=True)
    # as if killed before it wrote down the second answer, and SLURM took a while to have that job
    folder.attempts.write_text("".join(lines[:-1]))
    (slurm.state / "queue").write_text("42|mgpu-other\n")
    with pytest.raises(ClusterError, match=f"run {folder.run}/3: SLURM does not know its job yet"):
        api.Group(folder).cancel()
    # one request for all of the array
    assert (slurm.state / "cancelled").read_text() == "42\n"


# -- when and where it would start


def test_local_dry_run_says_that_jobs_start_immediately(project: Project) -> None:
    words = ("submit", "--executor", "local", "--dry-run", "--check")
    done = project.call(*words, "--", "true")
    assert done.stdout.endswith("\nthe local executor starts jobs immediately\n")
    assert project.json(*words, "--", "true")["check"] is None


def test_check_requires_dry_run(project: Project) -> None:
    done = project.call("submit", "--check", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mgpu-slurm: --check only works with --dry-run\n"
    assert not project.runs.exists()


# -- killed, and interrupted


@contextlib.contextmanager
def killed(project: Project, slurm: StandIn, *words: str) -> Iterator[None]:
    """A submission that is killed when the block ends."""
    project.environ |= slurm.environ
    process = project.start("submit", "--executor", "slurm", *words, stdout=subprocess.DEVNULL, stderr=None)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def later(folder: RunFolder) -> None:
    """As if all of its history lay an hour back."""
    lines = [json.loads(line) for line in folder.attempts.read_text().splitlines()]
    for line in lines:
        line["time"] = "2024-05-01T12:00:00+00:00"
    folder.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_submit_killed_before_creating_a_folder_leaves_nothing(project: Project, slurm: StandIn, here: Path) -> None:
    slurm.write("sinfo", f"touch {slurm.state}/here; until [ -e {slurm.state}/go ]; do sleep 0.1; done\n")
    with killed(project, slurm, "--", "true"):
        wait_until(lambda: slurm.is_waiting)
    slurm.go()
    assert not (here / "runs").exists()


def test_submit_killed_before_publishing_leaves_only_a_staging_folder(
    project: Project, slurm: StandIn, here: Path
) -> None:
    slurm.write("scontrol", f"touch {slurm.state}/here; until [ -e {slurm.state}/go ]; do sleep 0.1; done\n")
    with killed(project, slurm, "--seeds", "2", "--", "echo", "{seed}"):
        wait_until(lambda: slurm.is_waiting)
    slurm.go()
    assert lookup.all_states() == []
    (staged,) = runs_of(here)
    assert staged.startswith(layout.STAGING_PREFIX)


def test_visible_run_already_records_its_submission(
    slurm: StandIn, here: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a submission that is killed at that moment is recognized as one."""
    seen: list[str] = []
    monkeypatch.setattr(slurm_queue, "submit", lambda folder, *_: seen.extend(events(folder)) or "42")
    submit(notes)
    assert seen == ["submitting"]


def test_run_of_a_submit_killed_before_queueing_is_removed_later(project: Project, slurm: StandIn, here: Path) -> None:
    slurm.plan("hang")
    with killed(project, slurm, "--", "true"):
        wait_until(lambda: slurm.calls == ["hang"])
    folder = only_run(here)
    assert [(run.run, state.state) for run, state in lookup.all_states()] == [(folder.run, "PENDING")]
    later(folder)
    assert api.Handle(folder).state == "FAILED"
    assert api.Handle(folder).facts["reason"].startswith("was never queued")
    assert lookup.all_states() == []
    assert runs_of(here) == []


def test_submission_that_still_waits_is_not_removed(
    project: Project, slurm: StandIn, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks at it after the controller is back, and before the submission notices that."""
    slurm.plan("hang")
    monkeypatch.setattr(records, "SUBMISSION_TAKES", timedelta(0))
    with killed(project, slurm, "--", "true"):
        wait_until(lambda: slurm.calls == ["hang"])
        assert [state.state for _, state in lookup.all_states()] == ["PENDING"]
        assert only_run(here).state.exists()


@pytest.mark.parametrize("happens", ["wait-and-take", "take-and-wait"])
def test_job_is_found_if_submit_is_killed_and_sbatch_survives(
    project: Project, slurm: StandIn, here: Path, happens: str
) -> None:
    slurm.plan(happens)
    with killed(project, slurm, "--", "true"):
        wait_until(lambda: slurm.is_waiting)
    slurm.go()
    wait_until(lambda: len(slurm.queue) == 1)
    folder = only_run(here)
    later(folder)
    ((run, state),) = lookup.all_states()
    assert (run, state.state, state.job_id) == (folder, "PENDING", "42")
    assert events(folder) == ["submitting", "submitted"]


def start(project: Project, slurm: StandIn, *words: str) -> subprocess.Popen[str]:
    """A submission in a process of its own that is quick to look again; Ctrl-C is for it alone."""
    environ = os.environ | project.environ | slurm.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", QUICKLY, "submit", "--executor", "slurm", *words]
    return subprocess.Popen(command, cwd=project.folder, env=environ, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_while_the_controller_is_down_leaves_nothing(project: Project, slurm: StandIn, here: Path) -> None:
    slurm.go_down()
    with start(project, slurm, "--gpus-per-node", "0", "--", "true") as process:
        assert "Ctrl-C stops waiting" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert runs_of(here) == []


def test_ctrl_c_waits_for_sbatch_and_names_the_queued_job(project: Project, slurm: StandIn, here: Path) -> None:
    slurm.plan("wait-and-take")
    with start(project, slurm, "--", "true") as process:
        wait_until(lambda: slurm.is_waiting)
        process.send_signal(signal.SIGINT)
        assert "waiting for sbatch to answer" in process.stderr.readline()
        slurm.go()
        folder_name = only_run(here).run
        assert process.stderr.readline().endswith(
            f"already queued as job 42: cancel it with `mgpu-slurm cancel {folder_name}`\n"
        )
        assert process.wait() == 130
        assert events(only_run(here)) == ["submitting", "submitted"]


def test_ctrl_c_names_the_queued_job_even_if_sbatch_times_out(project: Project, slurm: StandIn, here: Path) -> None:
    slurm.plan("take-wait-and-time-out")
    with start(project, slurm, "--", "true") as process:
        wait_until(lambda: slurm.is_waiting)
        process.send_signal(signal.SIGINT)
        assert "waiting for sbatch to answer" in process.stderr.readline()
        slurm.go()
        told = process.stderr.read()
        assert process.wait() == 130
    folder = only_run(here)
    assert f"already queued as job 42: cancel it with `mgpu-slurm cancel {folder.run}`\n" in told
    assert events(folder) == ["submitting", "submitted"]
    assert slurm.calls == ["take-wait-and-time-out"]


def test_ctrl_c_during_a_failing_sbatch_prevents_a_retry(project: Project, slurm: StandIn, here: Path) -> None:
    slurm.plan("wait-and-fail", "take")
    with start(project, slurm, "--", "true") as process:
        wait_until(lambda: slurm.is_waiting)
        process.send_signal(signal.SIGINT)
        assert "waiting for sbatch to answer" in process.stderr.readline()
        slurm.go()
        assert process.wait() == 130
    assert slurm.calls == ["wait-and-fail"]
    assert runs_of(here) == []


def test_ctrl_c_before_the_job_was_queued_leaves_nothing(project: Project, slurm: StandIn, here: Path) -> None:
    slurm.plan("time-out")
    slurm.write("squeue", f"touch {slurm.state}/here; until [ -e {slurm.state}/go ]; do sleep 0.01; done\n")
    with start(project, slurm, "--", "true") as process:
        wait_until(lambda: slurm.is_waiting)
        process.send_signal(signal.SIGINT)
        slurm.go()
        assert process.wait() == 130
        assert slurm.calls == ["time-out"]
        assert runs_of(here) == []
