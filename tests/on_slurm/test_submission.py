"""One job for each submission, whatever becomes of the answer of sbatch; one after the other where none is requeued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.cluster import Cluster
from tests.slurm_stand_in import Sbatch, wrap
from tests.support import REPOSITORY, Project, make_hostile, wait_until

QUICKLY = (
    "from mgpu_slurm.cli.main import main\n"
    "from mgpu_slurm.slurm import commands\n"
    "commands.OUTAGE_PAUSES = (0.5,)\n"
    "main()\n"
)
ONCE_AGAIN = 'if [ "$MGPU_ATTEMPT" = 1 ]; then exit 75; fi; echo done'


@pytest.fixture
def sbatch(slurm_project: Project, cluster: Cluster, tmp_path: Path) -> Sbatch:
    sbatch = wrap(tmp_path / "wrapped", cluster.folder / "bin" / "sbatch")
    slurm_project.environ["PATH"] = f"{sbatch.state / 'bin'}:{cluster.environ['PATH']}"
    return sbatch


def start(project: Project, *words: str) -> subprocess.Popen[str]:
    """The program, which is quicker to look again than it is for people."""
    environ = os.environ | project.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", QUICKLY, *words], cwd=project.folder, env=environ, text=True, **pipes
    )


def submit(project: Project, *words: str) -> RunFolder:
    with start(project, "submit", "--gpus-per-node", "0", *words) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    return only_run(project)


def only_run(project: Project) -> RunFolder:
    (path,) = project.runs.iterdir()
    return RunFolder(path)


def jobs_of(cluster: Cluster, folder: RunFolder) -> list[str]:
    """Every job that SLURM has ever had for the run, by the tokens of its submissions."""
    tokens = {submission.token for submission in records.submissions(folder)}
    queued = cluster.run("squeue", "--states=all", "--noheader", "-o", "%F|%k").stdout.splitlines()
    return [line.partition("|")[0] for line in queued if line.partition("|")[2] in tokens]


def wait_for(project: Project, folder: RunFolder, state: str = "COMPLETED") -> dict[str, object]:
    facts = project.finish(folder.path)
    assert facts["state"] == state, facts
    return facts


@pytest.mark.parametrize(
    "happens",
    [
        ("take-and-time-out",),
        ("take-and-die",),
        ("take-and-say-nothing",),
        ("take-with-banners",),
        ("time-out", "unreached", "take"),
    ],
    ids=" ".join,
)
def test_exactly_one_job_is_submitted_whatever_sbatch_answers(
    slurm_project: Project, cluster: Cluster, sbatch: Sbatch, happens: tuple[str, ...]
) -> None:
    sbatch.plan(*happens)
    folder = submit(slurm_project, "--", "true")
    facts = wait_for(slurm_project, folder)
    assert jobs_of(cluster, folder) == [facts["job_id"]]
    assert sbatch.calls == list(happens)


def test_submission_waits_until_the_controller_is_back(slurm_project: Project, cluster: Cluster) -> None:
    cluster.stop_controller()
    with start(slurm_project, "submit", "--gpus-per-node", "0", "--", "true") as process:
        assert "does not answer; trying again until" in process.stderr.readline()
        cluster.start_controller()
        _, err = process.communicate()
    assert process.returncode == 0, err
    folder = only_run(slurm_project)
    facts = wait_for(slurm_project, folder)
    assert jobs_of(cluster, folder) == [facts["job_id"]]


def test_run_works_if_its_submission_is_killed_during_sbatch(
    slurm_project: Project, cluster: Cluster, sbatch: Sbatch
) -> None:
    sbatch.plan("wait-and-take")
    with start(slurm_project, "submit", "--gpus-per-node", "0", "--", "true") as process:
        wait_until(lambda: sbatch.is_waiting)
        process.send_signal(signal.SIGKILL)
    folder = only_run(slurm_project)
    sbatch.go()
    facts = wait_for(slurm_project, folder)
    assert jobs_of(cluster, folder) == [facts["job_id"]]


def test_only_one_of_two_jobs_with_the_same_token_runs(slurm_project: Project, cluster: Cluster) -> None:
    cluster.drain("n1")
    folder = submit(slurm_project, "--nodelist", "n1", "--", "true")
    second = cluster.run("sbatch", "--parsable", folder.submission()).stdout.strip()
    first = records.submissions(folder)[0].job_id
    assert sorted(jobs_of(cluster, folder)) == sorted([first, second])
    cluster.undrain("n1")
    facts = wait_for(slurm_project, folder)
    for job_id in (first, second):
        cluster.until_job(job_id, "COMPLETED")
    assert facts["attempts"] == 1
    other = second if facts["job_id"] == first else first
    said = f"mgpu_slurm: run {folder.run} belongs to job {facts['job_id']}: job {other} has nothing to do\n"
    assert folder.launch_log(other).read_text() == said


@pytest.mark.every_slurm
def test_another_job_continues_the_run_if_requeue_is_refused(slurm_project: Project, cluster: Cluster) -> None:
    cluster.change_site(submit_script="forbid_requeue")
    folder = submit(slurm_project, "--max-requeues", "1", "--", "sh", "-c", ONCE_AGAIN)
    (first,) = jobs_of(cluster, folder)
    facts = wait_for(slurm_project, folder)
    assert facts["attempts"] == 2
    assert sorted(jobs_of(cluster, folder)) == sorted([first, facts["job_id"]])
    assert slurm_project.call("logs", folder.run).stdout == "done\n"
    assert f"cannot requeue job {first}" in folder.launch_log(first).read_text()
    assert facts["job_id"] != first


def test_cancel_also_ends_the_next_job_while_it_is_being_submitted(
    slurm_project: Project, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.change_site(submit_script="forbid_requeue")
    sbatch = wrap(tmp_path / "inside", Path("/usr/bin/sbatch"))
    sbatch.plan("wait-and-take")
    setup = f"export PATH={sbatch.state / 'bin'}:$PATH"
    slurm_project.write("mgpu.yaml", f"clusters: {{testbed: {{setup: ['{setup}']}}}}\n")
    folder = submit(slurm_project, "--max-requeues", "9", "--", "sh", "-c", "exit 75")
    wait_until(lambda: sbatch.is_waiting)
    assert slurm_project.call("cancel", folder.run).returncode == 0
    sbatch.go()
    wait_for(slurm_project, folder, "CANCELLED")
    wait_until(lambda: not cluster.run("squeue", "--noheader").stdout)
    assert (len(jobs_of(cluster, folder)), records.attempts_started(folder)) == (2, 1)


def test_requeues_are_counted_over_all_jobs_of_a_run(slurm_project: Project, cluster: Cluster) -> None:
    cluster.change_site(submit_script="forbid_requeue")
    folder = submit(slurm_project, "--max-requeues", "1", "--", "sh", "-c", "exit 75")
    facts = wait_for(slurm_project, folder, "TIMEOUT")
    assert facts["attempts"] == 2
    assert "--max-requeues 1 allows no more" in str(facts["reason"])


def test_array_task_continues_alone_and_dependents_wait_for_it(slurm_project: Project, cluster: Cluster) -> None:
    cluster.change_site(submit_script="forbid_requeue")
    until = f"until [ -e {slurm_project.folder}/$MGPU_ATTEMPT ]; do sleep 0.05; done"
    script = f"[ {{seed}} = 0 ] && exit 0; {until}; {ONCE_AGAIN}"
    group = RunFolder(slurm_project.submit("--gpus-per-node", "0", "--seeds", "2", "--", "sh", "-c", script))
    behind = RunFolder(slurm_project.submit("--gpus-per-node", "0", "--after", group.run, "--", "true"))
    (array, waiting) = (records.submissions(folder)[0].job_id for folder in (group, behind))
    slurm_project.write("1", "")
    wait_until(lambda: slurm_project.json("status", group.run)[1]["attempts"] == 2)
    first, second = slurm_project.json("status", group.run)
    assert (first["state"], first["attempts"], first["job_id"]) == ("COMPLETED", 1, f"{array}_0")
    assert (second["state"], second["job_id"].partition("_")[2]) == ("RUNNING", "1")
    assert second["job_id"] != f"{array}_1"
    assert f"afterok:{second['job_id']}" in cluster.job(waiting)["Dependency"]
    slurm_project.write("2", "")
    wait_for(slurm_project, behind)
    assert [facts["state"] for facts in slurm_project.json("status", group.run)] == ["COMPLETED"] * 2


def test_late_requeue_and_its_replacement_job_do_not_both_run(
    slurm_project: Project, cluster: Cluster, tmp_path: Path
) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    # as scontrol does when the controller is slow, which then requeues when the other job is in the queue
    (commands / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = requeue ] || exec /usr/bin/scontrol "$@"\necho "$2" > {tmp_path}/late\n'
        "echo 'Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    (commands / "squeue").write_text(
        f'#!/bin/sh\nif [ -e {tmp_path}/late ]; then /usr/bin/scontrol requeue "$(cat {tmp_path}/late)"; fi\n'
        f'rm -f {tmp_path}/late; exec /usr/bin/squeue "$@"\n'
    )
    for command in commands.iterdir():
        command.chmod(0o755)
    slurm_project.write("mgpu.yaml", f"clusters: {{here: {{setup: ['export PATH={commands}:$PATH']}}}}\n")
    folder = submit(slurm_project, "--", "sh", "-c", ONCE_AGAIN)
    first = records.submissions(folder)[0].job_id
    wait_until(lambda: cluster.job(first)["Restarts"] == "1")
    cluster.start_now(first)
    wait_for(slurm_project, folder)
    (other,) = set(jobs_of(cluster, folder)) - {first}
    cluster.until_job(other, "COMPLETED")
    assert f"belongs to job {first}: job {other} has nothing to do" in folder.launch_log(other).read_text()
    facts = slurm_project.json("status", folder.run)[0]
    assert (facts["state"], facts["attempts"], facts["job_id"]) == ("COMPLETED", 2, first)


@pytest.mark.every_slurm
def test_dry_run_check_asks_slurm_for_the_expected_start(slurm_project: Project, cluster: Cluster) -> None:
    words = ("submit", "--dry-run", "--check", "--nodes", "2", "--time", "5")
    done = slurm_project.call(*words, "--", "true")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("SLURM would start it at 20")
    assert last.endswith("on n[1-2] in partition main, by the current queue")
    facts = slurm_project.json(*words, "--", "true")
    assert (facts["check"]["nodes"], facts["check"]["partition"]) == ("n[1-2]", "main")
    assert cluster.run("squeue", "--noheader").stdout == ""
    assert not slurm_project.runs.exists()


def test_dry_run_check_of_an_impossible_job_gives_the_reason(slurm_project: Project) -> None:
    done = slurm_project.call("submit", "--dry-run", "--check", "--nodes", "20", "--", "true")
    assert done.returncode == 3
    assert done.stderr == (
        "mgpu-slurm: sbatch refused the job: allocation failure: Requested node configuration is not available:"
        " `sinfo -o '%P %D %c %m %G'` shows what nodes there are\n"
    )
    assert "#SBATCH --nodes=20" in done.stdout


def test_job_submitted_from_untrusted_folder_imports_nothing_from_it(slurm_project: Project, cluster: Cluster) -> None:
    """sbatch starts the batch step, and srun the ranks, in the folder of the submission."""
    slurm_project.write("job.py", "import torch\ndef train(run, lr=0.1):\n    run.report(1, score=run.mean(lr, 1))\n")
    strangers = slurm_project.folder.parent / "strangers"
    strangers.mkdir()
    mark = make_hostile(strangers)
    program = str(Path(sys.executable).with_name("mgpu-slurm"))
    environ = os.environ | slurm_project.environ | {"MGPU_RUNS": str(slurm_project.runs)}
    words = (program, "submit", "--follow", "--gpus-per-node", "0", "--ntasks-per-node", "2")
    target = str(slurm_project.folder / "job.py")
    done = subprocess.run([*words, target], cwd=strangers, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not mark.exists()


def test_site_that_rewrites_names_and_comments_still_runs_each_job_once(
    slurm_project: Project, cluster: Cluster, sbatch: Sbatch
) -> None:
    """Nothing in SLURM's queue shows then whose job it is, and where a run may have been submitted, it is again."""
    cluster.change_site(submit_script="rewrite")
    sbatch.plan("take-and-say-nothing")
    folder = submit(slurm_project, "--time", "60", "--", "echo", "done")
    facts = wait_for(slurm_project, folder)
    assert facts["attempts"] == 1
    assert folder.rank_log(1, 0).read_text() == "done\n"
    job = cluster.job(str(facts["job_id"]))
    assert (job["JobName"], job["Partition"]) == (f"site-{folder.run}", "high")
    assert job["Comment"].strip() == "project 7"
    assert job["TimeLimit"] == "00:10:00"

    slow = slurm_project.submit("--gpus-per-node", "0", "--name", "slow", "--", "sleep", "600")
    wait_until(lambda: slurm_project.json("status", slow.name)[0]["state"] == "RUNNING")
    assert slurm_project.call("cancel", slow.name).returncode == 0
    assert slurm_project.call("wait", slow.name).returncode == 1
    assert slurm_project.json("status", slow.name)[0]["state"] == "CANCELLED"
