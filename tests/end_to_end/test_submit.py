"""What a submission does and leaves behind, seen from the outside only."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import interpreter
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import REPOSITORY, Project, log, make_project, processes_of, wait_until, without_gloo

STATUS_NAMES = [
    *("run", "kind", "state", "job_id", "attempts", "nodes", "ranks", "step", "progress", "total", "metrics"),
    *("curves", "submitted", "started", "ended", "reason", "group", "left_seconds"),
]
RUN_NAME = r"digits-\d{8}-\d{6}-[0-9a-f]{4}"
STEPS = 45
"""Of an epoch of the digits job."""


def test_run_starts_in_the_submission_folder_even_if_it_is_empty(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    project.write("where.py", "from pathlib import Path\ndef train(run, config):\n    print(Path.cwd().name)\n")
    subprocess.run(["git", "init", "--quiet", project.folder], check=True)
    below = Project(project.folder / "empty", project.environ)
    below.folder.mkdir()
    for words in (("--", "sh", "-c", "basename $PWD"), ("../where.py",)):
        folder, facts = below.run(*words)
        assert (facts["state"], log(folder, 0)) == ("COMPLETED", "empty\n")


def digits_project(base: Path) -> Project:
    project = make_project(base)
    shutil.copytree(REPOSITORY / "jobs", project.folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    return project


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@dataclasses.dataclass(frozen=True)
class Submitted:
    """The digits job, submitted with no target named and followed to its end."""

    project: Project
    done: subprocess.CompletedProcess[str]
    folder: Path


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    project = digits_project(tmp_path_factory.mktemp("submit"))
    done = project.call("submit", "--executor", "local", "--nodes", "2", "epochs=2", "seed=5")
    (folder,) = project.runs.iterdir()
    return Submitted(project, done, folder)


# -- the screen


def test_output_shows_the_run_its_progress_and_its_result(digits: Submitted) -> None:
    assert (digits.done.returncode, digits.done.stderr) == (0, "")
    name = digits.folder.name
    assert re.fullmatch(RUN_NAME, name)
    lines = without_gloo(digits.done.stdout).splitlines()
    assert lines[0] == f"run       {name}"
    assert lines[1] == "target    jobs.digits:train"
    assert lines[2].startswith("config    epochs=2  batch_size=32")
    assert lines[3] == "ranks     2 = 2 simulated nodes x 1"
    assert lines[4] == "executor  local: requested"
    assert lines[5].startswith("gpus      ")
    assert lines[6] == f"folder    {digits.folder}"
    progress = [line for line in lines if line.startswith("[")]
    assert [re.sub(r"\s+", " ", line)[:14] for line in progress] == ["[ 1] step 45 a", "[ 2] step 90 a"]
    (ended,) = [place for place, line in enumerate(lines) if line.startswith(f"COMPLETED  {name}  in ")]
    assert lines[ended + 1].startswith("result    accuracy 0.")
    assert f"runs/{name}/result.json" in lines[ended + 1]
    assert "tensorboard" in lines[ended + 2]


# -- the JSON that programs read


def test_status_json_has_the_stable_field_names(digits: Submitted) -> None:
    (facts,) = digits.project.json("status", digits.folder.name)
    assert list(facts) == STATUS_NAMES
    expected = {"run": digits.folder.name, "kind": "run", "state": "COMPLETED", "attempts": 1, "nodes": 2, "ranks": 2}
    assert expected | {"step": 2 * STEPS, "progress": 2, "total": 2, "left_seconds": None, "reason": ""} == {
        name: facts[name] for name in [*expected, "step", "progress", "total", "left_seconds", "reason"]
    }
    assert facts["job_id"].isdigit()
    assert set(facts["metrics"]) == {"accuracy", "loss"}
    assert facts["curves"]["speed/step_seconds"] > 0
    assert facts["submitted"] < facts["started"] < facts["ended"]


def test_submit_json_has_the_stable_field_names(project: Project) -> None:
    facts = project.json("submit", "--executor", "local", "--no-follow", "--", "true")
    assert list(facts) == ["run", "folder", "job_id", "executor"]
    assert facts["folder"] == str(project.runs / facts["run"])
    assert facts["executor"] == "local"
    assert project.finish(Path(facts["folder"]))["job_id"] == facts["job_id"]


# -- the files


def test_run_folder_contains_exactly_the_expected_files(digits: Submitted) -> None:
    names = {path.name for path in digits.folder.iterdir()}
    assert names == {
        *("spec.yaml", "environment.json", "code", "state.json", "attempts.jsonl", "logs", "tensorboard"),
        *("metrics.jsonl", "checkpoints", "saves.jsonl", "usage", "result.json"),
    }


def test_spec_contains_the_whole_request_and_round_trips(digits: Submitted, tmp_path: Path) -> None:
    spec = read_spec(RunFolder(digits.folder))
    assert (spec.run, spec.target.function, spec.resources.nodes) == (digits.folder.name, "jobs.digits:train", 2)
    assert (spec.config["epochs"], spec.config["seed"], spec.config["lr"]) == (2, 5, 3e-3)
    assert spec.project == str(digits.project.folder)
    again = RunFolder(tmp_path / spec.run)
    again.create()
    spec.write(again)
    assert read_spec(again) == spec
    assert again.spec.read_bytes() == (digits.folder / "spec.yaml").read_bytes()


def test_environment_is_recorded(digits: Submitted) -> None:
    recorded = json.loads((digits.folder / "environment.json").read_text())
    assert recorded["python"]["executable"] == sys.executable
    assert recorded["host"] == os.uname().nodename
    assert {"torch", "mgpu-slurm", "numpy"} <= set(recorded["packages"])
    assert "epochs=2" in recorded["command"]


def test_snapshot_contains_the_project_without_its_runs(digits: Submitted) -> None:
    def files(root: Path) -> dict[str, bytes]:
        paths = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}

    assert list(files(digits.folder / "code")) != []
    assert files(digits.folder / "code") == {
        f"jobs/{name}": content for name, content in files(digits.project.folder / "jobs").items()
    }


def test_each_rank_has_a_log_and_only_rank_0_logs_progress(digits: Submitted) -> None:
    assert {"1-0.log", "1-1.log"} <= {path.name for path in (digits.folder / "logs").iterdir()}
    assert log(digits.folder, 0).count("accuracy") == 2
    assert log(digits.folder, 1) == ""
    first, second = (digits.project.call("logs", digits.folder.name, "--rank", rank).stdout for rank in "01")
    assert digits.project.call("logs", digits.folder.name).stdout == first
    assert (without_gloo(first), without_gloo(second)) == (log(digits.folder, 0), "")


@pytest.mark.parametrize("rank", ["9", "2", "0-2"])
def test_logs_of_an_unknown_rank_are_refused(digits: Submitted, rank: str) -> None:
    done = digits.project.call("logs", digits.folder.name, "--rank", rank)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"mgpu-slurm: --rank {rank}: run {digits.folder.name} has ranks 0 to 1\n"


def test_tensorboard_has_the_same_values_as_the_metrics_file(digits: Submitted) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reports = read_jsonl(digits.folder / "metrics.jsonl")
    assert [(report["progress"], report["step"]) for report in reports] == [(1, STEPS), (2, 2 * STEPS)]
    curves = EventAccumulator(str(digits.folder / "tensorboard")).Reload()
    assert {"accuracy", "loss", "speed/step_seconds"} <= set(curves.Tags()["scalars"])
    for name in curves.Tags()["scalars"]:
        points = [(event.step, event.value) for event in curves.Scalars(name)]
        values = [(report["step"], (report["metrics"] | report["curves"])[name]) for report in reports]
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in values]


def test_each_epoch_has_a_checkpoint_and_result_is_the_last_accuracy(digits: Submitted) -> None:
    checkpoints = digits.folder / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step-000000045", "step-000000090"}
    result = json.loads((digits.folder / "result.json").read_text())
    last = read_jsonl(digits.folder / "metrics.jsonl")[-1]
    assert result["result"] == {"accuracy": last["metrics"]["accuracy"], "parameters": 29066}
    assert (result["step"], result["progress"]) == (2 * STEPS, 2)
    assert last["metrics"]["accuracy"] > 0.9


def test_attempts_file_has_one_start_and_one_end(digits: Submitted) -> None:
    started, ended = read_jsonl(digits.folder / "attempts.jsonl")
    assert (started["event"], started["attempt"], started["nodes"]) == ("started", 1, ["local1", "local2"])
    assert (ended["event"], ended["exit_code"]) == ("ended", 0)
    # the last of them ends when it has told how the run ended
    wait_until(lambda: processes_of(digits.folder) == [], seconds=20)


def test_run_is_found_from_another_folder(digits: Submitted, tmp_path: Path) -> None:
    elsewhere = {"cwd": tmp_path}
    assert digits.folder.name in digits.project.call("status", **elsewhere).stdout
    assert digits.project.call("wait", digits.folder.name, **elsewhere).returncode == 0
    assert without_gloo(digits.project.call("logs", digits.folder.name, **elsewhere).stdout) == log(digits.folder, 0)
    # the beginning of a name is enough where it is clear
    assert digits.project.call("logs", "digits-", **elsewhere).returncode == 0


# -- the same again, and otherwise


@pytest.fixture(scope="module")
def at_the_same_moment(digits: Submitted, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two submissions started together: one as in `digits`, one with another seed that a group may read."""
    project = digits_project(tmp_path_factory.mktemp("pair"))
    project.write("mgpu.yaml", "clusters: {shared: {readable-by: group}}\n")
    common = ("submit", "--json", "--executor", "local", "--follow", "--nodes", "2", "epochs=2")
    same = project.start(*common, "seed=5")
    other = project.start(*common, "seed=6", "--cluster", "shared")
    ended = [process.communicate(timeout=100) for process in (same, other)]
    assert (same.returncode, other.returncode) == (0, 0), ended
    first, second = (Path(json.loads(out)["folder"]) for out, _ in ended)
    return first, second


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [report["metrics"] for report in read_jsonl(folder / "metrics.jsonl")]


