"""Why a run waits, with what a SLURM of scripts tells or keeps to itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgpu_slurm.reports import waiting
from mgpu_slurm.reports.waiting import Wait
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder

Answers = Callable[[str, str], None]

JOB = (
    "JobId=42 JobName=digits UserId=student(20001) GroupId=student(20001) Account=lab QOS=short JobState=PENDING"
    " Reason={reason} Dependency={dependency} SubmitTime=2026-05-01T12:00:00 TimeLimit=01:30:00 Partition=main"
    " ReqNodeList=(null) NumNodes=2 TRES=cpu=2,mem=1000M,node=2,gres/gpu=2 Reservation=course"
)
PARTITION = "PartitionName=main QoS=main MaxNodes=1 MaxTime=01:00:00 Nodes=n[1-2] State=UP"
QOS = "normal|||||||||||||||\nshort||||||||01:00:00|gres/gpu=1|4|9||||\nmain|||||||||||0||||"
REFUSED = "echo 'scontrol: error: Access/permission denied' >&2; exit 1"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "digits")
    folder.create()
    at = datetime(2026, 5, 1, 12).astimezone().isoformat()
    records.record_event(folder, "submitting", token="mgpu-1", time=at)
    records.record_event(folder, "submitted", token="mgpu-1", job_id="42", time=at)
    records.update_state(folder, executor="slurm", job_id="42", state="PENDING", submitted=at)
    return folder


@pytest.fixture
def site(answers: Answers) -> Callable[..., None]:
    """Sets what SLURM answers for a job with this reason; what is not given it refuses."""

    def answer(
        reason: str, limits: str = "", reservations: str = "", qos: str = "", dependency: str = "(null)"
    ) -> None:
        lines = {
            "show job *": JOB.format(reason=reason, dependency=dependency),
            "show partition *": PARTITION,
            "show assoc_mgr *": limits,
            "show reservation *": reservations,
        }
        cases = "".join(f"'{words[:-1]}'*) cat <<'END'\n{text}\nEND\n;;\n" for words, text in lines.items() if text)
        answers("scontrol", f'case "$*" in {cases} *) {REFUSED};; esac')
        answers("sacctmgr", f"cat <<'END'\n{qos}\nEND\n" if qos else REFUSED)
        answers("squeue", "printf '7|short|lab|10:00|a|b|\\n8|long|lab|20:00|other|\\nBanner\\n'")

    return answer


def wait_of(run: RunFolder) -> Wait | None:
    return waiting.wait_of(run, records.read_state(run))


def test_values_come_from_the_database_if_the_controller_does_not_tell(
    run: RunFolder, site: Callable[..., None]
) -> None:
    site("QOSMaxGRESPerUser", qos=QOS)
    assert wait_of(run) == Wait(
        "QOSMaxGRESPerUser",
        "QOS short allows you 1 GPU; this run asks for 2",
        "cancel it, and `resume` it with at most 1 GPU",
    )
    # the partition's own QOS
    site("QOSMaxSubmitJobPerUserLimit", qos=QOS)
    found = wait_of(run)
    assert found is not None
    assert found.words == "QOS main allows you 0 queued or running jobs"


def test_reason_is_explained_without_numbers_if_the_site_hides_them(run: RunFolder, site: Callable[..., None]) -> None:
    site("QOSMaxGRESPerUser")
    assert wait_of(run) == Wait(
        "QOSMaxGRESPerUser",
        "its QOS allows a user no more GPUs at the same time",
        "nothing to fix: it starts by itself",
    )


def test_other_running_jobs_that_count_are_named(run: RunFolder, site: Callable[..., None]) -> None:
    line = "QOS=short(2) GrpJobs=N(1) MaxWallPJ= Account Limits= User Limits= student(20001)={MaxTRESPU=gres/gpu=3(2)}"
    site("QOSMaxGRESPerUser", limits=line)
    found = wait_of(run)
    assert found is not None
    assert found.words == "QOS short allows you 3 GPUs: 2 in use, and this run asks for 2"
    assert found.fix == (
        "wait for your other a|b (job 7, 10:00 left), or cancel it, and `resume` it with at most 1 GPU"
    )


@pytest.mark.parametrize(
    ("reason", "words", "fix"),
    [
        (
            "PartitionTimeLimit",
            "partition main allows --time 01:00:00; this run asks for 01:30:00",
            "cancel it, and `resume` it with --time 01:00:00 or less",
        ),
        (
            "PartitionNodeLimit",
            "partition main allows --nodes 1; this run asks for 2",
            "cancel it, and `resume` it with --nodes 1 or less",
        ),
        ("JobHeldUser", "it is held by its user", "`scontrol release 42` lets it start"),
        (
            "Dependency",
            "it waits for other runs (--after): afterok:7(unfulfilled)",
            "nothing to fix: it starts by itself",
        ),
    ],
)
def test_reasons_of_partitions_and_jobs_are_explained(
    run: RunFolder, site: Callable[..., None], reason: str, words: str, fix: str
) -> None:
    site(reason, dependency="afterok:7(unfulfilled)")
    assert wait_of(run) == Wait(reason, words, fix)


def reservation(name: str, nodes: str, start: timedelta, flags: str) -> str:
    begin = datetime.now() + start
    times = [time.isoformat(timespec="seconds") for time in (begin, begin + timedelta(hours=2))]
    return f"ReservationName={name} StartTime={times[0]} EndTime={times[1]} Nodes={nodes} Flags={flags} Users=root"


IN_AN_HOUR = timedelta(minutes=60, seconds=30)


@pytest.mark.parametrize(
    ("reason", "nodes", "start", "flags", "words"),
    [
        (
            "ReqNodeNotAvail,_Reserved_for_maintenance",
            "n2",
            IN_AN_HOUR,
            "MAINT",
            "with --time 0:58:00 or less it could",
        ),
        ("Priority", "n[1-9]", IN_AN_HOUR, "MAINT", "with --time 0:58:00 or less it could start before"),
        # other nodes are enough, or will be
        ("Priority", "n2", IN_AN_HOUR, "MAINT", "jobs with a higher priority come first"),
        ("Resources", "n[1-9]", IN_AN_HOUR, "SPEC_NODES", "it is among the next"),
        ("Resources", "n[1-9]", timedelta(hours=2), "MAINT", "it is among the next"),
        ("ReqNodeNotAvail,_May_be_reserved_for_other_job", "n1", IN_AN_HOUR, "", "reservation course from"),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "n1", IN_AN_HOUR, "", "it would not end before a maintenance"),
        ("ReqNodeNotAvail,_UnavailableNodes:n1", "n1", IN_AN_HOUR, "MAINT", "a node that it needs is down, drained"),
        ("Resources", "n[1-2]", timedelta(hours=-1), "MAINT", "its nodes are taken by a maintenance from"),
        ("Reservation", "n1", IN_AN_HOUR, "", "on n1 has not begun"),
        ("Reservation", "n1", timedelta(hours=-1), "", "on n1 has no room for it yet"),
    ],
)
def test_reservation_in_the_way_is_named(
    run: RunFolder, site: Callable[..., None], reason: str, nodes: str, start: timedelta, flags: str, words: str
) -> None:
    site(reason, reservations=reservation("course", nodes, start, flags))
    found = wait_of(run)
    assert found is not None
    assert words in found.words


RUNNING = "7|short|lab|10:00|other|\n"
STRANGE = st.sampled_from(["9" * 5000, "²", "-1", "1e9", "(null)", "[0-999999999]", "\x1b[2J", "{", "'", "$(id)", ""])


@settings(
    max_examples=150, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), reason=st.sampled_from(["QOSMaxGRESPerUser", "Priority", "Reservation", "PartitionTimeLimit"]))
def test_whatever_slurm_shows_there_is_an_explanation_or_none(run: RunFolder, data: st.DataObject, reason: str) -> None:
    limit = "QOS=short(2) MaxWallPJ=60 Account Limits= User Limits= student(20001)={MaxTRESPU=gres/gpu=3(2)}"
    shown = {
        "job": JOB.format(reason=reason, dependency="(null)"),
        "partition": PARTITION,
        "assoc_mgr": limit,
        "reservation": reservation("course", "n[1-9]", IN_AN_HOUR, "MAINT"),
        "qos": QOS,
    }
    for name, text in shown.items():
        low = data.draw(st.integers(0, len(text)))
        shown[name] = text[:low] + data.draw(STRANGE) + text[low + data.draw(st.integers(0, 12)) :]
    with mock.patch.object(
        waiting, "_ask", lambda command: next((text for name, text in shown.items() if name in command), RUNNING)
    ):
        found = wait_of(run)
    assert found is None or (found.words and "\n" not in found.words + found.fix)


def test_job_that_is_not_the_runs_or_does_not_wait_is_not_explained(run: RunFolder, answers: Answers) -> None:
    answers("scontrol", f"echo '{JOB}'".replace("PENDING", "RUNNING"))
    assert wait_of(run) is None
    answers("scontrol", f"echo '{JOB}'".replace("JobName=digits", "JobName=other").replace("2026-05", "2026-04"))
    assert wait_of(run) is None
    answers("scontrol", REFUSED)
    assert wait_of(run) is None
