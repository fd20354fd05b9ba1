"""Sweeps of commands: each trial starts a script on every rank, which may know nothing of it, or report by attach()."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests import wrappers
from tests.support import Project, processes_of, wait_until

SCRIPT = """
    import argparse
    import json
    import os
    import signal
    import sys

    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=float)
    parser.add_argument("--kind")
    parser.add_argument("--more", type=int)
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    print(given, flush=True)

    if given.kind == "plain":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        dist.destroy_process_group()
        print(json.dumps({"score": given.x * float(ranks), "kind": "text"}))
    elif given.kind == "fails" and rank == 1:
        sys.exit("no data on this node")
    elif given.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif given.kind == "terminated" and rank == 0:
        signal.raise_signal(signal.SIGTERM)
    elif given.kind == "forged":
        from mgpu_slurm.core.errors import ForgeryError

        # both: a rank that does not end is waited for
        raise ForgeryError("not of a rank")
    elif given.kind in ("fails", "terminated"):
        signal.pause()
    else:
        import mgpu_slurm

        run = mgpu_slurm.attach()
        try:
            for epoch in range(1, 4):
                run.report(epoch, score=float("nan") if given.kind == "diverges" and epoch == 2 else given.x * epoch)
        except Exception:
            print("swallowed")
        print("done")
"""
SWEEP = """
    study: scripts
    job: {command: "python script.py --x {x} --kind {kind} --more {more}"}
    metric: score
    sampler: grid
    max_retries: 1
    resources: {nodes: 2}
    fixed: {x: 0.30000000000000004}
    space:
      kind: {choice: [plain, reports, fails, killed, diverges, terminated, forged]}
      more: {choice: [7], when: {kind: [plain]}}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Project:
    from tests.support import make_project

    project = make_project(tmp_path_factory.mktemp("commands"))
    project.write("script.py", SCRIPT)
    project.write("sweep.yaml", SWEEP)
    done = project.call("sweep", "sweep.yaml", "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def trial(project: Project, number: int) -> Path:
    return project.runs / "scripts" / "trials" / str(number)


def log(project: Project, number: int, rank: int = 0, attempt: int = 1) -> str:
    return (trial(project, number) / "logs" / f"{attempt}-{rank}.log").read_text()


def test_result_is_read_from_the_output_of_a_plain_script(swept: Project) -> None:
    # each trial has a rendezvous of its own, at which both ranks meet
    result = json.loads((trial(swept, 0) / "result.json").read_text())
    assert (result["state"], result["value"]) == ("COMPLETE", 2 * 0.30000000000000004)
    assert "more=7" in log(swept, 0)


def test_attached_script_reports_to_the_study(swept: Project) -> None:
    result = json.loads((trial(swept, 1) / "result.json").read_text())
    assert (result["value"], result["progress"]) == (0.30000000000000004 * 3, 3)
    metrics = [json.loads(line) for line in (trial(swept, 1) / "metrics.jsonl").read_text().splitlines()]
    assert [record["progress"] for record in metrics] == [1, 2, 3]
    # a parameter that is not there takes its option away
    assert "more=None" in log(swept, 1)


def test_failed_rank_ends_the_trial_and_its_message_is_recorded(swept: Project) -> None:
    failure = json.loads((trial(swept, 2) / "failure.json").read_text())
    assert failure["message"] == "its command ended with exit code 1: no data on this node"


def test_killed_command_is_retried_up_to_the_limit(swept: Project) -> None:
    failure = json.loads((trial(swept, 3) / "failure.json").read_text())
    assert failure["message"] == "its command was killed by SIGKILL (2 of 2 times)"
    assert "kind='killed'" in log(swept, 3, attempt=2)
    assert not (trial(swept, 3) / "logs" / "3-0.log").exists()


def test_pruned_trial_ends_on_all_ranks_despite_except_exception(swept: Project) -> None:
    result = json.loads((trial(swept, 4) / "result.json").read_text())
    assert (result["state"], result["reason"]) == ("PRUNED", "score is nan")
    for rank in range(2):
        said = log(swept, 4, rank)
        assert "stopped at progress 2" in said
        assert "swallowed" not in said
        assert "done" not in said


def test_terminated_rank_ends_the_trial_without_waiting_for_the_other(swept: Project) -> None:
    failure = json.loads((trial(swept, 5) / "failure.json").read_text())
    assert failure["message"] == "its command was killed by SIGTERM (2 of 2 times)"


def test_forgery_error_in_a_command_is_retried(swept: Project) -> None:
    failure = json.loads((trial(swept, 6) / "failure.json").read_text())
    error = "mgpu_slurm.core.errors.ForgeryError: not of a rank"
    assert failure["message"] == f"its command ended with exit code 1: {error} (2 of 2 times)"


def test_best_gives_the_command_line_and_the_values(swept: Project) -> None:
    best = swept.json("best", "scripts")
    assert best["number"] == 1
    assert best["command"].endswith("submit --nodes 2 -- python script.py --x 0.30000000000000004 --kind reports")
    yaml = swept.call("best", "scripts", "--yaml").stdout
    assert yaml == "x: 0.30000000000000004\nkind: reports\n"


@pytest.fixture
def heard(project: Project) -> Path:
    """The file of a trial's command that listens to signals, once it does so."""
    project.write("hear.py", wrappers.SCRIPT)
    project.write("hear.sh", "python hear.py $1\ntrue\n")
    heard = project.folder / "heard"
    project.write(
        "sweep.yaml",
        f"""
        study: heard
        job: {{command: "bash hear.sh {heard} {{x}}"}}
        metric: score
        trials: 1
        space: {{x: {{float: [0, 1]}}}}
        """,
    )
    assert project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow").returncode == 0
    wait_until(lambda: wrappers.heard(project, "heard") == ["ready"])
    return heard


def test_trial_behind_a_shell_gets_sigterm_once_and_saves(project: Project, heard: Path) -> None:
    assert project.call("cancel", "heard").returncode == 0
    assert project.call("wait", "heard", "--timeout", "90").returncode == 1
    assert wrappers.heard(project, "heard") == ["ready", "SIGTERM", "saved"]


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGTERM], ids=str)
def test_signal_that_only_the_worker_gets_is_passed_on_to_its_trial(
    project: Project, heard: Path, signum: signal.Signals
) -> None:
    """SLURM may send signals only to the processes that it has started."""
    (study,) = project.runs.iterdir()
    (script,) = [pid for pid in processes_of(study / "tasks" / "0") if "hear.sh" in cmdline(pid)]
    os.kill(parent_of(script), signum)
    # without a time limit, a worker leaves at once after the lead signal
    wait_until(lambda: wrappers.heard(project, "heard")[:2] == ["ready", signum.name])
    assert project.call("cancel", "heard").returncode == 0
    assert project.call("wait", "heard", "--timeout", "90").returncode == 1


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def parent_of(pid: int) -> int:
    return int(re.findall(r"^PPid:\s*(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
