"""Why a run waits: limits and maintenances that SLURM keeps, in the words of `status`, `why` and `doctor`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.on_slurm.cluster import Cluster
from tests.on_slurm.users import User
from tests.support import Project, wait_until

SLEEP = ("--", "sleep", "600")
ENFORCED = ("AccountingStorageEnforce=associations,limits,qos", "AccountingStorageTRES=gres/gpu")


@pytest.fixture
def limited(cluster: Cluster) -> None:
    """A site with limits: of a user and a job in QOS small, of all jobs of QOS large, and of a user of account lab."""
    cluster.change_site(lines=ENFORCED)
    for words in (
        ("add", "qos", "small", "MaxTRESPerUser=gres/gpu=2", "MaxWall=1:00:00"),
        ("add", "qos", "strict", "MaxSubmitJobsPerUser=0", "Flags=DenyOnLimit"),
        ("add", "qos", "large", "GrpTRES=gres/gpu=1"),
        ("add", "account", "lab", "GrpTRES=gres/gpu=6"),
        ("add", "user", "student", "account=lab", "qos=normal,small,large,strict", "MaxJobs=1", "MaxSubmitJobs=8"),
        ("add", "user", "colleague", "account=lab", "qos=normal,small,large"),
    ):
        # what an earlier test has added is there already
        cluster.run("sacctmgr", "--immediate", *words)


def call(user: User, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the program with a runs folder and an index of runs that other tests do not look at."""
    home = user.cluster.home(user.name)
    return user.call(*words, MGPU_RUNS=str(home / "limits/runs"), XDG_STATE_HOME=str(home / "limits/state"))


def submit(user: User, name: str, *words: str) -> str:
    done = call(user, "submit", "--json", "--name", name, *words, *SLEEP)
    assert done.returncode == 0, done.stderr
    run: str = json.loads(done.stdout)["run"]
    return run


def reason_of(user: User, run: str) -> str:
    (facts,) = json.loads(call(user, "status", "--json", run).stdout)
    return f"{facts['state']} {facts['reason']}"


def waits(user: User, run: str, reason: str) -> dict[str, Any]:
    """What `why` tells, once SLURM has this reason."""
    wait_until(lambda: f"PENDING {reason}" in reason_of(user, run))
    (facts,) = json.loads(call(user, "why", "--json", run).stdout)
    found: dict[str, Any] = facts["waits"]
    return found


@pytest.mark.usefixtures("limited")
def test_limits_are_explained_with_their_values_and_what_is_used(student: User, colleague: User) -> None:
    first = submit(colleague, "first", "--qos", "small", "--gpus-per-node", "2", "--time", "50")
    wait_until(lambda: "RUNNING" in reason_of(colleague, first))
    run = submit(colleague, "second", "--qos", "small", "--gpus-per-node", "1", "--time", "50")
    found = waits(colleague, run, "QOSMaxGRESPerUser: its QOS allows a user no more GPUs at the same time")
    assert found["words"] == "QOS small allows you 2 GPUs: 2 in use, and this run asks for 1"
    assert re.fullmatch(rf"wait for your other {first} \(job \d+, [\d:]+ left\)", found["fix"])
    lines = call(colleague, "why", run).stdout.splitlines()
    assert lines[2:] == [f"waits     {found['words']}", lines[3]]
    assert lines[3].startswith(f"fix       wait for your other {first} (job ")

    run = submit(colleague, "long", "--qos", "small", "--gpus-per-node", "0", "--time", "90")
    found = waits(
        colleague, run, "QOSMaxWallDurationPerJobLimit: it can never start: it asks for more time than its QOS"
    )
    assert found["words"] == "QOS small allows a job 1:00:00; this run asks for 1:30:00"
    assert found["fix"] == "cancel it, and `resume` it with --time 1:00:00 or less"

    run = submit(colleague, "group", "--qos", "large", "--gpus-per-node", "2", "--time", "20")
    found = waits(colleague, run, "QOSGrpGRES: its QOS allows all of its jobs together no more GPUs")
    assert found["words"] == "QOS large allows all of its jobs together 1 GPU: 0 in use, and this run asks for 2"
    assert found["fix"] == "cancel it, and `resume` it with at most 1 GPU"

    only = submit(student, "only", "--gpus-per-node", "0")
    wait_until(lambda: "RUNNING" in reason_of(student, only))
    run = submit(student, "more", "--gpus-per-node", "0")
    found = waits(student, run, "AssocMaxJobsLimit: its account allows you no more running jobs at the same time")
    assert found["words"] == "account lab allows you 1 running job: 1 is running"
    assert found["fix"].startswith(f"wait for your other {only} (job ")

    done = call(student, "submit", "--gpus-per-node", "0", "--qos", "strict", *SLEEP)
    assert (done.returncode, done.stderr) == (
        3,
        "mgpu-slurm: sbatch refused the job: sbatch: error: QOSMaxSubmitJobPerUserLimit:"
        " its QOS allows a user no more queued and running jobs at the same time\n",
    )

    shown = call(student, "doctor").stdout
    assert (
        "account lab: at most 6 GPUs for all of its jobs together, 1 running job, 8 queued or running jobs\n" in shown
    )
    assert "QOS small: at most 1:00:00 a job, 2 GPUs\n" in shown


@pytest.fixture
def maintenance(cluster: Cluster) -> Iterator[datetime]:
    """When the maintenance of all nodes starts: in an hour, for two hours."""
    start = (datetime.now() + timedelta(hours=1)).replace(microsecond=0)
    words = (f"StartTime={start.isoformat()}", "Duration=120", "Users=root", "Nodes=ALL", "Flags=MAINT,IGNORE_JOBS")
    made = cluster.run("scontrol", "create", "reservation", "ReservationName=power", *words)
    assert made.returncode == 0, made.stderr
    yield start
    cluster.run("scontrol", "delete", "ReservationName=power")


def test_run_that_reaches_into_a_maintenance_starts_with_a_shorter_limit(
    slurm_project: Project, cluster: Cluster, maintenance: datetime
) -> None:
    run = slurm_project.submit("--gpus-per-node", "0", "--time", "90", "--", "true").name
    until = f"expected to start at {(maintenance + timedelta(hours=2)).isoformat(sep=' ')}"
    wait_until(lambda: until in slurm_project.json("status", run)[0]["reason"])
    assert slurm_project.json("status", run)[0]["reason"] == (
        "ReqNodeNotAvail, Reserved for maintenance: it would not end before a maintenance of nodes that it needs, "
        + until
    )
    (facts,) = slurm_project.json("why", run)
    form = f"{maintenance:%Y-%m-%d %H:%M} to {maintenance + timedelta(hours=2):%Y-%m-%d %H:%M}"
    found = re.fullmatch(
        rf"a maintenance from {form} on n\[1-4\]: with --time (0:5\d:00) or less it could start before",
        facts["waits"]["words"],
    )
    assert found is not None, facts
    # what it advises
    command = facts["waits"]["fix"].split("`")[1]
    assert command.endswith(f" TimeLimit={found[1]}")
    (findings,) = [json.loads(slurm_project.call("doctor", "--json").stdout)]
    (reserved,) = [each for each in findings if each["check"] == "reservations"]
    assert reserved["level"] == "warning"
    assert reserved["text"].startswith(f"a maintenance from {form} on n[1-4], 0:5")
    done = cluster.run(*command.split())
    assert done.returncode == 0, done.stderr
    assert slurm_project.call("wait", run).returncode == 0
