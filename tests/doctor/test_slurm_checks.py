"""What is made of a SLURM's version, partitions and settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from mgpu_slurm.doctor import slurm_checks
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.slurm.pending.limits import Limit
from mgpu_slurm.slurm.site import Association, Partition, Reservation

MAIN = Partition("main", True, "UP", None, None, None, "OFF", 0, Counter({"idle": 4}), (Counter({"": 2}),))


def seen(finding: Finding) -> tuple[str, str]:
    return finding.level, finding.text


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ((22, 5, 8), "ok", "SLURM 22.05.8: supported; ranks get their cores by SRUN_CPUS_PER_TASK"),
        (
            (21, 8),
            "warning",
            "SLURM 21.08: older than 22.05, the oldest release that mgpu_slurm is tested on; nothing is refused",
        ),
        ((20, 2, 7), "failed", "SLURM 20.02.7: srun has no --overlap before 20.11"),
    ],
)
def test_slurm_version_is_checked_for_support(version: tuple[int, ...], level: str, words: str) -> None:
    assert seen(slurm_checks.version_finding(version)) == (level, words)


@pytest.mark.parametrize(
    ("partition", "level", "words"),
    [
        (MAIN, "ok", "partition main (default): 4 nodes, 2 GPUs each, no time limit"),
        (
            replace(
                MAIN,
                max_time="1-00:00:00",
                default_time="01:00:00",
                max_nodes=8,
                gpus=(Counter(), Counter(v100=4), Counter(v100=2, a100=6)),
            ),
            "ok",
            "partition main (default): 4 nodes, 0, 4 (v100) or 8 (2 v100, 6 a100) GPUs each,"
            " time limit 1-00:00:00 (default 01:00:00), at most 8 nodes a job",
        ),
        (
            replace(
                MAIN, is_default=False, nodes=Counter({"idle": 1, "down*": 2}), max_time="60:00", gpus=(Counter(),)
            ),
            "ok",
            "partition main: 3 nodes (2 down*), no GPUs, time limit 60:00 (default the limit)",
        ),
        (
            replace(MAIN, gpus=(Counter({"": 2}), Counter(a100=2))),
            "ok",
            "partition main (default): 4 nodes, 2 (no type) or 2 (a100) GPUs each, no time limit",
        ),
        (
            replace(MAIN, gpus=(Counter(a100=1),)),
            "ok",
            "partition main (default): 4 nodes, 1 GPU (a100) each, no time limit",
        ),
        (
            replace(MAIN, state="INACTIVE"),
            "warning",
            "partition main (default): 4 nodes, 2 GPUs each, no time limit: it is INACTIVE",
        ),
        (
            replace(MAIN, nodes=Counter({"drained": 1})),
            "failed",
            "partition main (default): 1 node (1 drained), 2 GPUs each, no time limit: none of its nodes is usable",
        ),
        (
            replace(MAIN, is_default=False, nodes=Counter({"drained": 1})),
            "warning",
            "partition main: 1 node (1 drained), 2 GPUs each, no time limit: none of its nodes is usable",
        ),
    ],
    ids=[
        "plain",
        "limits",
        "some down",
        "some of a type",
        "one",
        "inactive",
        "default without usable nodes",
        "other without usable nodes",
    ],
)
def test_partition_is_described_with_limits_and_unusable_nodes(partition: Partition, level: str, words: str) -> None:
    assert seen(slurm_checks.partition_finding(partition)) == (level, words)


def test_slow_controller_is_a_warning() -> None:
    assert seen(slurm_checks.controller_finding("hpc", 0.02)) == ("ok", "controller of hpc answers in 20 ms")
    assert seen(slurm_checks.controller_finding("hpc", 4.0)) == ("warning", "controller of hpc answers in 4.0 s")


def settings(**changed: str) -> dict[str, str]:
    usual = {"JobRequeue": "1", "MaxArraySize": "1001", "KillWait": "30 sec", "SelectType": "select/cons_tres"}
    return usual | {"JobSubmitPlugins": "(null)"} | changed


def test_usual_settings_are_ok() -> None:
    found = list(slurm_checks.setting_findings(settings(), [MAIN]))
    assert [seen(finding) for finding in found] == [
        ("ok", "runs request requeueing; if it is refused, they submit a job that continues them"),
        ("ok", "a job array holds at most 1001 runs; larger groups use several arrays"),
        ("ok", "a cancelled run has 30 s to save (KillWait)"),
    ]


@pytest.mark.parametrize(
    ("changed", "partition", "level", "words"),
    [
        ({"JobRequeue": "0"}, MAIN, "ok", "which is not the site's default (JobRequeue=0)"),
        ({"KillWait": "15 sec"}, MAIN, "warning", "a cancelled run has 15 s to save"),
        ({}, replace(MAIN, preempt_mode="REQUEUE", grace=60), "ok", "a preempted one 90 s"),
        ({}, replace(MAIN, preempt_mode="CANCEL"), "warning", "preemption cancels runs in main, and does not requeue"),
        ({"SelectType": "select/cons_res"}, MAIN, "warning", "SLURM does not count GPUs with --gpus-per-node"),
        ({"JobSubmitPlugins": "lua"}, MAIN, "ok", "JobSubmitPlugins=lua: the site may change or refuse"),
    ],
)
def test_unusual_settings_are_reported(changed: dict[str, str], partition: Partition, level: str, words: str) -> None:
    found = [f for f in slurm_checks.setting_findings(settings(**changed), [partition]) if words in f.text]
    assert [finding.level for finding in found] == [level]


def test_missing_settings_are_not_reported() -> None:
    assert list(slurm_checks.setting_findings({}, [MAIN])) == []


def test_accounts_and_the_limits_of_each_account_and_qos_are_named() -> None:
    rights = [Association("a", ("long",)), Association("b", ("long",)), Association("b", ())]
    found = [
        Limit("Grp", "gres/gpu", owner="account b", value=6),
        Limit("Max", "jobs", owner="account b", is_of_user=True, value=4),
        Limit("Max", "wall", per="PJ", owner="QOS long", value=2880),
    ]
    assert list(map(seen, slurm_checks.limit_findings(rights, found))) == [
        ("ok", "accounts a, b"),
        ("ok", "account b: at most 6 GPUs for all of its jobs together, 4 running jobs"),
        ("ok", "QOS long: at most 2-00:00:00 a job"),
    ]
    assert list(slurm_checks.limit_findings([], [])) == []


def test_reservations_ahead_are_reported() -> None:
    start = datetime(2026, 5, 1, 12)
    maintenance = Reservation("m", start, start + timedelta(hours=2), "n[1-4]", is_maintenance=True)
    when = "from 2026-05-01 12:00 to 2026-05-01 14:00 on n[1-4]"
    before = slurm_checks.reservation_finding(maintenance, start - timedelta(minutes=90))
    assert seen(before) == ("warning", f"a maintenance {when}, 1:30:00 from now")
    during = slurm_checks.reservation_finding(maintenance, start)
    assert seen(during) == ("warning", f"a maintenance {when}: no run starts there")
    course = slurm_checks.reservation_finding(replace(maintenance, name="course", is_maintenance=False), start)
    assert seen(course) == ("ok", f"reservation course {when}: only its users get these nodes")


def test_sbatch_variables_that_do_not_reach_runs_are_named() -> None:
    (found,) = slurm_checks.variable_findings({"SBATCH_ACCOUNT": "lab", "SBATCH_EXPORT": "NONE", "SBATCH_MEM": "4"})
    assert seen(found) == ("warning", "SBATCH_EXPORT, SBATCH_MEM in this shell do not reach runs")
    assert list(slurm_checks.variable_findings({"SLURM_CONF": "/etc"})) == []
