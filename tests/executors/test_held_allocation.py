"""What an allocation has, what a run takes of it, and how it ends; the texts are those of SLURM 22.05."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.executors import held_allocation
from mgpu_slurm.executors.held_allocation import Allocation, Node
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.run_folder import states
from tests.support import UNKNOWN_JOB, shows

SHOWN = """\
JobId=42 JobName=a b EndTime=never
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901751 Nice=0 Account=root QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0
   DerivedExitCode=0:0
   RunTime=00:00:00 TimeLimit=02:00:00 TimeMin=N/A
   SubmitTime=2024-05-01T12:58:30 EligibleTime=2024-05-01T12:58:30
   AccrueTime=Unknown
   StartTime=2024-05-01T12:58:30 EndTime=2024-05-01T14:58:30 Deadline=N/A
   PreemptEligibleTime=2024-05-01T12:58:30 PreemptTime=None
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2024-05-01T12:58:30 Scheduler=Main
   Partition=main AllocNode:Sid=ctl:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-3]
   BatchHost=n1
   NumNodes=3 NumCPUs=9 NumTasks=4 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,mem=2000M,node=2,billing=4
   Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=*
   JOB_GRES=gpu:5
     Nodes=n[1-2] CPU_IDs=0-2,6 Mem=1500 GRES=gpu:a100:2(IDX:0,3),nvme:1
     Nodes=n3 CPU_IDs=0 Mem=500 GRES=gpu:1(IDX:0)
   MinCPUsNode=1 MinMemoryCPU=500M MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   Command=(null)
   WorkDir=/tmp
   TresPerJob=gres:gpu:5

"""

PLAIN = """\
JobId=43 JobName=interactive
   JobState=RUNNING Reason=None Dependency=(null)
   StartTime=2024-05-01T12:58:30 EndTime=Unknown Deadline=N/A
   NodeList=n1
   NumNodes=1 NumCPUs=4 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   JOB_GRES=(null)
     Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=
