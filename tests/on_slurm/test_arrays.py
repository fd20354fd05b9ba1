"""Groups of runs as job arrays of a real SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.cluster import Cluster
from tests.support import Project, wait_until


def group(project: Project, seeds: str, script: str, *words: str) -> Path:
    return project.submit("--gpus-per-node", "0", "--seeds", seeds, *words, "--", "sh", "-c", script)


def states(project: Project, name: str) -> list[str]:
    return [facts["state"] for facts in project.json("status", name)]


def test_each_task_is_a_run_of_one_array_job(slurm_project: Project, cluster: Cluster) -> None:
    folder = group(slurm_project, "3", "echo seed {seed} in $SLURM_ARRAY_TASK_ID; exit $(({seed} == 1))")
    done = slurm_project.call("wait", folder.name)
    assert done.returncode == 1
    assert "3 runs: 2 COMPLETED, 1 FAILED" in done.stdout
    runs = slurm_project.json("status", folder.name)
    (job,) = {facts["job_id"].partition("_")[0] for facts in runs}
    assert [facts["job_id"] for facts in runs] == [f"{job}_{task}" for task in range(3)]
    for task in range(3):
        assert slurm_project.call("logs", f"{job}_{task}").stdout == f"seed {task} in {task}\n"
    # what the failed one is resumed as keeps its place in the group
    assert slurm_project.call("resume", folder.name).returncode == 0
    slurm_project.call("wait", folder.name)
    again = slurm_project.json("status", folder.name)
    assert [facts["attempts"] for facts in again] == [1, 2, 1]
    assert again[1]["job_id"].endswith("_1")
    assert again[1]["job_id"] != runs[1]["job_id"]


def test_resume_while_other_tasks_run_reports_the_new_job(slurm_project: Project) -> None:
    folder = group(slurm_project, "3", "test {seed} != 1 || exit 1; exec sleep 600")
    wait_until(lambda: states(slurm_project, folder.name) == ["RUNNING", "FAILED", "RUNNING"])
    before = slurm_project.json("status", folder.name)
    resumed = slurm_project.json("resume", folder.name)
    assert resumed["job_id"] not in {facts["job_id"].partition("_")[0] for facts in before}
    runs = slurm_project.json("status", folder.name)
    assert [facts["job_id"] for facts in runs] == [before[0]["job_id"], f"{resumed['job_id']}_1", before[2]["job_id"]]
    assert slurm_project.call("cancel", folder.name).returncode == 0
    wait_until(lambda: not {"RUNNING", "PENDING"} & set(states(slurm_project, folder.name)))


@pytest.mark.every_slurm
def test_slurm_enforces_the_array_limit_and_cancel_ends_one_task_or_all(
    slurm_project: Project, cluster: Cluster
) -> None:
    folder = group(slurm_project, "6%2", "exec sleep 60{seed}")
    wait_until(lambda: states(slurm_project, folder.name).count("RUNNING") == 2)
    pending = slurm_project.json("status", folder.name)[5]
    assert (pending["state"], pending["reason"].partition(":")[0]) == ("PENDING", "JobArrayTaskLimit")
    assert slurm_project.call("cancel", f"{folder.name}/5").returncode == 0
    wait_until(lambda: states(slurm_project, folder.name)[5] == "CANCELLED")
    assert states(slurm_project, folder.name).count("CANCELLED") == 1
    assert slurm_project.call("cancel", folder.name).returncode == 0
    assert slurm_project.call("wait", folder.name).returncode == 1
    assert states(slurm_project, folder.name) == ["CANCELLED"] * 6


def test_1000_tasks_take_one_sbatch_and_one_squeue(slurm_project: Project, asked: Path, cluster: Cluster) -> None:
    folder = group(slurm_project, "1000", "exec sleep 60{seed}", "--sbatch", "hold")
    assert [line.split()[0] for line in asked.read_text().splitlines()].count("sbatch") == 1
    # nothing is made for a task before it starts
    assert not (folder / "tasks").exists()
    asked.write_text("")
    runs = slurm_project.json("status")
    assert [line.split()[0] for line in asked.read_text().splitlines()] == ["squeue"]
    assert [facts["run"] for facts in runs] == [f"{folder.name}/{task}" for task in range(1000)]
    assert {facts["state"] for facts in runs} == {"PENDING"}
    assert slurm_project.call("cancel", folder.name).returncode == 0
    wait_until(lambda: set(states(slurm_project, folder.name)) == {"CANCELLED"})


def test_group_above_the_array_size_limit_is_split_into_arrays(slurm_project: Project, asked: Path) -> None:
    folder = group(slurm_project, "1003", "exec sleep 60{seed}", "--sbatch", "hold")
    assert [line.split()[0] for line in asked.read_text().splitlines()].count("sbatch") == 2
    runs = slurm_project.json("status", folder.name)
    first, second = sorted({facts["job_id"].partition("_")[0] for facts in runs}, key=int)
    assert [runs[task]["job_id"] for task in (0, 1000, 1001, 1002)] == [
        f"{first}_0",
        f"{first}_1000",
        f"{second}_0",
        f"{second}_1",
    ]
    assert slurm_project.json("status", f"{second}_1")[0]["run"] == f"{folder.name}/1002"


@pytest.mark.every_slurm
def test_requeued_task_restarts_alone(slurm_project: Project, cluster: Cluster) -> None:
    folder = group(slurm_project, "2", "test $SLURM_RESTART_COUNT || exit $(({seed} * 75)); echo again {seed}")
    wait_until(lambda: states(slurm_project, folder.name) in (["COMPLETED", "PENDING"], ["COMPLETED", "REQUEUED"]))
    (facts,) = slurm_project.json("status", f"{folder.name}/1")
    cluster.start_now(facts["job_id"])
    assert slurm_project.call("wait", folder.name).returncode == 0
    assert [facts["attempts"] for facts in slurm_project.json("status", folder.name)] == [1, 2]
    assert slurm_project.call("logs", f"{folder.name}/1").stdout == "again 1\n"


def test_killed_task_restarts_alone_and_leaves_a_node_that_kills_twice(
    slurm_project: Project, cluster: Cluster
) -> None:
    # task 0 dies once; task 1 on each node that it gets first, twice
    script = (
        "echo $SLURMD_NODENAME > first-{seed}-$MGPU_ATTEMPT;"
        " [ {seed}$MGPU_ATTEMPT != 01 ] || kill -9 $$;"
        " if [ {seed} = 1 ] && [ $SLURMD_NODENAME = $(cat first-1-1) ]; then kill -9 $$; fi; echo done"
    )
    folder = group(slurm_project, "2", script)
    wait_until(lambda: states(slurm_project, folder.name) in (["COMPLETED", "PENDING"], ["COMPLETED", "REQUEUED"]))
    (facts,) = slurm_project.json("status", f"{folder.name}/1")
    cluster.start_now(facts["job_id"])
    assert slurm_project.call("wait", folder.name).returncode == 0
    assert [facts["attempts"] for facts in slurm_project.json("status", folder.name)] == [2, 3]
    nodes = [event.nodes for event in records.events(RunFolder(folder).of_task(1)) if event.event == "started"]
    assert nodes[0] == nodes[1] != nodes[2]


class TestAfter:
    def test_run_waits_in_the_slurm_queue(self, slurm_project: Project) -> None:
        gate = slurm_project.folder / "gate"
        first = slurm_project.submit("--", "sh", "-c", f"until test -e {gate}; do sleep 0.05; done")
        second = slurm_project.submit("--after", first.name, "--", "true")
        (facts,) = slurm_project.json("status", second.name)
        assert (facts["state"], facts["reason"]) == ("PENDING", "Dependency")
        # also where it is cancelled and comes again
        assert slurm_project.call("cancel", second.name).returncode == 0
        assert slurm_project.finish(second)["state"] == "CANCELLED"
        assert slurm_project.call("resume", second.name).returncode == 0
        (facts,) = slurm_project.json("status", second.name)
        assert (facts["state"], facts["reason"]) == ("PENDING", "Dependency")
        gate.touch()
        assert slurm_project.finish(second)["state"] == "COMPLETED"

    def test_each_array_of_a_large_group_waits(self, slurm_project: Project, cluster: Cluster) -> None:
        first = slurm_project.submit("--sbatch", "hold", "--", "true")
        folder = group(slurm_project, "1003%1", "true {seed}", "--after", first.name)
        jobs = {facts["job_id"].partition("_")[0] for facts in slurm_project.json("status", folder.name)}
        waits = [cluster.job(job)["Dependency"] for job in sorted(jobs, key=int)]
        job = slurm_project.json("status", first.name)[0]["job_id"]
        assert [f"afterok:{job}" in text for text in waits] == [True, True]
        assert f"afterany:{min(jobs, key=int)}_*" in waits[1]

    def test_run_that_can_never_start_is_cancelled(self, slurm_project: Project, cluster: Cluster) -> None:
        gate = slurm_project.folder / "gate"
        first = group(slurm_project, "2", f"until test -e {gate}; do sleep 0.05; done; exit {{seed}}")
        strict = slurm_project.submit("--after", first.name, "--", "true")
        lax = slurm_project.submit("--after-any", first.name, "--", "true")
        gate.touch()
        unseen = (strict / "state.json").read_text()
        words = "the run it waited for did not complete"
        facts = slurm_project.finish(strict)
        assert (facts["state"], facts["reason"]) == ("CANCELLED", words)
        assert slurm_project.finish(lax)["state"] == "COMPLETED"
        told = slurm_project.json("why", strict.name)[0]["why"]
        assert told["cause"] == "dependency"
        assert told["error"] == f"{words}; waited for run {first.name}/1, which is FAILED"
        # also when only accounting knows, which has another word for it
        accounted = ("sacct", "-n", "-X", "-o", "State", "-j", facts["job_id"])
        wait_until(lambda: "CANCELLED" in cluster.run(*accounted).stdout)
        cluster.forget_jobs()
        (strict / "state.json").write_text(unseen)
        assert slurm_project.finish(strict)["reason"] == words
        # one that has ended already needs no job to wait for
        done = slurm_project.call("submit", "--after", first.name, "--", "true")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"waited for run {first.name}/1, which is FAILED" in done.stderr


def test_shell_in_a_run_sees_its_node_gpus_and_code(slurm_project: Project) -> None:
    slurm_project.write("words.txt", "hello")
    run = slurm_project.submit("--nodes", "2", "--gpus-per-node", "2", "--", "sleep", "600")
    wait_until(lambda: states(slurm_project, run.name) == ["RUNNING"])
    tell = "echo $(hostname) $CUDA_VISIBLE_DEVICES $(cat words.txt)"
    said = slurm_project.call("shell", run.name, "--", "sh", "-c", tell)
    assert said.stdout.split()[1:] == ["0,1", "hello"], said.stderr
    second = "n2" if said.stdout.startswith("n1") else "n1"
    said = slurm_project.call("shell", run.name, "--node", second, "--", "sh", "-c", tell)
    assert said.stdout.split()[0] == second, said.stderr
    done = slurm_project.call("shell", run.name, "--node", "n9")
    assert (done.returncode, "--node n9: run" in done.stderr) == (2, True)
    assert slurm_project.call("shell", run.name, "--", "sh", "-c", "exit 7").returncode == 7


def test_shell_in_a_group_run_works_before_its_ranks_start(slurm_project: Project) -> None:
    gate = slurm_project.folder / "gate"
    slurm_project.write("mgpu.yaml", f"clusters: {{here: {{setup: ['until test -e {gate}; do sleep 0.05; done']}}}}\n")
    folder = group(slurm_project, "2", "exec sleep 60{seed}")
    wait_until(lambda: states(slurm_project, folder.name) == ["RUNNING"] * 2)
    said = slurm_project.call("shell", f"{folder.name}/1", "--", "sh", "-c", "echo $SLURM_JOB_ID")
    assert said.returncode == 0, said.stderr
    done = slurm_project.call("shell", f"{folder.name}/0", "--", "sh", "-c", "echo $SLURM_JOB_ID")
    assert done.stdout != said.stdout
    gate.touch()