def test_same_seed_gives_bitwise_identical_results(digits: Submitted, at_the_same_moment: tuple[Path, Path]) -> None:
    same, other = at_the_same_moment
    assert metrics_of(same) == metrics_of(digits.folder)
    last = "checkpoints/step-000000090/rank-00000.safetensors"
    assert (same / last).read_bytes() == (digits.folder / last).read_bytes()
    assert metrics_of(other)[-1]["loss"] != metrics_of(digits.folder)[-1]["loss"]


def test_run_folder_is_private_or_readable_by_the_group(at_the_same_moment: tuple[Path, Path]) -> None:
    own, shared = at_the_same_moment
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_IMODE(shared.stat().st_mode) == 0o750
    closed = {
        name: oct(mode)
        for name, mode in modes(shared).items()
        if mode & (0o050 if (shared / name).is_dir() else 0o040) != (0o050 if (shared / name).is_dir() else 0o040)
    }
    assert closed == {}
    assert len(modes(shared)) > 20


# -- what a rank is told


def test_ranks_get_the_environment_variables_of_slurm_and_torchrun(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    # those of a job that this submission is made from must not reach the ranks
    for name, value in {"RANK": "7", "SLURM_PROCID": "7", "SLURM_JOB_ID": "123", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    writes = "env -0 > $MGPU_RUN_FOLDER/env-$SLURM_PROCID"
    folder, facts = project.run("--nodes", "2", "--ntasks-per-node", "2", "--", "sh", "-c", writes)
    assert (facts["state"], facts["nodes"], facts["ranks"]) == ("COMPLETED", 2, 4)
    ports = set()
    for rank in range(4):
        texts = (folder / f"env-{rank}").read_text().rstrip("\0").split("\0")
        found = dict(text.split("=", 1) for text in texts)
        node, local_rank = divmod(rank, 2)
        expected = {
            "SLURM_JOB_ID": facts["job_id"],
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_NODELIST": "local[1-2]",
            "SLURM_STEP_NODELIST": "local[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": f"local{node + 1}",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_TASKS_PER_NODE": "2(x2)",
            "SLURM_RESTART_COUNT": "0",
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MGPU_PROJECT": str(project.folder),
            "MGPU_RUN_FOLDER": str(folder),
            "MGPU_ATTEMPT": "1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 4)),
        }
        assert {name: found.get(name) for name in expected} == expected
        ports.add(found["MASTER_PORT"])
    (port,) = ports
    assert 10000 <= int(port) < 65536


def test_simulated_nodes_share_the_cores_of_this_machine(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder, _ = project.run("--nodes", "2", "--", "sh", "-c", "echo $OMP_NUM_THREADS")
    assert log(folder, 1) == f"{max(1, len(os.sched_getaffinity(0)) // 2)}\n"


@pytest.mark.parametrize(("gpus", "seen"), [("4,7", ["4", "7"]), ("4,7,9,11", ["4,7", "9,11"]), ("4", ["", ""])])
def test_simulated_nodes_divide_the_gpus_or_have_none(project: Project, gpus: str, seen: list[str]) -> None:
    project.environ["CUDA_VISIBLE_DEVICES"] = gpus
    words = ("--nodes", "2", "--ntasks-per-node", "1", "--", "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-unset}")
    folder, _ = project.run(*words)
    assert [log(folder, rank) for rank in (0, 1)] == [f"{text}\n" for text in seen]


def test_ranks_of_a_node_with_mig_see_one_instance_each(project: Project) -> None:
    project.environ["CUDA_VISIBLE_DEVICES"] = "MIG-a,MIG-b,MIG-c,MIG-d"
    words = ("--ntasks-per-node", "2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    folder, _ = project.run(*words)
    said = [log(folder, rank).splitlines() for rank in (0, 1)]
    assert [lines[-1] for lines in said] == ["MIG-a", "MIG-c"]
    assert "requested 4 MIG instances for 2 ranks of a node, but CUDA uses one for each process" in said[0][0]
    # a launcher starts ranks itself
    folder, _ = project.run("--ntasks-per-node", "1", *words[2:])
    assert log(folder, 0).splitlines()[-1] == "MIG-a,MIG-b,MIG-c,MIG-d"


def test_gpus_of_amd_are_divided_by_their_place_among_those_of_slurm(project: Project) -> None:
    project.environ |= {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    script = "echo $ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES"
    folder, _ = project.run("--nodes", "2", "--ntasks-per-node", "1", "--", "sh", "-c", script)
    assert [log(folder, rank) for rank in (0, 1)] == ["2,3 0\n", "2,3 1\n"]


# -- the list of runs, and getting rid of them


def test_status_lists_newest_first_and_clean_deletes_only_if_confirmed(project: Project) -> None:
    old, middle, new = (project.run("--name", name, "--", "true")[0] for name in ("old", "middle", "new"))
    assert [facts["run"] for facts in project.json("status")] == [new.name, middle.name, old.name]
    table = project.call("status").stdout.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [[run.name, "COMPLETED"] for run in (new, middle, old)]

    shown = project.call("clean").stdout
    assert all(run.name in shown for run in (old, middle, new))
    assert "nothing was deleted" in shown
    assert project.call("clean", middle.name, stdin=subprocess.DEVNULL).returncode != 0
    assert middle.exists()
    # the beginning of a name is enough to look, what `--name` gave is, and neither is to delete without a question
    assert project.json("status", "midd")[0]["run"] == project.json("status", "middle")[0]["run"] == middle.name
    done = project.call("clean", "--yes", "middle")
    assert (done.returncode, middle.exists()) == (2, True)
    assert f"--yes needs the full name: {middle.name}" in done.stderr
    assert project.call("clean", "--yes", middle.name).returncode == 0
    assert {path.name for path in project.runs.iterdir()} == {old.name, new.name}
    assert project.call("logs", middle.name).returncode == 2


def test_live_run_is_not_deleted(project: Project) -> None:
    folder = project.submit("--", "sh", "-c", "until [ -e $MGPU_RUN_FOLDER/go ]; do sleep 0.02; done")
    done = project.call("clean", "--yes", folder.name)
    assert (done.returncode, folder.exists()) == (2, True)
    assert f"mgpu_slurm cancel {folder.name}` first" in done.stderr
    (folder / "go").touch()
    assert project.finish(folder)["state"] == "COMPLETED"


# -- looking before leaping


@pytest.mark.parametrize("as_json", [False, True])
def test_dry_run_starts_nothing_and_leaves_no_files(project: Project, tmp_path: Path, as_json: bool) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    project.environ["TMPDIR"] = str(temporary)
    flags = ("--json",) if as_json else ()
    done = project.call("submit", "--executor", "local", "--nodes", "2", "--dry-run", *flags, "--", "touch", "here")
    assert (done.returncode, done.stderr) == (0, "")
    if as_json:
        assert json.loads(done.stdout)["spec"]["target"]["command"] == ["touch", "here"]
    else:
        assert done.stdout.endswith("nothing was started (--dry-run)\n")
    assert list(temporary.iterdir()) == []
    assert list(project.folder.iterdir()) == []
    assert not (tmp_path / "state").exists()


def test_sbatch_variables_yield_to_the_cluster_file_and_the_call(project: Project) -> None:
    project.write("mgpu.yaml", "clusters: {hpc: {flags: {account: file}}}")
    project.environ |= {"SBATCH_ACCOUNT": "profile", "SBATCH_PARTITION": "profile", "SBATCH_QOS": "profile"}
    words = ("submit", "--executor", "slurm", "--dry-run", "--gpus-per-node", "0", "--qos", "call", "--", "true")
    said = project.call(*words).stdout
    for line in ("--partition=profile", "--account=file", "--qos=call"):
        assert f"#SBATCH {line}\n" in said


def test_dry_run_prints_the_batch_script_without_slurm(project: Project) -> None:
    project.write("train.py", "def train(run, config): pass\n")
    words = ("submit", "--executor", "slurm", "--dry-run", "train", "--nodes", "3", "--gpus-per-node", "4")
    done = project.call(*words, "--time", "1:00:00", "--sbatch", "mail-type=END")
    assert (done.returncode, done.stderr) == (0, "")
    _, _, script = done.stdout.partition("#!/bin/bash\n")
    lines = script.splitlines()
    for flag in ("nodes=3", "gpus-per-node=4", "time=1:00:00", "mail-type=END", "signal=USR2@120", "requeue"):
        assert f"#SBATCH --{flag}" in lines
    batch = shlex.join(interpreter.command(sys.executable, "mgpu_slurm.job", "batch"))
    assert lines[-1].startswith(f"exec {batch} ")
    assert script.endswith("\n")
    assert not project.runs.exists()
    facts = json.loads(project.call(*words, "--json").stdout)
    assert facts["script"].startswith("#!/bin/bash\n")


# -- while it runs


def test_ctrl_c_stops_following_but_not_the_run(project: Project) -> None:
    waits = "echo going; until [ -e $MGPU_RUN_FOLDER/go ]; do sleep 0.02; done; echo gone"
    process = project.start("submit", "--executor", "local", "--", "sh", "-c", waits, start_new_session=True)
    assert process.stdout is not None
    while process.stdout.readline() != "going\n":
        assert process.poll() is None
    # a terminal sends it to the whole foreground group
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    (folder,) = project.runs.iterdir()
    assert process.returncode == 130
    assert "the run continues" in said
    assert f"cancel {folder.name}" in said
    assert "Traceback" not in said
    (facts,) = project.json("status")
    assert facts["state"] == "RUNNING"
    (folder / "go").touch()
    assert project.finish(folder)["state"] == "COMPLETED"
    assert log(folder, 0) == "going\ngone\n"


LOOKS_BACK = """
    import json, time
    from dataclasses import dataclass, field
    from pathlib import Path

    from pydantic import BaseModel

    @dataclass
    class Inner:
        weights: Path | None = None

    class Model(BaseModel):
        cache: Path = Path("cache")

    @dataclass
    class Config:
        data: Path = Path("data")
        files: list[Path] = field(default_factory=list)
        pair: tuple[Path, Path] = (Path("a"), Path("b"))
        inner: Inner = field(default_factory=Inner)
        model: Model = field(default_factory=Model)
        name: str = "plain/text"

    def train(run, config: Config):
        Path(run.folder, "ready").touch()
        while not Path(run.folder, "go").exists():
            time.sleep(0.02)
        import helper
        paths = [config.data, *config.files, *config.pair, config.model.cache, config.inner.weights]
        seen = [helper.WORD, config.name, *map(str, paths), str(Path.cwd())]
        Path(run.folder, "seen.json").write_text(json.dumps(seen))
"""


def test_later_edits_do_not_reach_a_run_and_paths_resolve_to_the_project(project: Project) -> None:
    project.write("train.py", LOOKS_BACK)
    project.write("helper.py", "WORD = 'submitted'\n")
    project.write("values.yaml", "inner: {weights: best.pt}\nfiles: [/abs/one, two]\n")
    folder = project.submit("train.py", "--config", "values.yaml", "data=../data")
    wait_until(lambda: (folder / "ready").exists())
    project.write("helper.py", "WORD = 'edited'\n")
    project.write("train.py", "raise SystemExit('edited')\n")
    (folder / "go").touch()
    assert project.finish(folder)["state"] == "COMPLETED", log(folder, 0)
    word, name, data, *others, weights, cwd = json.loads((folder / "seen.json").read_text())
    assert (word, name, cwd) == ("submitted", "plain/text", str(folder / "code"))
    assert os.path.normpath(data) == str(project.folder.parent / "data")
    assert others == ["/abs/one", *(str(project.folder / name) for name in ("two", "a", "b", "cache"))]
    assert weights == str(project.folder / "best.pt")


def test_resume_does_not_need_the_files_of_the_project(project: Project) -> None:
    project.write("tool.sh", "echo try $MGPU_ATTEMPT; test $MGPU_ATTEMPT = 2\n")
    folder, facts = project.run("--", "sh", "tool.sh")
    assert (facts["state"], facts["reason"]) == ("FAILED", "rank 0 ended with exit code 1: try 1")
    (project.folder / "tool.sh").unlink()
    done = project.call("resume", folder.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert log(folder, 0, attempt=2) == "try 2\n"
    assert project.finish(folder)["attempts"] == 2