"""


def held(**changes: Any) -> Allocation:
    """Two nodes of 4 cores, 2 GPUs and 1000 MB, for another hour."""
    nodes = (Node("n1", 4, 2, 1000), Node("n2", 4, 2, 1000))
    end = datetime.now() + timedelta(hours=1)
    whole = Allocation("42", "RUNNING", "None", nodes, ntasks_per_node=None, cpus_per_task=1, end=end)
    return replace(whole, **changes)


def test_allocation_is_parsed_from_scontrol() -> None:
    found = held_allocation.parse("42", SHOWN)
    assert found == Allocation(
        job_id="42",
        state="RUNNING",
        reason="None",
        nodes=(Node("n1", 4, 2, 1500), Node("n2", 4, 2, 1500), Node("n3", 1, 1, 500)),
        ntasks_per_node=2,
        cpus_per_task=2,
        end=datetime(2024, 5, 1, 14, 58, 30),
    )
    assert held_allocation.parse("42", SHOWN + PLAIN) == found, "the first component of a heterogeneous job"


def test_allocation_without_limits_or_gpus_is_parsed() -> None:
    found = held_allocation.parse("43", PLAIN)
    assert (found.nodes, found.ntasks_per_node, found.end) == ((Node("n1", 4, 0, 0),), None, None)
    assert found.seconds_left is None
    assert found.describe() == "job 43, n1, no time limit"
    assert held_allocation.take(found, {"mem": "64G"}) == Resources(nodes=1, mem="64G")


def test_run_takes_the_whole_allocation_by_default() -> None:
    assert held_allocation.take(held(), {}) == Resources(nodes=2, gpus_per_node=2)
    assert held_allocation.take(held(ntasks_per_node=4), {}) == Resources(nodes=2, gpus_per_node=2, ntasks_per_node=4)
    assert held_allocation.take(held(nodes=(Node("n1", 4, 2, 0), Node("n2", 1, 1, 0))), {}).gpus_per_node == 1


def test_requested_resources_override_the_allocation() -> None:
    asked = {"nodes": 1, "ntasks-per-node": 1, "gpus-per-node": 0, "cpus-per-task": 3, "mem": "500", "time": "30"}
    wanted = Resources(nodes=1, ntasks_per_node=1, gpus_per_node=0, cpus_per_task=3, mem="500", time="30")
    assert held_allocation.take(held(ntasks_per_node=4, cpus_per_task=2), asked) == wanted


def test_cpus_per_task_is_inherited_if_the_cores_suffice() -> None:
    assert held_allocation.take(held(cpus_per_task=2), {}).cpus_per_task == 2
    assert held_allocation.take(held(cpus_per_task=4), {}).cpus_per_task is None
    assert held_allocation.take(held(cpus_per_task=4), {"ntasks-per-node": 1}).cpus_per_task == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 3}, r"--nodes 3: allocation 42 has 2 for this run \(n\[1-2\]\)"),
        ({"nodes": 2, "nodelist": "n2"}, r"--nodes 2: allocation 42 has 1 for this run \(n2\)"),
        ({"gpus-per-node": 3}, "--gpus-per-node 3: allocation 42 has 2 on n1"),
        ({"cpus-per-task": 3}, "--cpus-per-task 3: 2 ranks on a node need 6 cores, but allocation 42 has 4 on n1"),
        ({"mem": "1G"}, "--mem 1G: allocation 42 has 1000M on n1"),
        ({"mem": "much"}, "--mem 'much': expected a number with K, M, G or T"),
        ({"time": "2:00:00"}, "--time 2:00:00: allocation 42 has 0:59:5.* left"),
        ({"partition": "gpu"}, "--partition gpu: allocation 42 has fixed this"),
        ({"account": "a"}, "--account a: allocation 42 has fixed"),
        ({"qos": "high"}, "--qos high: allocation 42 has fixed"),
        ({"constraint": "a100"}, "--constraint a100: allocation 42 has fixed"),
        ({"reservation": "r"}, "--reservation r: allocation 42 has fixed"),
        ({"sbatch": {"mail-type": "END"}}, "--sbatch mail-type: allocation 42 does not use sbatch"),
        ({"nodelist": "n[2-3]"}, r"--nodelist n\[2-3\]: n3 is not in allocation 42, which has n\[1-2\]"),
        ({"exclude": "n[1-4]"}, r"--exclude n\[1-4\]: leaves no node of allocation 42"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_request_the_allocation_cannot_satisfy_is_rejected(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        held_allocation.take(held(), given)


def names(resources: Resources, *, nodes: tuple[Node, ...] = held().nodes, busy: dict[str, int] | None = None) -> str:
    return ",".join(node.name for node in held_allocation.choose(held(nodes=nodes), resources, busy))


def test_least_busy_nodes_with_enough_resources_are_chosen() -> None:
    assert names(Resources(nodes=1)) == "n1"
    assert names(Resources(nodes=1), busy={"n1": 1}) == "n2"
    assert names(Resources(nodes=1), busy={"n1": 1, "n2": 2}) == "n1"
    assert names(Resources(nodes=1, exclude="n1")) == "n2"
    assert names(Resources(nodes=1, nodelist="n2")) == "n2"
    three = (Node("a", 4, 0, 0), *held().nodes)
    assert names(Resources(nodes=2, gpus_per_node=1), nodes=three, busy={"n1": 9}) == "n1,n2"


def options(resources: Resources, **changes: Any) -> list[str]:
    found = held(**changes)
    return held_allocation.srun_options(found, held_allocation.choose(found, resources), resources, "run-1")


def test_srun_options_name_all_resources_of_the_step() -> None:
    place = ["--jobid=42", "--overlap", "--job-name=run-1", "--nodelist=n1,n2"]
    both = Resources(nodes=2, gpus_per_node=2)
    assert options(both) == [*place, "--gres=gpu:2"]
    assert options(replace(both, cpus_per_task=2, mem="500M")) == [
        *place,
        "--cpus-per-task=2",
        "--gres=gpu:2",
        "--mem=500M",
    ]
    assert options(replace(both, gpu_type="a100"))[-1] == "--gres=gpu:a100:2"
    # without the word a step gets all GPUs of the job
    assert options(Resources(nodes=2, gpus_per_node=0)) == [*place, "--gres=none"]
    no_gpus = (Node("n1", 4, 0, 0), Node("n2", 4, 0, 0))
    assert options(Resources(nodes=2, gpus_per_node=0), nodes=no_gpus) == place
    assert options(Resources(nodes=2, ntasks_per_node=5)) == [*place, "--overcommit"]


def test_time_limit_is_the_shorter_of_requested_and_remaining() -> None:
    assert held().limit(Resources(time="10")) == 600
    limit = held().limit(Resources(time="10:00:00"))
    assert limit is not None
    assert 3590 < limit <= 3600
    assert held(end=None).limit(Resources()) is None
    assert held(end=datetime.now() - timedelta(seconds=5)).limit(Resources()) == 0


@pytest.mark.parametrize(
    ("ended", "state", "words"),
    [
        (states.TIMEOUT, states.TIMEOUT, "reached its time limit"),
        (states.CANCELLED, states.CANCELLED, "was cancelled"),
        (states.COMPLETED, states.CANCELLED, "was released"),
        (states.FAILED, states.CANCELLED, "was released"),
        (states.NODE_FAIL, states.NODE_FAIL, "lost a node"),
        (states.PREEMPTED, states.PREEMPTED, "was preempted"),
        (states.UNKNOWN, states.CANCELLED, "was released"),
    ],
)
def test_end_of_the_allocation_determines_the_run_state(ended: str, state: str, words: str) -> None:
    assert held_allocation.ending("42", ended) == (
        state,
        f"its allocation 42 {words}; continue with `resume` inside a new one",
    )


# -- a SLURM that is played by scripts


SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def test_missing_allocation_error_suggests_salloc() -> None:
    with pytest.raises(UserError, match=r"you hold no allocation here \(SLURM_JOB_ID is not set\): .*`salloc "):
        held_allocation.held({})


@pytest.mark.parametrize(
    ("script", "how"),
    [
        (UNKNOWN_JOB, "that allocation has ended:"),
        (shows(SHOWN.replace("RUNNING", "TIMEOUT")), r"that allocation has ended \(TIMEOUT\):"),
        (shows(SHOWN.replace("RUNNING", "COMPLETING")), r"that allocation has ended \(COMPLETING\):"),
    ],
    ids=["forgotten", "ended", "ending"],
)
def test_ended_allocation_is_rejected(answers: Callable[[str, str], None], script: str, how: str) -> None:
    answers("scontrol", script)
    with pytest.raises(UserError, match=how):
        held_allocation.held({"SLURM_JOB_ID": "42"})


def test_silent_controller_does_not_end_an_allocation(answers: Callable[[str, str], None]) -> None:
    answers("scontrol", SILENT)
    with pytest.raises(ClusterError):
        held_allocation.held({"SLURM_JOB_ID": "42"})
    assert held_allocation.lost("42") is None


def test_lost_returns_how_the_allocation_ended(answers: Callable[[str, str], None], tmp_path: Path) -> None:
    answers("scontrol", shows(SHOWN))
    assert held_allocation.lost("42") is None
    answers("scontrol", shows(SHOWN.replace("JobState=RUNNING", "JobState=NODE_FAIL")))
    assert held_allocation.lost("42") == held_allocation.ending("42", states.NODE_FAIL)
    answers("scontrol", UNKNOWN_JOB)
    assert held_allocation.lost("42") == held_allocation.ending("42", states.UNKNOWN)
    # it may be waiting for the very process that asks
    answers("scontrol", shows(SHOWN.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit")))
    assert held_allocation.lost("42") == held_allocation.ending("42", states.TIMEOUT)
    # one that is ending without a reason says a moment later how
    ending, over = SHOWN.replace("RUNNING", "COMPLETING"), SHOWN.replace("RUNNING", "PREEMPTED")
    answers(
        "scontrol", f"test -e {tmp_path}/asked || {{ {shows(ending)}\ntouch {tmp_path}/asked; exit; }}\n{shows(over)}"
    )
    assert held_allocation.lost("42") == held_allocation.ending("42", states.PREEMPTED)
