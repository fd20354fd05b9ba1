"""What differs between sites, users and shells does not reach the runs: only what was asked for does."""

from __future__ import annotations

import json
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.rank.rank_info import threads_per_rank
from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.cluster import Cluster
from tests.on_slurm.state import LAB, USERS
from tests.on_slurm.users import NO_GPUS, User
from tests.support import Project, environment_in, log, wait_until

SLEEP = ("--", "sleep", "600")


def submit(project: Project, *words: str) -> Path:
    return project.submit(*NO_GPUS, *words)


def says(run: Path, words: str) -> bool:
    return (run / "logs/1-0.log").exists() and words in log(run, 0)


def only_run(project: Project, pattern: str = "*") -> Path:
    (run,) = project.runs.glob(pattern)
    return run


# -- from inside a job


@pytest.mark.every_slurm
def test_run_submitted_inside_a_run_gets_a_clean_environment(slurm_project: Project) -> None:
    """The outer one is a task of an array, with its cores bound by srun and started by a PMI.

    Its code lies inside of the repository, which does not ignore its runs.
    """
    subprocess.run(["git", "init", "--quiet", slurm_project.folder], check=True)
    slurm_project.environ["MGPU_RUNS"] = "runs"
    slurm_project.write(
        "again.sh",
        f"""\
        export MINE="kept as it is"
        export SLURM_CPU_BIND=quiet,mask_cpu:0x1 SLURM_CPU_BIND_TYPE=mask_cpu: SLURM_CPU_BIND_LIST=0x1
        export PMI_RANK=0 PMI_FD=11 PMIX_RANK=0 PMIX_NAMESPACE=outer OMPI_COMM_WORLD_RANK=0 TORCHELASTIC_RUN_ID=outer
        env -0 > $MGPU_RUN_FOLDER/outer
        set -- --name inner --nodes 2 --ntasks-per-node 2 --gpus-per-node 0 -- env -0
        exec {sys.executable} -m mgpu_slurm submit "$@"
        """,
    )
    outer = submit(
        slurm_project, "--name", "outer", "--seeds", "1", "--cpus-per-task", "2", "--", "sh", "again.sh", "{seed}"
    )
    assert slurm_project.call("wait", outer.name).returncode == 0, log(outer / "tasks/0", 0)
    inner = only_run(slurm_project, "inner-*")
    assert slurm_project.finish(inner)["state"] == "COMPLETED"

    before = environment_in((outer / "tasks/0/outer").read_text())
    # what there was to be scrubbed
    assert {"SLURM_ARRAY_TASK_ID", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "RANK", "MGPU_ATTEMPT"} <= before.keys()
    for rank in range(4):
        found = environment_in(log(inner, rank))
        told = {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
        place = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        assert told == {"RANK": str(rank), "WORLD_SIZE": "4", **place}
        assert (found["SLURM_PROCID"], found["SLURM_NTASKS"], found["SLURM_NNODES"]) == (str(rank), "4", "2")
        assert found["SLURM_JOB_ID"] != before["SLURM_JOB_ID"]
        foreign = re.compile(r"SLURM_(ARRAY|CPU_BIND|CPUS_PER_TASK)|SRUN_CPUS|PMI|OMPI_COMM|TORCHELASTIC_RUN_ID")
        assert [name for name in found if foreign.match(name)] == []
        assert found["MGPU_RUN_FOLDER"] == str(inner)
        assert (found["MINE"], found["SLURM_CONF"]) == ("kept as it is", before["SLURM_CONF"])
        assert found["OMP_NUM_THREADS"] == str(threads_per_rank(2))


# -- users


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line that a call has failed with."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done
    return done.stderr


def test_ordinary_user_controls_own_runs_and_others_have_no_access(student: User, colleague: User) -> None:
    done = student.call("submit", "--follow", *NO_GPUS, "--nodes", "2", "--", "sh", "-c", "id -un; umask")
    assert done.returncode == 0, done.stderr
    assert "\nstudent\n0022\n" in done.stdout
    (run,) = (student.folder / "runs").glob("sh-*")
    assert run.stat().st_uid == USERS["student"]
    assert stat.S_IMODE(run.stat().st_mode) == 0o700

    script = "[ $MGPU_ATTEMPT = 2 ] && exec echo again; echo first; exec sleep 600"
    name = student.submit("--name", "long", "--", "sh", "-c", script)
    place = colleague.cluster.home("student") / "project/runs" / name
    wait_until(lambda: says(student.folder / "runs" / name, "first"))
    for command in ("status", "logs", "cancel"):
        said = one_line(colleague.call(command, place), 2)
        assert said.startswith(
            f"mgpu-slurm: run '{place}' is not readable by you: its owner can set `readable-by: group`"
        )
    assert student.call("cancel", name).returncode == 0
    assert student.call("wait", name).returncode == 1
    assert student.state(name) == "CANCELLED"
    assert student.call("resume", name).returncode == 0
    assert student.call("wait", name).returncode == 0
    assert student.call("logs", name).stdout == "first\nagain\n"


def test_group_member_can_read_but_not_change_runs_open_to_the_group(
    student: User, colleague: User, shared: Path
) -> None:
    runs = {"MGPU_RUNS": str(student.cluster.home("lab"))}
    closed = student.submit("--name", "closed", "--sbatch", "hold", *SLEEP, **runs)
    (student.folder / "mgpu.yaml").write_text("clusters: {lab: {readable-by: group}}\n")
    script = "mkdir $MGPU_RUN_FOLDER/mine; echo hello; exec sleep 600"
    name = student.submit("--name", "open", "--", "sh", "-c", script, **runs)
    (student.folder / "mgpu.yaml").unlink()
    wait_until(lambda: says(shared / name, "hello"))
    for folder in (shared / name, *(path for path in (shared / name).rglob("*") if path.is_dir())):
        # the group is that of the shared folder, not the student's own
        assert folder.stat().st_gid == LAB, folder
        assert folder.stat().st_mode & stat.S_IXGRP, folder

    listed = colleague.call("status", "--json", **runs)
    assert [(facts["run"], facts["state"]) for facts in json.loads(listed.stdout)] == [(name, "RUNNING")]
    assert colleague.call("logs", name, **runs).stdout == "hello\n"
    assert "is not readable by you" in one_line(colleague.call("logs", closed, **runs), 2)
    said = one_line(colleague.call("cancel", name, **runs), 3)
    assert said == f"mgpu-slurm: run {name} belongs to student: SLURM does not let you cancel it\n"
    # where SLURM keeps it to itself how others' jobs stand, the run's own records tell
    student.cluster.change_site(lines=("PrivateData=jobs",))
    assert colleague.state(name, **runs) == "RUNNING"
    student.cluster.change_site(lines=())
    assert student.call("cancel", name, closed, **runs).returncode == 0
    # SLURM's word on the end is told, though it cannot be written down
    wait_until(lambda: colleague.state(name, **runs) == "CANCELLED")
    said = one_line(colleague.call("resume", name, **runs), 2)
    assert said == f"mgpu-slurm: run {name} belongs to student: only they can resume it\n"
    said = colleague.call("clean", name, "--yes", **runs).stderr
    assert said == f"mgpu-slurm: run {name} belongs to student: only they can delete it\n"
    assert student.state(name, **runs) == "CANCELLED"


# -- names


ODD = "a b'c\"d$HOME;é&(x)`id`*#%"
WORDS = ("a b", 'c"d', "e'f", "$HOME", "`id`", ";", "é ü", "*", "", "--", "new\nline", "back\\slash", "%j", "{}", "#!")
SHOWING = """
    import json, os, sys
    from dataclasses import dataclass
    from pathlib import Path

    @dataclass
    class Config:
        words: str
        more: dict
        path: Path

    def train(run, config: Config):
        told = [config.words, config.more, str(config.path), os.getcwd(), os.environ["MGPU_PROJECT"], os.environ["ODD"]]
        print(json.dumps(told))
"""


def test_special_characters_in_names_and_values_arrive_unchanged(slurm_project: Project) -> None:
    slurm_project.folder = slurm_project.folder / ODD
    slurm_project.write("show.py", SHOWING)
    cluster_file: dict[str, Any] = {"environment": {"ODD": ODD}, "setup": [f"export SET={shlex.quote(ODD)}"]}
    slurm_project.write("mgpu.yaml", json.dumps({"clusters": {"here": cluster_file}}))
    slurm_project.environ["MGPU_RUNS"] = str(slurm_project.folder / f"runs of {ODD}")
    told = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.environ['SET'], os.environ['ODD']]))"
    run = submit(slurm_project, "--", "python", "-c", told, *WORDS)
    other = submit(slurm_project, "show", f"words={ODD}", f"more={json.dumps({ODD: [ODD]})}", f"path={ODD}/p")
    assert slurm_project.finish(run)["state"] == "COMPLETED", slurm_project.call("logs", run.name, "--launch").stdout
    assert run.parent == Path(slurm_project.environ["MGPU_RUNS"])
    assert json.loads(log(run, 0)) == [list(WORDS), str(run / "code"), ODD, ODD]
    assert slurm_project.finish(other)["state"] == "COMPLETED", slurm_project.call("logs", other.name).stdout
    here = str(slurm_project.folder)
    assert json.loads(log(other, 0)) == [ODD, {ODD: [ODD]}, f"{here}/{ODD}/p", str(other / "code"), here, ODD]


