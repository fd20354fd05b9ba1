from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.submission import cluster_file
from mgpu_slurm.submission.cluster_file import Cluster, ClusterFile

EVERYTHING = """\
job: jobs.digits
cluster: hpc
clusters:
  hpc:
    flags: {partition: gpu, account: abc, time: 1:30:00, gpus-per-node: 4, sbatch: {mail-type: END, nice: 100}}
    setup: ["module load cuda"]
    rename: {gpus-per-node: "gres=gpu:{}", mem: null}
    environment: {NCCL_DEBUG: WARN, OMP_NUM_THREADS: 4}
    readable-by: group
    signal: USR1@90
    max-requeues: 3
    kill-wait: 5
    snapshot-limit: 20MB
  other:
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def write_project(project: Path, text: str) -> None:
    (project / "mgpu.yaml").write_text(text)


def write_user(text: str) -> None:
    cluster_file.user_file().parent.mkdir(parents=True)
    cluster_file.user_file().write_text(text)


def refusal(project: Path, text: str) -> str:
    write_project(project, text)
    with pytest.raises(UserError) as caught:
        cluster_file.load(project)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(project / "mgpu.yaml"))
    return message


def test_every_key_of_a_cluster_is_parsed(project: Path) -> None:
    write_project(project, EVERYTHING)
    hpc = Cluster(
        name="hpc",
        flags={
            "partition": "gpu",
            "account": "abc",
            "time": "1:30:00",
            "gpus-per-node": 4,
            "sbatch": {"mail-type": "END", "nice": "100"},
        },
        setup=("module load cuda",),
        rename={"gpus-per-node": "gres=gpu:{}", "mem": None},
        environment={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"},
        readable_by="group",
        signal="USR1@90",
        max_requeues=3,
        kill_wait=5,
        snapshot_limit=20_000_000,
    )
    assert cluster_file.load(project) == ClusterFile("jobs.digits", "hpc", {"hpc": hpc, "other": Cluster(name="other")})


def test_missing_files_give_an_empty_cluster(project: Path) -> None:
    file = cluster_file.load(project)
    assert file == ClusterFile()
    assert file.named(None) == Cluster()


def test_project_file_overrides_the_user_file(project: Path) -> None:
    write_user(
        "job: mine\ncluster: hpc\nclusters:\n"
        "  hpc: {flags: {partition: gpu, account: me}, rename: {mem: 'mem-per-gpu={}'}, max-requeues: 1}\n"
        "  home: {}\n"
    )
    write_project(project, "job: ours\nclusters:\n  hpc: {flags: {account: us}, rename: {mem: null}}\n")
    file = cluster_file.load(project)
    assert (file.job, file.cluster, list(file.clusters)) == ("ours", "hpc", ["hpc", "home"])
    assert file.named(None) == Cluster(
        name="hpc", flags={"partition": "gpu", "account": "us"}, rename={"mem": None}, max_requeues=1
    )


def test_user_file_is_under_home_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cluster_file.user_file() == tmp_path / ".config" / "mgpu_slurm" / "mgpu.yaml"


def test_error_in_the_user_file_names_that_file(project: Path) -> None:
    write_user("clusters: {hpc: {max-requeues: -1}}")
    write_project(project, "job: train")
    with pytest.raises(UserError, match="max-requeues -1") as caught:
        cluster_file.load(project)
    assert str(caught.value).startswith(str(cluster_file.user_file()))


def test_only_cluster_is_the_default(project: Path) -> None:
    write_project(project, "clusters: {hpc: {kill-wait: 1}}")
    file = cluster_file.load(project)
    assert file.named(None) == file.named("hpc") == Cluster(name="hpc", kill_wait=1)


def test_several_clusters_need_a_choice(project: Path) -> None:
    write_project(project, "clusters: {hpc: {}, other: {}}")
    file = cluster_file.load(project)
    assert file.named("other").name == "other"
    with pytest.raises(UserError, match=r"several clusters \(hpc, other\): choose with --cluster"):
        file.named(None)


def test_unknown_cluster_is_rejected_with_suggestion(project: Path) -> None:
    write_project(project, "cluster: hpcc\nclusters: {hpc: {}}")
    with pytest.raises(UserError, match=r"unknown cluster 'hpcc' \(did you mean 'hpc'\?\)"):
        cluster_file.load(project).named(None)
    with pytest.raises(UserError, match="unknown cluster 'x': there is no `clusters:`"):
        ClusterFile().named("x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jobs: train", "unknown key 'jobs' (did you mean 'job'?)"),
        ("clusters: [hpc]", "clusters=['hpc']: expected"),
        ("clusters: {hpc: {flag: {}}}", "cluster 'hpc': unknown key 'flag' (did you mean 'flags'?)"),
        ("clusters: {hpc: {name: x}}", "unknown key 'name'"),
        ("clusters: {hpc: {flags: {gpus-per-nodes: 1}}}", "unknown flag 'gpus-per-nodes' (did you mean"),
        ("clusters: {hpc: {flags: {time: soon}}}", "--time 'soon'"),
        ("clusters: {hpc: {readable-by: all}}", "readable_by='all': expected 'owner' or 'group'"),
        ("clusters: {hpc: {setup: module load cuda}}", "setup='module load cuda': expected"),
        ("clusters: {hpc: {environment: {A-B: x}}}", "environment 'A-B'"),
        ("clusters: {hpc: {environment: {DEBUG: on}}}", "environment.DEBUG=True: expected"),
        ("clusters: {hpc: {signal: KILL}}", "'KILL' cannot announce"),
        ("clusters: {hpc: {signal: USR2@soon}}", "expected NAME@SECONDS"),
        ("clusters: {hpc: {kill-wait: -1}}", "kill-wait -1: expected 0 or more"),
        ("clusters: {hpc: {snapshot-limit: big}}", "snapshot-limit: size 'big'"),
        ("clusters: {hpc: {gpu-memory: 80}}", "gpu-memory: '80' has no unit: write 80GiB"),
        ("clusters: {hpc: {rename: {gpus-per-node: --gres=gpu:4}}}", "rename gpus-per-node: '--gres=gpu:4'"),
        ("clusters: {hpc: {rename: {Mem: x}}}", "rename Mem"),
        ("- job", "expected `key: value` lines"),
    ],
)
def test_invalid_file_is_rejected_with_its_path(project: Path, text: str, words: str) -> None:
    assert words in refusal(project, text)
