"""Limits of accounting, in what 22.05.8 and 24.11.5 show of them: a file of tests/slurm/recorded for each.

Account lab allows its jobs 6 GPUs together, and student one running job; QOS short a user 2 GPUs and 4 jobs, and a job
an hour; QOS long all of its jobs together a GPU.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from mgpu_slurm.slurm import site
from mgpu_slurm.slurm.pending import limits, wait_reasons
from mgpu_slurm.slurm.pending.limits import JOBS, WALL, Limit

RECORDED = Path(__file__).parent / "recorded"
RELEASES = ("22.05", "24.11")
ASKED = {"cpu": 1, "gres/gpu": 1, "node": 1, "mem": 500, JOBS: 1, WALL: 90}


def shown(release: str) -> str:
    return (RECORDED / f"assoc_mgr-{release}.txt").read_text()


def reasons() -> list[str]:
    return (RECORDED / "limit_reasons.txt").read_text().split()


@pytest.mark.parametrize("release", RELEASES)
def test_limits_of_a_user_are_found_with_what_is_used(release: str) -> None:
    found = limits.parse_shown(shown(release), "student", "20001")
    assert [(limit.owner, limit.field, limit.resource, limit.value, limit.used) for limit in found] == [
        ("account lab", "GrpTRES", "gres/gpu", 6, 3),
        ("account lab", "GrpTRESMins", "cpu", 100000, 0),
        ("account lab", "MaxJobs", JOBS, 1, 1),
        ("account lab", "MaxSubmitJobs", "submitted", 6, 2),
        ("QOS short", "MaxWallPJ", WALL, 60, None),
        ("QOS long", "GrpJobs", JOBS, 3, 0),
        ("QOS long", "GrpTRES", "gres/gpu", 1, 0),
    ]
    # another user's share of a QOS, by the number alone or by name and number
    of_colleague = limits.parse_shown(shown(release), "colleague", "20003")
    assert [limit.sentence(1) for limit in of_colleague if limit.per == "PU"] == [
        "QOS short allows you 4 running jobs: 1 is running",
        "QOS short allows you 9 queued or running jobs: 3 are there",
        "QOS short allows you 2 GPUs: 2 in use, and this run asks for 1",
    ]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxGRESPerUser", ["QOS short allows you 2 GPUs: 2 in use, and this run asks for 1"]),
        ("QOSMaxWallDurationPerJobLimit", ["QOS short allows a job 1:00:00; this run asks for 1:30:00"]),
        ("QOSGrpGRES", ["QOS long allows all of its jobs together 1 GPU: 0 in use, and this run asks for 1"]),
        ("AssocGrpGRES", ["account lab allows all of its jobs together 6 GPUs: 3 in use, and this run asks for 1"]),
        ("QOSMaxCpuPerUserLimit", []),
        # not of an association
        ("AssocMaxWallDurationPerJobLimit", []),
    ],
)
def test_reason_names_one_of_the_limits(release: str, reason: str, words: list[str]) -> None:
    found = limits.parse_shown(shown(release), "colleague", "20003")
    named = limits.named_by(reason)
    assert named is not None
    meant = limits.of_reason(found, named, ASKED)
    assert [limit.sentence(limits.amount_of(limit, ASKED)) for limit in meant] == words


def test_limit_that_is_in_the_way_is_meant() -> None:
    named = limits.named_by("AssocGrpGRES")
    assert named is not None
    of_account = Limit("Grp", "gres/gpu", owner="account lab", value=6, used=6)
    of_user = Limit("Grp", "gres/gpu", owner="account lab", is_of_user=True, value=4, used=1)
    of_model = Limit("Grp", "gres/gpu:a100", owner="account lab", value=1, used=1)
    assert limits.of_reason([of_account, of_user, of_model], named, ASKED) == [of_account]
    assert limits.of_reason([of_account, of_model], named, {"gres/gpu:a100": 1}) == [of_model]
    assert of_model.sentence(1) == (
        "account lab allows all of its jobs together 1 GPU of type a100: 1 in use, and this run asks for 1"
    )


@pytest.mark.parametrize(
    ("limit", "asked", "words"),
    [
        (Limit("Max", "mem", per="PJ", owner="QOS a", value=4096), 8192, "a job 4G of memory; this run asks for 8G"),
        (Limit("Max", "cpu", "Mins", "PJ", "QOS a", value=30), 90, "a job 30 core minutes; this run asks for 90 core"),
        (Limit("Max", "cpu", per="PN", owner="QOS a", value=1), 2, "a node of a job 1 core; this run asks for 2"),
        (Limit("Max", "node", per="PA", owner="QOS a", value=4, used=4), 1, "an account 4 nodes: 4 in use, and this"),
        (Limit("Grp", WALL, owner="QOS a", value=3000, used=2999), 30, "together 2-02:00:00: 2-01:59:00 in use"),
    ],
)
def test_amounts_are_in_the_units_of_submissions(limit: Limit, asked: int, words: str) -> None:
    assert limit.is_in_the_way(asked)
    assert words in limit.sentence(asked)


def test_least_amount_is_explained() -> None:
    limit = Limit("Min", "gres/gpu", per="PJ", owner="QOS a", value=2)
    assert limit.is_in_the_way(1)
    assert not limit.is_in_the_way(2)
    assert limit.sentence(1) == "QOS a requires at least 2 GPUs of a job; this run asks for 1"


@pytest.mark.parametrize("reason", reasons())
def test_each_reason_that_names_a_limit_is_known(reason: str) -> None:
    """Those in the library of either release."""
    named, meaning = limits.named_by(reason), wait_reasons.explained(reason)
    assert named is not None
    assert meaning is not None
    assert ("account" if reason.startswith("Assoc") else "QOS") in meaning.words
    assert ("can never start" in meaning.words) == ("PerJob" in reason or "PerNode" in reason or "Min" in reason[:6])


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "a node that it needs is down, drained or reserved"),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "it would not end before a maintenance of nodes that it needs"),
        ("JobHeldAdmin", "it is held by an administrator"),
        ("InvalidQOS", "it can never start: its QOS does not exist any more"),
    ],
)
def test_other_reasons_are_explained(reason: str, words: str) -> None:
    meaning = wait_reasons.explained(reason)
    assert meaning is not None
    assert meaning.words == words


def test_unknown_reasons_are_left_as_they_are() -> None:
    assert [wait_reasons.explained(reason) for reason in ("", "MaxCPUsPerNode", "QOSMaxFunPerUser", "x" * 999)] == [
        None
    ] * 4


def test_limits_of_each_qos_are_read_from_sacctmgr() -> None:
    output = (
        "normal|||||||||||||||\nshort||||||||01:00:00|gres/gpu=2|4|9||||\n"
        "tiny|||||gres/gpu=1,mem=4G|cpu=1|cpu=30||||1|cpu=9|||cpu=1\na banner\n"
    )
    found = limits.parse_qos(output)
    assert list(found) == ["normal", "short", "tiny"]
    assert [limit.short() for limit in found["short"]] == [
        "1:00:00 a job",
        "2 GPUs",
        "4 running jobs",
        "9 queued or running jobs",
    ]
    assert [limit.short() for limit in found["tiny"]] == [
        "1 GPU a job",
        "4G of memory a job",
        "1 core a node",
        "30 core minutes a job",
        "1 queued or running job",
        "9 cores for an account",
        "at least 1 core a job",
    ]


@pytest.mark.parametrize(
    ("job", "asked"),
    [
        (
            {"TRES": "cpu=4,mem=4000M,node=2,billing=4,gres/gpu=2", "TimeLimit": "1-00:30:00"},
            {"cpu": 4, "mem": 4000, "node": 2, "gres/gpu": 2, WALL: 1470},
        ),
        ({"ReqTRES": "cpu=1,mem=1.50G,gres/gpu:a100=1", "TRES": "(null)"}, {"mem": 1536, "gres/gpu:a100": 1}),
        ({"TimeLimit": "UNLIMITED"}, {}),
    ],
)
def test_what_a_job_asks_for_is_read(job: dict[str, str], asked: dict[str, int]) -> None:
    found = limits.asked_of(job)
    assert asked.items() <= found.items()
    assert (WALL in found) == (WALL in asked)


@pytest.mark.parametrize("release", RELEASES)
def test_reservations_are_parsed(release: str) -> None:
    maintenance, course = site.parse_reservations((RECORDED / f"reservation-{release}.txt").read_text())
    assert (maintenance.name, maintenance.is_maintenance, maintenance.nodes) == ("maint", True, "n[1-4]")
    assert maintenance.sentence == "a maintenance from 2026-11-29 13:42 to 2026-11-29 15:42 on n[1-4]"
    assert course.start == datetime(2026, 11, 29, 22, 42, course.start.second)
    assert course.sentence.startswith("reservation course from 2026-11-29 22:42 to 2026-11-30 00:42 on n3")
    assert [maintenance.shares(nodes) for nodes in ("n3", "n[4-9]", "m1", "")] == [True, True, False, False]
    assert [maintenance.has_all(nodes) for nodes in ("n3", "n[4-9]", "")] == [True, False, False]


def test_site_without_reservations_has_none() -> None:
    assert site.parse_reservations("No reservations in the system\n") == []
