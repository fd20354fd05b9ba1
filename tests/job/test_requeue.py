"""A run that asks to be started again from inside its job, where SLURM requeues it and where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.job import requeue
from mgpu_slurm.job.requeue import Job, chain_events, requeue_before_limit, restart
from mgpu_slurm.registry import current_state
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event
from mgpu_slurm.slurm import commands, sbatch, script
from mgpu_slurm.slurm.script import Array
from tests.slurm_stand_in import StandIn, stand_in

REFUSES = """\
echo "$@" >> '{state}/requeued'
echo 'Requested operation is presently disabled for job 9' >&2; exit 1
"""
RECORD = """\
printf '%s\\n' "$@" > '{state}/arguments'
env > '{state}/environ'
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    slurm = stand_in(tmp_path / "slurm")
    slurm.write("scontrol", REFUSES.format(state=slurm.state))
    real = slurm.state / "bin" / "real-sbatch"
    real.write_text(real.read_text().replace("#!/bin/sh\n", "#!/bin/sh\n" + RECORD.format(state=slurm.state)))
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setattr(commands, "OUTAGE_PAUSES", (0.01,))
    monkeypatch.setattr(requeue, "SCONTROL_TAKES", 0.3)
    monkeypatch.setattr(requeue, "PATIENCE", 0.1)
    return slurm


@pytest.fixture
def spec() -> Spec:
    return Spec("digits", Target(command=("true",)), "slurm", Resources(sbatch={"comment": "project 7"}))


@pytest.fixture
def folder(tmp_path: Path, spec: Spec) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "digits")
    folder.create()
    spec.write(folder)
    files.write_whole(folder.submission(), script.render(spec, folder, "mgpu-1"))
    records.update_state(folder, executor="slurm", state="RUNNING", job_id="9")
    records.record_event(folder, "submitting", token="mgpu-1")
    records.record_event(folder, "submitted", token="mgpu-1", job_id="9")
    return folder


def arguments(slurm: StandIn) -> list[str]:
    return (slurm.state / "arguments").read_text().splitlines()


def test_job_is_requeued_by_scontrol(folder: RunFolder, spec: Spec, slurm: StandIn) -> None:
    slurm.write("scontrol", f"echo \"$@\" >> '{slurm.state}/requeued'\n")
    assert requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event()) == 75
    assert (slurm.state / "requeued").read_text() == "requeue 9\n"
    assert slurm.calls == []
    state = records.read_state(folder)
    assert (state.state, state.job_id) == ("REQUEUED", "9")


def test_another_job_that_reuses_the_job_id_is_not_requeued(folder: RunFolder, spec: Spec, slurm: StandIn) -> None:
    slurm.write("squeue", "echo '9|RUNNING|2025-05-01T12:00:00|0|N/A|N/A|other|None|'\n")
    with pytest.raises(ClusterError, match=r"job 9 no longer belongs to run digits"):
        requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event())
    assert not (slurm.state / "requeued").exists()
    assert slurm.calls == []


@pytest.mark.parametrize("answer", ["refuses", "hangs"])
def test_dependent_job_is_submitted_if_requeue_is_refused_or_hangs(
    folder: RunFolder, spec: Spec, slurm: StandIn, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    if answer == "hangs":
        slurm.write("scontrol", "exec sleep 600\n")
    monkeypatch.setenv("SLURM_CPU_BIND", "mask")
    monkeypatch.setenv("RANK", "3")
    requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event())
    (queued,) = slurm.queue
    job_id, _, comment = queued.partition("|")
    token = comment.removeprefix("project 7 ")
    assert arguments(slurm) == [
        "--parsable",
        f"--comment=project 7 {token}",
        "--dependency=afterany:9",
        str(folder.submission()),
        token,
    ]
    environ = (slurm.state / "environ").read_text().splitlines()
    assert [line for line in environ if line.startswith(("SLURM_CPU_BIND", "RANK="))] == []
    state = records.read_state(folder)
    assert (state.state, state.job_id) == ("REQUEUED", job_id)
    assert state.reason.startswith(f"continues as job {job_id}: scontrol ")
    newest = records.submissions(folder)[-1]
    assert (newest.token, newest.job_id) == (token, job_id)
    # status asks for the new job
    assert current_state.state(folder).state == "PENDING"


