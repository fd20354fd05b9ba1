"""What SLURM tells of a site. Outputs are those of a SLURM 22.05.8, with what other sites have added by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import site
from mgpu_slurm.slurm.site import Association, NodeGroup, Partition
from tests.slurm.conftest import FakeCommand

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


def test_partitions_are_parsed_with_limits_and_nodes() -> None:
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
            gpus=(Counter({"": 2}),),
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
            gpus=(Counter(), Counter(a100=4)),
        ),
    ]


def test_unusable_nodes_are_not_counted_as_usable() -> None:
    main, gpu = site.parse_partitions(PARTITIONS, NODES)
    assert (main.usable_nodes, gpu.usable_nodes) == (2, 4)


@pytest.mark.parametrize(
    "state", ["down", "down*", "drained", "draining", "drained*", "idle*", "maint", "fail", "unknown"]
)
def test_node_state_that_gets_no_jobs_is_unusable(state: str) -> None:
    assert site.is_unusable(state)


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "completing", "reserved", "planned", "idle~", "idle#"])
def test_node_state_that_gets_jobs_is_usable(state: str) -> None:
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
def test_slurm_version_is_parsed(output: str, version: tuple[int, ...]) -> None:
    assert site.parse_version(output) == version


def test_associations_are_parsed() -> None:
    output = "root|normal\nlab-a|long,normal\nsomething else\n"
    assert site.parse_associations(output) == [
        Association("root", ("normal",)),
        Association("lab-a", ("long", "normal")),
    ]


@pytest.mark.parametrize(
    ("output", "may"),
    [
        ("JobId=6 JobName=wrap Priority=1 Nice=0 Requeue=1 Restarts=0 BatchFlag=1", True),
        ("JobId=6 JobName=wrap Priority=1 Nice=0 Requeue=0 Restarts=0 BatchFlag=1", False),
        ("JobId=6 JobName=wrap", None),
    ],
)
def test_requeue_permission_is_parsed(output: str, may: bool | None) -> None:
    assert site.may_be_requeued(output) is may


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("", {}),
        ("gpu:4", {"": 4}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0,2-3),nvme:1", {"a100": 4}),
        ("gpu:v100:2(S:0),gpu:a100:6(S:1)", {"v100": 2, "a100": 6}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", {"a100": 4}),
        ("nvme:2,mps:400,shard:gpu:16", {}),
        ("gpu:1g.10gb:7", {"1g.10gb": 7}),
        ("gpu:no_consume:2", {"": 2}),
    ],
)
def test_gpus_are_counted_in_generic_resources_by_type(gres: str, gpus: dict[str, int]) -> None:
    assert site.gpus_in(gres) == gpus


def test_sinfo_command() -> None:
    assert site.sinfo_command(None) == ["sinfo", "--noheader", "--all", "-o", "%P|%D|%G"]
    # sinfo 22.05: "Conflicting options, -a and -p, specified"
    assert site.sinfo_command("gpu,big") == ["sinfo", "--noheader", "--partition=gpu,big", "-o", "%P|%D|%G"]


def test_gpus_per_node_is_the_minimum_of_the_gpu_nodes() -> None:
    groups = site.parse_sinfo("cpu*|20|(null)\ngpu|4|gpu:a100:8(S:0-1)\ngpu|2|gpu:v100:4(S:0-1)\ngpu|1|(null)\n")
    assert groups == [
        NodeGroup(True, 0),
        NodeGroup(False, 8),
        NodeGroup(False, 4),
        NodeGroup(False, 0),
    ]
    assert site.gpus_of(groups, None) == 0
    assert site.gpus_of(groups[1:], "gpu") == 4
    assert site.gpus_of([], "gpu") == 0


def test_gpus_per_node_asks_the_cluster(fake_command: FakeCommand) -> None:
    answers = 'case "$*" in *--partition=gpu*) echo "gpu|4|gpu:a100:8(S:0-1)";; *) echo "cpu*|9|(null)";; esac'
    fake_command("sinfo", answers)
    assert (site.gpus_per_node("gpu"), site.gpus_per_node(None)) == (8, 0)


def test_unknown_partition_is_named_in_the_error(fake_command: FakeCommand) -> None:
    # sinfo says nothing of it, and that with exit code 0
    fake_command("sinfo", 'case "$*" in *--partition=*) ;; *) echo cpu; echo gpu;; esac')
    with pytest.raises(ClusterError, match=r"^--partition gpuu: no such partition; there are cpu, gpu$"):
        site.gpus_per_node("gpuu")


@pytest.mark.parametrize(
    ("text", "ports"), [("60001-60003", [60001, 60002, 60003]), ("0-0", None), ("(null)", None), ("", None)]
)
def test_srun_port_range_is_parsed(text: str, ports: list[int] | None) -> None:
    found = site.parse_ports(text)
    assert (None if found is None else list(found)) == ports


def test_cluster_name_comes_from_slurm_conf_or_scontrol(
    fake_command: FakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_command("scontrol", 'echo "ClusterName             = asked"')
    files = {
        "alpha": 'ControlMachine=x\n  clustername = "Alpha"# ours\n',
        "included": "Include more.conf\n#ClusterName=no\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = {}
    for name in (*files, "not-there"):
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / name))
        found[name] = site.cluster_name()
    assert found == {"alpha": "alpha", "included": "asked", "not-there": "asked"}
    fake_command("scontrol", "exit 1")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "not-there-either"))
    assert site.cluster_name() is None
