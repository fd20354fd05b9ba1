"""Starts of jobs in the words of sacct."""

from __future__ import annotations

from datetime import datetime

from mgpu_slurm.slurm import accounting
from mgpu_slurm.slurm.accounting import AccountedStart


def test_sacct_command_asks_for_every_start() -> None:
    assert accounting.sacct_command(["42", "43"]) == [
        "sacct",
        "--noheader",
        "-P",
        "-X",
        "-D",
        "-o",
        "JobID,State,Submit,Start,End,JobName",
        "-j",
        "42,43",
    ]


def test_parse_sacct_orders_the_starts_of_a_requeued_job() -> None:
    output = (
        "42|CANCELLED by 1000|2024-05-01T12:00:00|2024-05-01T12:05:00|2024-05-01T13:00:00|a|b\n"
        "42|PREEMPTED|2024-05-01T10:00:00|2024-05-01T10:00:05|2024-05-01T12:00:00|a|b\n"
        "43|FAILED|2024-05-01T12:00:01|2024-05-01T12:00:02|2024-05-01T12:00:09|c\n"
        "44|PENDING|2024-05-01T12:00:02|Unknown|Unknown|d\n"
        "45|CANCELLED|2024-05-01T12:00:03|None|2024-05-01T12:00:09|e\n"
    )
    assert accounting.parse_sacct(output) == [
        AccountedStart("42", "PREEMPTED", "2024-05-01T12:00:00", "a|b", "2024-05-01T10:00:00"),
        AccountedStart("42", "CANCELLED", "2024-05-01T13:00:00", "a|b", "2024-05-01T12:00:00", is_by_user=True),
        AccountedStart("43", "FAILED", "2024-05-01T12:00:09", "c", "2024-05-01T12:00:01"),
        AccountedStart("44", "PENDING", None, "d", "2024-05-01T12:00:02"),
        AccountedStart("45", "CANCELLED", "2024-05-01T12:00:09", "e", "2024-05-01T12:00:03"),
    ]


def test_jobs_that_started_when_nodes_were_taken_are_found() -> None:
    output = (
        "40|ann|main|2024-05-01T11:59:59\n"
        "41|bob|high|2024-05-01T12:00:00\n"
        "42_7|cy|urgent|2024-05-01T12:01:00\n"
        "43|dan|main|2024-05-01T12:01:01\n"
        "44|eve|main|Unknown\n"
    )
    assert accounting.parse_began(output, datetime(2024, 5, 1, 12)) == [
        accounting.Preemptor("41", "bob", "high"),
        accounting.Preemptor("42_7", "cy", "urgent"),
    ]


def test_parse_sacct_expands_the_tasks_that_never_started() -> None:
    output = "42_[3-4,7%2]|CANCELLED by 0|2024-05-01T12:00:00|None|2024-05-01T12:01:00|a\n"
    assert [start.job_id for start in accounting.parse_sacct(output)] == ["42_3", "42_4", "42_7"]