def test_array_task_continues_as_an_array_of_one_task(
    tmp_path: Path, folder: RunFolder, spec: Spec, slurm: StandIn
) -> None:
    array = Array(1001, (1001, 1004))
    files.write_whole(folder.submission(1001), script.render(spec, folder, "mgpu-2", array))
    records.record_event(folder, "submitting", token="mgpu-2", first=1001, tasks="1001,1004")
    run = folder.of_task(1004)
    run.create_task()
    restart(Job(run, spec, "9_3", "mgpu-2"))
    token = slurm.queue[0].rpartition(" ")[2]
    assert arguments(slurm) == [
        "--parsable",
        f"--comment=project 7 {token}",
        "--dependency=afterany:9_3",
        "--array=3",
        str(folder.submission(1001)),
        token,
    ]
    assert records.read_state(run).job_id == "42_3"
    assert [submission.token for submission in records.submissions_of(run)] == ["mgpu-2", token]
    assert sbatch.claim(run, token, "42_3") == "42_3"


def test_dependents_of_the_job_also_wait_for_its_new_job(folder: RunFolder, spec: Spec, slurm: StandIn) -> None:
    slurm.write("scontrol", 'echo "$*" >> "$0.calls"; case $1 in requeue) echo "is disabled" >&2; exit 1 ;; esac\n')
    slurm.write("squeue", "echo '50|afterok:9(unfulfilled)'; echo '51|afterok:8(unfulfilled)'\n")
    assert requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event()) == 0
    calls = (slurm.state / "bin" / "scontrol.calls").read_text().splitlines()
    assert calls == ["requeue 9", "update JobId=50 Dependency=afterok:9,afterok:42"]


def test_exit_code_is_nonzero_if_dependents_cannot_be_updated(folder: RunFolder, spec: Spec, slurm: StandIn) -> None:
    slurm.write("squeue", "echo '50|afterok:9(unfulfilled)'\n")
    assert requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event()) == 75


def test_renamed_sbatch_options_are_used(folder: RunFolder, spec: Spec, slurm: StandIn) -> None:
    spec.rename.update({"comment": None, "dependency": "after={}"})
    requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event())
    assert arguments(slurm)[:2] == ["--parsable", "--after=afterany:9"]
    assert not any(word.startswith("--comment") for word in arguments(slurm))


@pytest.mark.parametrize("happens", ["take-and-time-out", "take-and-die"])
def test_lost_sbatch_answer_does_not_lead_to_a_second_job(
    folder: RunFolder, spec: Spec, slurm: StandIn, happens: str
) -> None:
    slurm.plan(happens)
    requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event())
    assert len(slurm.queue) == 1
    assert records.read_state(folder).job_id == "42"


def test_error_gives_both_reasons_if_requeue_and_sbatch_fail(folder: RunFolder, spec: Spec, slurm: StandIn) -> None:
    slurm.plan("refuse")
    with pytest.raises(ClusterError, match=r"presently disabled for job 9; nor could a job .*: .*Invalid partition"):
        requeue_before_limit(Job(folder, spec, "9", "mgpu-1"), Event())
    assert slurm.queue == []


def test_requeues_are_counted_across_continuing_jobs_but_not_resumes(
    folder: RunFolder, spec: Spec, slurm: StandIn
) -> None:
    slurm.write("scontrol", "")
    first = Job(folder, spec, "9", "mgpu-1")
    requeue_before_limit(first, Event())
    requeue_before_limit(first, Event())
    assert len(chain_events(first, "requeued")) == 2
    slurm.write("scontrol", REFUSES.format(state=slurm.state))
    requeue_before_limit(first, Event())
    second = Job(folder, spec, "42", records.submissions(folder)[-1].token)
    assert len(chain_events(second, "requeued")) == 3
    requeue_before_limit(second, Event())
    assert len(chain_events(Job(folder, spec, "43", records.submissions(folder)[-1].token), "requeued")) == 4
    records.record_event(folder, "submitting", token="resumed")
    assert len(chain_events(Job(folder, spec, "44", "resumed"), "requeued")) == 0
