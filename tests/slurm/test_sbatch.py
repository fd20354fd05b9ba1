"""A job arrives in the queue once or not at all, and of all jobs that come for a run, one works on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import commands, sbatch
from mgpu_slurm.slurm.commands import BUSY, LOST, UNREACHED, Patience, SlurmUnavailable
from mgpu_slurm.slurm.sbatch import ExactlyOnceSubmission, MayBeQueued, failure, job_id_in

CLAIM = """
import sys
from pathlib import Path
from mgpu_slurm.slurm import sbatch
from mgpu_slurm.run_folder.layout import RunFolder
print("ready", flush=True)
sys.stdin.readline()
print(sbatch.claim(RunFolder(Path(sys.argv[1])), "mgpu-1", sys.argv[2]))
"""

FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("output", "job_id"),
    [
        ("42\n", "42"),
        ("42;alpha\n", "42"),
        ("Welcome!\nYour job 500 has ended.\n42\nSee /etc/motd\n", "42"),
        ("sbatch: Job will run on partition gpu\n  42;alpha  \n\n", "42"),
    ],
)
def test_job_id_is_found_among_banners(output: str, job_id: str) -> None:
    assert job_id_in(output) == job_id


@pytest.mark.parametrize("output", ["", "Welcome to job 500\n", "Submitted batch job 42\n"])
def test_output_without_a_job_id_counts_as_a_lost_request(output: str) -> None:
    with pytest.raises(SlurmUnavailable, match="printed no job id") as caught:
        job_id_in(output)
    assert caught.value.request == LOST


@pytest.mark.parametrize(
    ("code", "output", "request_was"),
    [
        (1, FAILED + "Unable to contact slurm controller (connect failure)", UNREACHED),
        (1, FAILED + "Unable to contact slurm controller (receive failure)", LOST),
        (1, FAILED + "Socket timed out on send/recv operation", LOST),
        (1, FAILED + "Zero Bytes were transmitted or received", LOST),
        (1, "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.", BUSY),
        (1, FAILED + "Resource temporarily unavailable", LOST),
        (1, FAILED + "Connection refused", UNREACHED),
        (1, FAILED + "Unable to create job record, try again", BUSY),
        # it had tried before
        (1, f"sbatch: error: Slurm temporarily unable to accept job, sleeping\n{FAILED}Connection refused", UNREACHED),
        (124, "", LOST),
        (-15, "", LOST),
        (255, "Connection to login2 closed.", LOST),
    ],
)
def test_temporary_failure_says_what_became_of_the_request(code: int, output: str, request_was: str) -> None:
    problem = failure(code, f"Welcome!\n{output}\n")
    assert isinstance(problem, SlurmUnavailable)
    assert problem.request == request_was


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (1, FAILED + "Invalid account or account/partition combination specified"),
        (1, FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"),
        (1, "sbatch: error: something that no version of SLURM has said before"),
        (255, "sbatch: unrecognized option '--nosuch=1'\nTry \"sbatch --help\" for more information"),
        (255, "Invalid time specification (pos=0): soon\nsbatch: error: Invalid --begin specification"),
        (1, "sbatch: error: Slurm temporarily unable to accept job, sleeping\n" + FAILED + "Invalid qos specification"),
        (127, "timeout: failed to run command 'sbatch': No such file or directory"),
        (1, ""),
    ],
)
def test_any_other_failure_is_a_refusal(code: int, output: str) -> None:
    problem = failure(code, output)
    assert not isinstance(problem, SlurmUnavailable)
    assert "\n" not in str(problem)


def test_refusal_of_what_no_nodes_have_says_how_to_list_them() -> None:
    said = FAILED + "Memory specification can not be satisfied"
    assert str(failure(1, said)) == (
        f"sbatch refused the job: {said}: `sinfo -o '%P %D %c %m %G'` shows what nodes there are"
    )


def test_user_comment_is_kept() -> None:
    asked = Resources(sbatch={"comment": "project 7"})
    assert sbatch.comment(Spec("digits", Target(command=("true",)), "slurm", asked), "mgpu-1") == "project 7 mgpu-1"


def test_start_estimate_is_parsed() -> None:
    said = (
        "Welcome!\nsbatch: Job 6 to start at 2024-05-01T12:00:00 using 2 processors on nodes n[1-2] in partition main\n"
    )
    start = sbatch.start_in(said)
    assert (start.at[:19], start.nodes, start.partition) == ("2024-05-01T12:00:00", "n[1-2]", "main")
    assert start.sentence.startswith("SLURM would start it at 2024-05-01 12:00:00 on n[1-2] in partition main")


def test_unparsable_start_estimate_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"cannot parse the output of sbatch --test-only: hello$"):
        sbatch.start_in("hello\n")


# -- the way into the queue, with what sbatch and squeue say in turn

Say: TypeAlias = "str | BaseException | None"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "OUTAGE_PAUSES", (0.0,))


def in_turn(*answers: Say) -> Callable[[], str | None]:
    """Gives or raises one after the other; it is an error to ask for more."""
    left: Iterator[Say] = iter(answers)

    def answer() -> str | None:
        said = next(left)
        if isinstance(said, BaseException):
            raise said
        return said

    return answer


def submission(asks: tuple[Say, ...], looks: tuple[Say, ...]) -> ExactlyOnceSubmission:
    return ExactlyOnceSubmission("mgpu-1", in_turn(*asks), in_turn(*looks))


SILENT = ClusterError("squeue is silent")


def lost() -> SlurmUnavailable:
    return SlurmUnavailable("socket timed out", LOST)


def test_submission_returns_the_job_id() -> None:
    job = submission(("42",), ())
    assert job.queue(Patience()) == "42"
    assert not job.is_unsure


def test_job_queued_without_an_answer_is_found() -> None:
    assert submission((lost(),), ("42",)).queue(Patience()) == "42"


def test_job_still_being_queued_is_found_at_the_second_look() -> None:
    assert submission((lost(),), (None, "42")).queue(Patience()) == "42"


def test_retry_needs_two_answers_that_the_job_is_missing() -> None:
    assert submission((lost(), "43"), (None, SILENT, None)).queue(Patience()) == "43"


def test_one_answer_allows_a_retry_if_the_request_never_arrived() -> None:
    unreached = SlurmUnavailable("connection refused", UNREACHED)
    assert submission((unreached, unreached, "43"), (SILENT, None, None)).queue(Patience()) == "43"


def test_a_refusal_is_final() -> None:
    job = submission((lost(), ClusterError("invalid partition")), (None, None))
    with pytest.raises(ClusterError, match=r"^invalid partition$"):
        job.queue(Patience())
    assert not job.is_unsure


def test_timeout_is_sure_nothing_was_queued_if_squeue_answers() -> None:
    job = submission((lost(),), (None, None))
    with pytest.raises(ClusterError, match=r"^socket timed out; nothing was queued") as caught:
        job.queue(Patience(seconds=0))
    assert not isinstance(caught.value, MayBeQueued)
    assert not job.is_unsure


def test_timeout_is_sure_nothing_was_queued_if_never_reached() -> None:
    job = submission((SlurmUnavailable("connection refused", UNREACHED),), (SILENT,))
    with pytest.raises(ClusterError, match=r"^connection refused; nothing was queued") as caught:
        job.queue(Patience(seconds=0))
    assert not isinstance(caught.value, MayBeQueued)


def test_timeout_is_unsure_if_the_controller_went_away() -> None:
    job = submission((lost(),), (None, SILENT))
    with pytest.raises(
        MayBeQueued, match=r"^socket timed out; the job may be queued nevertheless, because squeue is silent: .*mgpu-1"
    ):
        job.queue(Patience(seconds=0))
    assert job.is_unsure


def test_interrupt_between_two_looks_leaves_the_submission_unsure() -> None:
    job = submission((lost(),), (None, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        job.queue(Patience())
    assert job.is_unsure


def test_sbatch_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\ntrap '' TERM\necho 42\nexec sleep 600\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setattr(sbatch, "TIME_LIMIT", 0.1)
    monkeypatch.setattr(sbatch, "KILL_AFTER", 0.1)
    with pytest.raises(SlurmUnavailable, match="was killed by SIGKILL"):
        sbatch.call(sbatch.command("--parsable", "script"), {"PATH": f"{tmp_path}:/usr/bin:/bin"})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "digits-1")
    folder.create()
    return folder


def submitted(folder: RunFolder, *tokens: str, **facts: object) -> None:
    for token in tokens:
        records.record_event(folder, "submitting", token=token, **facts)


def test_only_one_of_several_simultaneous_jobs_claims_the_run(folder: RunFolder) -> None:
    command = [sys.executable, "-c", CLAIM, str(folder.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = {str(job): subprocess.Popen([*command, str(job)], **pipes) for job in range(40, 50)}  # type: ignore[call-overload]
    for process in jobs.values():
        assert process.stdout.readline() == "ready\n"
    for process in jobs.values():
        process.stdin.write("go\n")
        process.stdin.flush()
    holders = {job: process.communicate()[0].strip() for job, process in jobs.items()}
    (holder,) = set(holders.values())
    assert holder in jobs
    assert (folder.claims / "mgpu-1").read_text() == holder
    # no half of a claim is left either
    assert [path.name for path in folder.claims.iterdir()] == ["mgpu-1"]


def test_requeued_job_keeps_its_claim(folder: RunFolder) -> None:
    assert sbatch.claim(folder, "mgpu-1", "42") == "42"
    assert sbatch.claim(folder, "mgpu-1", "42") == "42"
    assert sbatch.claim(folder, "mgpu-1", "43") == "42"


def test_each_submission_can_be_claimed(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", "mgpu-2")
    assert sbatch.claim(folder, "mgpu-2", "43") == "43"


def test_late_job_yields_to_the_job_of_a_later_submission(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", "mgpu-2")
    sbatch.claim(folder, "mgpu-2", "43")
    assert sbatch.claim(folder, "mgpu-1", "42") == "43"


def test_late_job_that_claims_first_keeps_the_run(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", "mgpu-2", "mgpu-3")
    assert sbatch.claim(folder, "mgpu-1", "42") == "42"
    assert sbatch.claim(folder, "mgpu-2", "43") == "42"
    assert sbatch.claim(folder, "mgpu-3", "44") == "42"


def test_runs_of_a_group_are_claimed_separately(folder: RunFolder) -> None:
    """A late task must not take the runs of others with it."""
    submitted(folder, "mgpu-1", tasks="0-1", first=0)
    submitted(folder, "mgpu-2", tasks="0-1", first=0)
    runs = [folder.of_task(task) for task in range(2)]
    for run in runs:
        run.create_task()
    assert sbatch.claim(runs[0], "mgpu-1", "42_0") == "42_0"
    assert sbatch.claim(runs[0], "mgpu-2", "43_0") == "42_0"
    assert sbatch.claim(runs[1], "mgpu-2", "43_1") == "43_1"


def test_resumed_run_of_a_group_is_claimed_by_its_own_submission(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", tasks="0-1", first=0)
    run = folder.of_task(1)
    run.create_task()
    assert sbatch.claim(run, "mgpu-1", "42_1") == "42_1"
    submitted(run, "mgpu-2", tasks="1", first=0)
    assert sbatch.claim(run, "mgpu-2", "77_1") == "77_1"
    # requeued after all
    assert sbatch.claim(run, "mgpu-1", "42_1") == "77_1"


def test_claimant_is_the_job_with_the_token(folder: RunFolder) -> None:
    assert sbatch.claimant(folder, "mgpu-1") is None
    sbatch.claim(folder, "mgpu-1", "42")
    assert sbatch.claimant(folder, "mgpu-1") == "42"


def test_claimant_of_a_group_is_the_array_job(folder: RunFolder) -> None:
    assert sbatch.claimant(folder, "mgpu-1") is None
    run = folder.of_task(7)
    run.create_task()
    sbatch.claim(run, "mgpu-1", "42_7")
    assert sbatch.claimant(folder, "mgpu-1") == "42"