# -- shells


def test_banners_and_shell_noise_are_ignored(slurm_project: Project, tmp_path: Path) -> None:
    """Every command of SLURM prints before and after what it is asked for, and each shell of a job when it starts."""
    folder = tmp_path / "noisy"
    folder.mkdir()
    real = slurm_project.environ["PATH"]
    banner = "echo '| Maintenance | on | Monday |'; echo 'Welcome! Submitted batch job 500'; echo 'no error' >&2"
    for name in ("squeue", "sacct", "scontrol", "sinfo", "sbatch", "scancel", "srun"):
        script = folder / name
        script.write_text(f'#!/bin/sh\n{banner}\nPATH={real} {name} "$@"\ncode=$?\n{banner}\nexit $code\n')
        script.chmod(0o755)
    noise = slurm_project.write("noise", "echo noise; echo noise >&2\n")
    slurm_project.environ |= {"PATH": f"{folder}:{real}", "BASH_ENV": str(noise), "ENV": str(noise)}

    done = slurm_project.call("submit", "--follow", "--nodes", "2", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpus      2 per node" in done.stdout
    run = only_run(slurm_project, "sh-*")
    assert [log(run, rank) for rank in range(4)] == [f"{rank} of 4\n" for rank in range(4)]
    assert "noise" in slurm_project.call("logs", run.name, "--launch").stdout
    group = submit(slurm_project, "--seeds", "2", "--", "sh", "-c", "echo {seed}; exec sleep 600")
    wait_until(lambda: [facts["state"] for facts in slurm_project.json("status", group.name)] == ["RUNNING"] * 2)
    assert slurm_project.call("cancel", group.name).returncode == 0
    assert slurm_project.call("wait", group.name).returncode == 1
    assert [facts["state"] for facts in slurm_project.json("status", group.name)] == ["CANCELLED"] * 2
    done = slurm_project.call("submit", *NO_GPUS, "--mem", "900G", "--", "true")
    assert one_line(done, 3) == (
        "mgpu-slurm: sbatch refused the job: sbatch: error: Memory specification can not be satisfied:"
        " `sinfo -o '%P %D %c %m %G'` shows what nodes there are\n"
    )


DEFAULTS = {
    "SBATCH_EXPORT": "NONE",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_TIMELIMIT": "1",
    "SLURM_EXPORT_ENV": "NONE",
    "SRUN_EXPORT_ENV": "NONE",
    "SRUN_CPUS_PER_TASK": "64",
    "SRUN_CONTAINER": "/nowhere",
    "SLURM_NTASKS": "9",
    "SLURM_NNODES": "7",
    "SLURM_MPI_TYPE": "unknown",
    "SLURM_CLUSTERS": "elsewhere",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_BITSTR_LEN": "3",
    "SQUEUE_FORMAT": "%i",
    "SQUEUE_STATES": "PENDING",
    "SQUEUE_USERS": "nobody",
    "SACCT_FORMAT": "jobid",
    "SINFO_FORMAT": "%N",
}


def test_slurm_variables_of_the_users_shell_do_not_reach_runs(slurm_project: Project) -> None:
    slurm_project.environ |= DEFAULTS | {"MINE": "my own"}
    run = slurm_project.submit("--", "env", "-0")
    facts = slurm_project.finish(run)
    assert (facts["state"], facts["ranks"]) == ("COMPLETED", 2)
    for rank in range(2):
        found = environment_in(log(run, rank))
        assert (found["MINE"], found["PATH"]) == ("my own", slurm_project.environ["PATH"])
        assert (found["SLURM_NTASKS"], found["SLURM_NNODES"]) == ("2", "1")
        assert not {"SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV", "SLURM_ARRAY_JOB_ID", "SLURM_MPI_TYPE"} & found.keys()


EXPORT_NOTHING = """\
function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end
function slurm_cli_pre_submit(options, pack_offset)
    if options["type"] == "sbatch" then
        options["export"] = "NONE"
    end
    return slurm.SUCCESS
end
function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end
"""


@pytest.mark.parametrize(
    ("profile", "sets"),
    [("echo 'Welcome back!'; export FROM_PROFILE='of the profile'\n", "of the profile"), ("exit 1\n", None)],
    ids=["prints", "fails"],
)
def test_export_none_gives_ranks_the_login_shell_environment(
    cluster: Cluster, student: User, profile: str, sets: str | None
) -> None:
    (cluster.folder / "etc/cli_filter.lua").write_text(EXPORT_NOTHING)
    home = student.folder.parent
    (home / ".profile").write_text(profile)
    (student.folder / "mgpu.yaml").write_text("clusters: {here: {environment: {OF_SITE: 'of the cluster file'}}}\n")
    cluster.change_site(lines=("CliFilterPlugins=lua",))
    try:
        name = student.submit("--nodes", "2", "--", "env", "-0", MINE="my own")
        assert student.call("wait", name).returncode == 0, student.call("logs", name, "--launch").stdout
    finally:
        (home / ".profile").unlink()
        (student.folder / "mgpu.yaml").unlink()
    for rank in range(2):
        found = environment_in(log(student.folder / "runs" / name, rank))
        # as the site wants it
        assert "MINE" not in found
        assert "/usr/bin" in found["PATH"].split(":")
        assert found.get("FROM_PROFILE") == sets
        assert (found["RANK"], found["WORLD_SIZE"], found["OF_SITE"]) == (str(rank), "2", "of the cluster file")
        assert {"MASTER_ADDR", "MASTER_PORT", "MGPU_ATTEMPT"} <= found.keys()


# -- the cluster file

CLUSTER_FILE = """
    clusters:
      testbed:
        flags:
          partition: high
          nodes: 2
          gpus-per-node: 2
          cpus-per-task: 2
          mem: 1G
          time: 30
          constraint: "[rack1|rack2]"
          sbatch: {mail-type: END, nice: 7, comment: "of project 7"}
        rename: {gpus-per-node: "gres=gpu:{}", mem: null, constraint: null}
        setup:
          - GREETING="hello   world"
          - |
            if true; then
              export GREETING
            fi
        environment: {LEVEL: 3, DOUBLE: "$GREETING"}
"""


@pytest.mark.every_slurm
def test_cluster_file_sets_sbatch_options_setup_and_environment(slurm_project: Project, cluster: Cluster) -> None:
    slurm_project.write("mgpu.yaml", CLUSTER_FILE)
    script = 'echo $CUDA_VISIBLE_DEVICES "$GREETING" $LEVEL "$DOUBLE" $SLURM_CPUS_PER_TASK'
    run = slurm_project.submit("--time", "10", "--name", "asked", "--", "sh", "-c", script)
    facts = slurm_project.finish(run)
    assert (facts["state"], facts["nodes"], facts["ranks"]) == ("COMPLETED", 2, 4)
    # a small machine is warned of before
    said = [log(run, rank).splitlines()[-1] for rank in range(4)]
    assert said == ["0,1 hello   world 3 $GREETING 2"] * 4

    # until then, nodes that are done with it are not counted
    job = cluster.until_job(facts["job_id"], "COMPLETED")
    assert {name: job[name] for name in ("JobName", "Partition", "NumNodes", "NumTasks", "CPUs/Task")} == {
        "JobName": run.name,
        "Partition": "high",
        "NumNodes": "2",
        "NumTasks": "4",
        "CPUs/Task": "2",
    }
    # the call's own flag wins
    assert (job["TimeLimit"], job["Nice"], job["Requeue"]) == ("00:10:00", "7", "1")
    assert job["Comment"].startswith("of project 7 mgpu-")
    # `gres:gpu:2`, or `gres/gpu:2` in later releases
    assert (job["TresPerNode"].replace("/", ":"), job["MinMemoryCPU"]) == ("gres:gpu:2", "1000M")
    assert (job["StdOut"], job["WorkDir"]) == (
        str(RunFolder(run).launch_log(facts["job_id"])),
        str(slurm_project.folder),
    )
    assert "Features" not in job or job["Features"] == "(null)"


def test_auto_executor_is_slurm_and_asks_once_for_the_gpus_of_a_node(slurm_project: Project, asked: Path) -> None:
    done = slurm_project.call(
        "submit", "--partition", "high", "--follow", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "executor  slurm: sbatch is on PATH\n" in done.stdout
    assert "ranks     2 = 1 node x 2\n" in done.stdout
    assert "gpus      2 per node, all that the nodes of partition high have\n" in done.stdout
    assert [line.split()[0] for line in asked.read_text().splitlines()[:2]] == ["sinfo", "sbatch"]
    run = only_run(slurm_project)
    assert [log(run, rank) for rank in range(2)] == ["0,1\n"] * 2


def test_failed_setup_line_is_a_warning_at_the_end_of_the_run(slurm_project: Project) -> None:
    slurm_project.write("site.sh", "false\n")
    lines = ["test -e /nowhere || true", f". {slurm_project.folder}/site.sh", "load_modules 'cu da'", "false"]
    # a file whose last command fails has failed
    (slurm_project.folder / "site.sh").write_text("false\ntrue\n")
    slurm_project.write("mgpu.yaml", f"clusters: {{here: {{setup: {json.dumps(lines)}}}}}\n")
    for executor in ((), ("--executor", "local")):
        done = slurm_project.call("submit", *NO_GPUS, *executor, "--nodes", "2", "--follow", "--", "true")
        assert done.returncode == 0, done.stderr
        told = [line for line in done.stdout.splitlines() if line.startswith("warning ")]
        failed = "rank 0 on n1: this line of the cluster's setup failed: load_modules 'cu da'"
        # on this machine no setup is needed
        assert told == ([] if executor else [f"warning   {failed}"])


def test_failed_setup_is_reported_with_its_error(slurm_project: Project) -> None:
    slurm_project.write("mgpu.yaml", "clusters: {here: {setup: ['set -e', 'load_modules cuda']}}\n")
    run = submit(slurm_project, "--", "true")
    facts = slurm_project.finish(run)
    assert (facts["state"], facts["attempts"]) == ("FAILED", 0)
    assert re.fullmatch(
        r"its batch script failed before the ranks were started: line \d+: load_modules: command not found",
        facts["reason"],
    )
    assert slurm_project.call("logs", run.name).stderr.endswith(f" logs {run.name} --launch\n")
    assert "load_modules: command not found" in slurm_project.call("logs", run.name, "--launch").stdout
    group = submit(slurm_project, "--seeds", "2", "--", "true", "{seed}")
    assert slurm_project.call("wait", group.name).returncode == 1
    assert "load_modules: command not found" in slurm_project.call("logs", f"{group.name}/1", "--launch").stdout
    (slurm_project.folder / "mgpu.yaml").unlink()


# -- refusals


@pytest.fixture
def strict(cluster: Cluster) -> None:
    """A site that refuses at once what it could never start, and accounts that nobody has."""
    cluster.change_site(lines=("EnforcePartLimits=ALL", "AccountingStorageEnforce=associations"))


@pytest.mark.every_slurm
@pytest.mark.usefixtures("strict")
def test_sbatch_refusal_is_quoted_and_leaves_no_run(slurm_project: Project) -> None:
    refused = {
        ("--partition", "nowhere"): "sbatch: error: invalid partition specified: nowhere",
        ("--account", "nobody"): "Invalid account or account/partition combination specified",
        ("--nodes", "20"): "More processors requested than permitted",
        ("--mem", "900G"): "sbatch: error: Memory specification can not be satisfied",
        ("--constraint", "fast"): "Invalid feature specification",
        ("--nodelist", "n9"): "Invalid node name specified",
        ("--sbatch", "speed=9"): "sbatch: unrecognized option '--speed=9'",
        ("--sbatch", "begin=soon"): "sbatch: error: Invalid --begin specification",
    }
    for words, said in refused.items():
        done = slurm_project.call("submit", "--executor", "slurm", *NO_GPUS, *words, "--", "true")
        line = one_line(done, 3)
        assert line.startswith("mgpu-slurm: sbatch refused the job: sbatch: "), line
        assert said in line, (words, line)
        assert list(slurm_project.runs.glob("*")) == [], words
    done = slurm_project.call("submit", "--partition", "nowhere", "--", "true")
    assert one_line(done, 3) == ("mgpu-slurm: --partition nowhere: no such partition; there are main, high\n")


@pytest.mark.every_slurm
def test_job_that_can_never_start_shows_the_reason(slurm_project: Project, cluster: Cluster) -> None:
    if cluster.slurm >= "24.11":
        done = slurm_project.call("submit", "--executor", "slurm", *NO_GPUS, "--nodes", "20", "--", "true")
        assert "sbatch refused the job: " in (line := one_line(done, 3))
        assert ": Requested node configuration is not available: `sinfo -o " in line
        return
    run = submit(slurm_project, "--nodes", "20", "--", "true")
    wait_until(lambda: slurm_project.json("status", run.name)[0]["reason"] not in ("", "None"))
    (facts,) = slurm_project.json("status", run.name)
    assert (facts["state"], facts["reason"]) == (
        "PENDING",
        "PartitionConfig: it can never start: it asks for more than the partition allows",
    )
