"""Ranks in a container: a real image, run by Charliecloud, as an ordinary user of the real SLURM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.run_folder.layout import RunFolder
from tests import container_stand_in, images
from tests.on_slurm.cluster import Cluster
from tests.on_slurm.machine import CLEAN
from tests.on_slurm.users import User
from tests.support import require, wait_until

PROJECT = "/run/cluster/home/student/project"
"""As the nodes name it."""

TRAINS = """
    import json, os, sys, time
    from pathlib import Path
    import torch

    def train(run, config):
        run.seed(1)
        model = run.wrap(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = run.restore(model=model, optimizer=optimizer)
        facts = {"python": list(sys.version_info[:3]), "system": os.path.isfile("/etc/os-release-of-image")}
        facts |= {"parent": os.getppid(), "size": run.world_size, "data": os.listdir("/data"), "step": state.step}
        Path(os.environ["MGPU_PROJECT"], f"{run.attempt}-{run.rank}").write_text(json.dumps(facts))
        for epoch in state.epochs(100000):
            run.backward(model(torch.ones(4, 2)).sum())
            run.update(optimizer)
            run.report(epoch)
            time.sleep(0.05)
            if run.attempt == 2:
                break
        return {"steps": run.step}
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    require(images.what_is_missing())
    with images.built([PROJECT, "/data"]) as folder:
        (folder / "etc/os-release-of-image").touch()
        yield folder


@pytest.fixture
def project(student: User, image: Path) -> User:
    student.write("train.py", TRAINS)
    student.write("data/samples", "")
    return student


def facts(project: User, attempt: int) -> list[dict[str, Any]]:
    return [json.loads((project.folder / f"{attempt}-{rank}").read_text()) for rank in range(4)]


@pytest.mark.every_slurm
def test_ranks_in_a_container_save_at_a_signal_and_resume(project: User, cluster: Cluster, image: Path) -> None:
    words = ["--container", str(image), "--mount", f"{PROJECT}/data:/data", "--time", "30", "train.py"]
    run = RunFolder(project.folder / "runs" / project.submit("--nodes", "2", "--ntasks-per-node", "2", *words))
    wait_until(run.metrics.exists)
    first = facts(project, 1)
    assert [each["size"] for each in first] == [4] * 4
    assert all(each["system"] and each["python"][:2] == list(sys.version_info[:2]) for each in first)
    assert all(each["data"] == ["samples"] for each in first)
    # forks of one process for each node, which is in the container of its first rank
    assert [first[rank]["parent"] == first[rank + 1]["parent"] for rank in range(3)] == [True, False, True]
    job = json.loads(run.state.read_text())["job_id"]
    cluster.run("scancel", "--signal=USR2", job, user="student")
    cluster.until_job(job, "PENDING")
    cluster.start_now(job)
    assert project.call("wait", run.run).returncode == 0
    state = json.loads(run.state.read_text())
    assert (state["state"], state["attempts"]) == ("COMPLETED", 2)
    second = facts(project, 2)
    assert [each["step"] for each in second] == [second[0]["step"]] * 4
    assert second[0]["step"] > 0


ATTACHES = """
    import os, sys
    import mgpu_slurm
    import torch

    run = mgpu_slurm.attach()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    if os.environ["MGPU_ATTEMPT"] == "1" and run.rank == 1:
        os.kill(os.getpid(), 9)
    print("sum", int(total), "on", os.uname().nodename, "from", mgpu_slurm.__file__, sys.executable, flush=True)
"""


def test_killed_script_in_a_container_is_started_again(project: User, image: Path) -> None:
    project.write("script.py", ATTACHES)
    words = ["--container", str(image), "--mount", f"{PROJECT}/data:/data", "--nodes", "2", "--ntasks-per-node", "1"]
    run = RunFolder(project.folder / "runs" / project.submit(*words, "--retries", "1", "--", "python", "script.py"))
    assert project.call("wait", run.run).returncode == 0, project.call("why", run.run).stdout
    own = f"{PROJECT}/runs/{run.run}/package/mgpu_slurm/__init__.py"
    assert f"sum 2 on n1 from {own} /usr/bin/python3\n" in run.rank_log(2, 0).read_text()


def test_pyxis_starts_the_ranks(project: User, cluster: Cluster) -> None:
    """Tested with a stand-in for the plugin, and the real srun."""
    project.write("bin/image.sqsh", "")
    tools = project.folder / "bin"
    container_stand_in.install(tools, "srun", "/usr/bin/srun")
    tools.chmod(0o777)
    path = f"{PROJECT}/bin:{CLEAN['PATH']}"
    project.write("train.py", TRAINS.replace("/data", f"{PROJECT}/data/inside").replace("100000", "2"))
    (project.folder / "data" / "inside").mkdir()
    mount = f"{PROJECT}/data:{PROJECT}/data/inside:ro"
    container = {"image": "bin/image.sqsh", "mounts": [mount], "python": sys.executable}
    project.write("mgpu.yaml", json.dumps({"clusters": {"lab": {"container": container}}}))
    name = project.submit("--nodes", "2", "--ntasks-per-node", "2", "train.py", PATH=path)
    assert project.call("wait", name).returncode == 0, project.call("why", name).stdout
    assert [each["size"] for each in facts(project, 1)] == [4] * 4
    (call,) = [call for call in container_stand_in.said(tools) if call != "--help"]
    assert f"--container-image={PROJECT}/bin/image.sqsh --container-mounts={PROJECT}:{PROJECT}," in call


def test_pyxis_that_is_not_there_is_named(project: User) -> None:
    project.write("image.sqsh", "")
    done = project.call("submit", "--container", "image.sqsh", "train.py")
    assert (done.returncode, done.stderr) == (
        2,
        f"mgpu-slurm: container {PROJECT}/image.sqsh: this site's srun has no --container-image (Pyxis): use another"
        " runtime, as `runtime:` of `container:` in mgpu.yaml\n",
    )


def test_image_that_is_gone_on_the_nodes_is_named(project: User, cluster: Cluster, image: Path) -> None:
    link = project.folder / "image"
    link.symlink_to(image)
    cluster.drain("n1")
    words = ["--nodelist", "n1", "--mount", f"{PROJECT}/data:/data"]
    name = project.submit("--container", "./image", *words, "train.py")
    link.unlink()
    cluster.undrain("n1")
    assert project.call("wait", name).returncode == 1
    assert "can't" in project.call("why", name).stdout


def test_image_without_a_place_for_the_project_is_refused(project: User, image: Path) -> None:
    words = ["--name", "refused", "--container", str(image), "--mount", f"{PROJECT}/data:/elsewhere"]
    done = project.call("submit", *words, "train.py")
    assert (done.returncode, done.stderr) == (
        2,
        f"mgpu-slurm: container {image}: it has no folders to mount on: make /elsewhere in the image\n",
    )
    assert "refused" not in project.call("status").stdout
