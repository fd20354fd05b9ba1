"""Jobs in the words of squeue and scontrol."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mgpu_slurm.slurm import jobs
from mgpu_slurm.slurm.jobs import QueuedJob
from tests.support import UNKNOWN_JOB, shows

Answers = Callable[[str, str], None]


def test_squeue_command_asks_once_for_all_jobs() -> None:
    assert jobs.squeue_command(["42", "43_1"]) == [
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        "--jobs=42,43_1",
        "-O",
        "JobArrayID:|,State:|,SubmitTime:|,RestartCnt:|,StartTime:|,EndTime:|,Name:|,Reason:|",
    ]


def test_parse_squeue() -> None:
    output = (
        "42|RUNNING|2024-05-01T09:59:58|1|2024-05-01T10:00:00|2024-05-01T12:00:00|digits-1|None|\n"
        "43|PENDING|N/A|0|N/A|N/A||ReqNodeNotAvail, UnavailableNodes:gpu[01,07]|\n"
        "44_1|CONFIGURING|N/A|0|2024-05-01T11:00:00|NONE||None|\n"
        "44_12|FAILED|N/A|0|2024-05-01T11:00:00|2024-05-01T11:30:00||NonZeroExitCode|\n"
        "44_13|SOMETHING_NEW|N/A|0|N/A|N/A||None|\n"
        "45+0|RUNNING|N/A|0|N/A|N/A||None|\n"
    )
    assert jobs.parse_squeue(output) == [
        QueuedJob(
            *("42", "RUNNING", "", "2024-05-01T10:00:00", "2024-05-01T12:00:00"),
            *("digits-1", "2024-05-01T09:59:58", 1),
        ),
        QueuedJob("43", "PENDING", "ReqNodeNotAvail, UnavailableNodes:gpu[01,07]", None, None),
        QueuedJob("44_1", "PENDING", "CONFIGURING", "2024-05-01T11:00:00", None),
        QueuedJob("44_12", "FAILED", "NonZeroExitCode", "2024-05-01T11:00:00", "2024-05-01T11:30:00"),
        QueuedJob("44_13", "UNKNOWN", "SOMETHING_NEW", None, None),
        # a part of a heterogeneous job
        QueuedJob("45", "RUNNING", "", None, None),
    ]
    assert jobs.parse_squeue("") == []


def test_job_forgotten_by_the_controller_is_missing(answers: Answers) -> None:
    answers("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert jobs.queued(["42"]) == {}


def test_controller_outage_is_not_taken_for_a_forgotten_job(answers: Answers) -> None:
    answers("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    assert jobs.queued(["42"]) is None


def test_queued_jobs_are_keyed_by_id(answers: Answers) -> None:
    answers("squeue", 'echo "42_1|RUNNING|N/A|0|2024-05-01T10:00:00|N/A||None|"')
    expected = QueuedJob("42_1", "RUNNING", "", "2024-05-01T10:00:00", None)
    assert jobs.queued(["42"]) == {"42_1": expected}


def test_nodes_of_a_running_job_are_parsed() -> None:
    assert jobs.parse_place("Welcome | to | gpu\n57|gpu[03-04]\n") == ("57", ["gpu03", "gpu04"])
    assert jobs.parse_place("57|\n") is None


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("42", ["42"]),
        (" 42_3 ", ["42_3"]),
        ("42_[3%2]", ["42_3"]),
        ("42_[3-4,7%2]", ["42_3", "42_4", "42_7"]),
        ("42_[0-8:4]", ["42_0", "42_4", "42_8"]),
        ("42_[1-2,...]", ["42_1", "42_2"]),
        ("42_3%A2", ["42_3"]),
        ("42_[3-4%A2]", ["42_3", "42_4"]),
        ("42%A2", ["42"]),
        ("42_*", ["42"]),
        ("42+1", ["42"]),
        ("42_", []),
        ("job 42", []),
        ("", []),
    ],
)
def test_every_form_of_a_job_id_is_parsed(text: str, ids: list[str]) -> None:
    assert jobs.ids_in(text) == ids
    line = f"{text}|PENDING|2024-05-01T10:00:00|0|N/A|N/A|a|JobArrayTaskLimit|"
    assert [job.job_id for job in jobs.parse_squeue(line)] == ids


def test_unparsable_squeue_line_is_reported_once(answers: Answers) -> None:
    row = "RUNNING|2024-05-01T10:00:00|0|N/A|N/A|a|None|"
    strange = [f"42~{number}|{row}" for number in (1, 2)] + ["43|RUNNING|and nothing else"]
    banners = ["|   Maintenance on Monday   |", "Your job 500 has ended.", "5 new messages"]
    answers("squeue", shows("\n".join([*banners, *strange, f"44|{row}", ""])))
    notes: list[str] = []
    # whom nobody hears has not told it
    jobs.queued(["44"])
    for _ in range(2):
        assert list(jobs.queued(["44"], notes.append) or []) == ["44"]
    prefix = "cannot parse a line of squeue: "
    assert notes == [f"{prefix}{strange[0]!r}", f"{prefix}{strange[2]!r}"]


SHOWN = """\
JobId=42 ArrayJobId=42 ArrayTaskId=2-3%2 ArrayTaskThrottle=2 JobName=an array=1 UserId=me(1000) JobState=PENDING\
 Reason=JobArrayTaskLimit Dependency=(null) Requeue=1 Restarts=0 SubmitTime=2024-05-01T10:00:00 StartTime=Unknown\
 EndTime=Unknown Command=a b
JobId=44 ArrayJobId=42 ArrayTaskId=1 JobName=an array=1 JobState=RUNNING Reason=None Restarts=1\
 SubmitTime=2024-05-01T10:00:00 StartTime=2024-05-01T10:00:05 EndTime=Unknown
"""


def test_jobs_shown_by_scontrol_are_parsed(answers: Answers) -> None:
    answers("scontrol", shows(SHOWN))
    waiting = ("PENDING", "JobArrayTaskLimit", None, None, "an array=1", "2024-05-01T10:00:00", 0)
    assert jobs.shown("42") == [
        QueuedJob("42_2", *waiting),
        QueuedJob("42_3", *waiting),
        QueuedJob("42_1", "RUNNING", "", "2024-05-01T10:00:05", None, "an array=1", "2024-05-01T10:00:00", 1),
    ]
    answers("scontrol", UNKNOWN_JOB)
    assert jobs.shown("42") == []
    # neither an answer without a job nor none at all says that there is none
    for script in ("true", "exit 1"):
        answers("scontrol", script)
        assert jobs.shown("42") is None
