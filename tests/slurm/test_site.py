"""What SLURM tells of a site. Outputs are those of a SLURM 22.05.8, with what other sites have added by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from mgpu_slurm.slurm import site
from mgpu_slurm.slurm.site import Association, Partition

PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO \
MaxCPUsPerNode=UNLIMITED Nodes=n[1-4] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO \
OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=16 TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) \
DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=16,mem=32000M,node=4,billing=16
PartitionName=gpu AllowGroups=ALL AllowAccounts=a,b AllowQos=ALL Default=NO QoS=part gpu DefaultTime=01:00:00 \
DisableRootJobs=NO ExclusiveUser=NO GraceTime=120 Hidden=NO MaxNodes=8 MaxTime=1-00:00:00 MinNodes=0 LLN=NO \
RootOnly=NO PreemptMode=OFF State=DRAIN TotalCPUs=16 TotalNodes=4 TRES=cpu=16,mem=32000M,node=4
PartitionName=admin Default=NO RootOnly=YES MaxTime=UNLIMITED State=UP
"""

NODES = """\
main|1|down*|gpu:2
main|1|drained|gpu:2
main|2|idle|gpu:2
gpu|3|mixed|gpu:a100:4(S:0-1),nvme:1
gpu|1|idle~|(null)
admin|1|idle|(null)
"""


def test_partitions_are_read_with_their_limits_and_their_nodes() -> None:
    assert site.parse_partitions(PARTITIONS, NODES) == [
        Partition(
            name="main",
            is_default=True,
            state="UP",
            max_time=None,
            default_time=None,
            max_nodes=None,
            preempt_mode="REQUEUE",
            grace=0,
            nodes=Counter({"idle": 2, "down*": 1, "drained": 1}),
            gpus_per_node=(2,),
        ),
        Partition(
            name="gpu",
            is_default=False,
            state="DRAIN",
            max_time="1-00:00:00",
            default_time="01:00:00",
            max_nodes=8,
            preempt_mode="OFF",
            grace=120,
            nodes=Counter({"mixed": 3, "idle~": 1}),
            gpus_per_node=(0, 4),
        ),
    ]


def test_nodes_that_get_no_jobs_do_not_count_as_usable() -> None:
    main, gpu = site.parse_partitions(PARTITIONS, NODES)
    assert (main.usable_nodes, gpu.usable_nodes) == (2, 4)


@pytest.mark.parametrize(
    "state", ["down", "down*", "drained", "draining", "drained*", "idle*", "maint", "fail", "unknown"]
)
def test_states_without_jobs(state: str) -> None:
    assert site.is_unusable(state)


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "completing", "reserved", "planned", "idle~", "idle#"])
def test_states_that_get_jobs_now_or_later(state: str) -> None:
    assert not site.is_unusable(state)


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("slurm-wlm 22.05.8\n", (22, 5, 8)),
        ("slurm 23.11.10-Bull.1\n", (23, 11, 10)),
        ("slurm 20.02\n", (20, 2)),
        ("slurm\n", ()),
    ],
)
def test_versions(output: str, version: tuple[int, ...]) -> None:
    assert site.parse_version(output) == version


def test_associations_with_and_without_limits() -> None:
    output = "root|||normal\nlab-a|4|100|long,normal\nsomething else\n"
    assert site.parse_associations(output) == [
        Association("root", None, None, ("normal",)),
        Association("lab-a", 4, 100, ("long", "normal")),
    ]


@pytest.mark.parametrize(
    ("output", "may"),
    [
        ("JobId=6 JobName=wrap Priority=1 Nice=0 Requeue=1 Restarts=0 BatchFlag=1", True),
        ("JobId=6 JobName=wrap Priority=1 Nice=0 Requeue=0 Restarts=0 BatchFlag=1", False),
        ("JobId=6 JobName=wrap", None),
    ],
)
def test_whether_a_job_may_be_requeued(output: str, may: bool | None) -> None:
    assert site.may_be_requeued(output) is may
