"""What is said of a node by how its task ended, and by what SLURM says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.core.retry import quiet
from mgpu_slurm.doctor import node_survey
from mgpu_slurm.doctor.node_survey import Survey
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.slurm.partition_nodes import Node

IDLE = Node("n1", "idle")


@pytest.fixture
def group(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "doctor-1")
    folder.create()
    return folder


def report(group: RunFolder, state: RunState, now: Node = IDLE) -> tuple[str, str]:
    survey = Survey(group, [IDLE], None, quiet)
    survey.see("n1", state)
    (found,) = survey.reports([IDLE], [now])
    return found.verdict, "; ".join(found.why)


def test_task_that_failed_makes_its_node_broken(group: RunFolder) -> None:
    failed = RunState(state="FAILED", reason="rank 0 failed", job_id="7_0")
    group.launch_log("7_0").touch()
    assert report(group, failed) == ("broken", "its task ended as FAILED: rank 0 failed")
    group.launch_log("7_0").unlink()
    words = f"its task ended as FAILED: rank 0 failed; it has no log, as if it did not see {group.path.parent}"
    assert report(group, failed) == ("broken", words)


def test_node_that_slurm_drains_meanwhile_is_broken_for_its_reason(group: RunFolder) -> None:
    drained = Node("n1", "drained", "Prolog error (root, 2026-11-29T12:44:03)")
    words = "its task could not run; SLURM says drained: Prolog error (root, 2026-11-29T12:44:03)"
    assert report(group, RunState(state="CANCELLED"), drained) == ("broken", words)


def test_task_that_did_not_run_says_nothing_against_its_node(group: RunFolder) -> None:
    assert report(group, RunState(state="CANCELLED")) == ("unchecked", "its task was cancelled")
    assert report(group, RunState(state="PREEMPTED")) == ("unchecked", "its task was preempted")
    pending = RunState(state="PENDING", reason="QOSMaxJobsPerUserLimit")
    assert report(group, pending) == ("unchecked", "its task did not start in time (QOSMaxJobsPerUserLimit)")
    held = RunState(state="PENDING", reason="JobHeldUser")
    assert report(group, held) == ("unchecked", "its task did not start in time")
    assert report(group, pending, Node("n1", "allocated")) == ("unchecked", "busy (allocated)")


def test_answer_that_a_task_can_never_start_is_believed_if_it_is_given_again(
    group: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "BadConstraints: it can never start: no node has what it asks for"
    never, held = (RunState(state="PENDING", reason=each) for each in (reason, "JobHeldUser"))
    survey = Survey(group, [IDLE], None, quiet)
    survey.see("n1", never)
    assert survey.reports([IDLE], [])[0].why == (f"its task did not start in time ({reason})",)
    monkeypatch.setattr(node_survey, "NEVER_AFTER", 0.0)
    for state in (held, never, held):
        survey.see("n1", state)
    assert survey.reports([IDLE], [])[0].why == ("it lacks what the check asks for, such as GPUs, cores or memory",)
    survey.see("n1", RunState(state="PENDING", reason="Resources"))
    assert survey.reports([IDLE], [])[0].why == ("its task did not start in time (Resources)",)


def test_answer_of_slurm_is_kept_until_something_newer_is_known(group: RunFolder) -> None:
    survey = Survey(group, [IDLE], None, quiet)
    for state in (
        RunState(state="PENDING", reason="Resources"),
        # as the run's own record has it
        RunState(state="PENDING"),
    ):
        survey.see("n1", state)
    assert survey.reports([IDLE], [])[0].why == ("its task did not start in time (Resources)",)


def test_node_that_has_reported_and_failed_then_is_broken(group: RunFolder) -> None:
    survey = Survey(group, [IDLE], None, quiet)
    facts = {"driver": "", "gpus": [], "folder": "/tmp", "free": 1, "write": 1.0, "memory": 1, "broken": [], "slow": []}
    group.of_task(0).create_task()
    append_jsonl(group.of_task(0).checkup, {"facts": facts, "port": 1})
    survey.see("n1", RunState(state="NODE_FAIL", reason="a node failed"))
    survey.hear("n1")
    (found,) = survey.reports([IDLE], [Node("n1", "down*", "Not responding")])
    assert (found.verdict, found.why) == ("broken", ("its task ended as NODE_FAIL: a node failed",))
