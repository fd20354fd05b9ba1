"""Containers of local runs: a stand-in for Apptainer that takes its options, and what is refused before the start."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import container_stand_in
from tests.support import Project, require


@pytest.fixture
def tools(project: Project) -> Path:
    refused = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, text=True)
    require(f"containers need namespaces: {refused.stderr.strip()}" if refused.returncode else None)
    folder = container_stand_in.install(project.folder.parent / "tools", "apptainer")
    project.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    project.write("torch.sif", "")
    return folder


TRAINS = """
    import json, os
    from pathlib import Path

    def train(run, config):
        held = sorted(os.listdir("{data}"))
        try:
            Path("{data}", "new").touch()
        except OSError as error:
            held.append(error.strerror)
        facts = [held, run.world_size, os.environ.get("PYTHONNOUSERSITE")]
        Path(os.environ["MGPU_PROJECT"], f"facts-{{run.rank}}").write_text(json.dumps(facts))
"""


def test_local_ranks_run_in_the_container(project: Project, tools: Path) -> None:
    data, place = project.folder.parent / "data", project.folder.parent / "place"
    data.mkdir()
    place.mkdir()
    (data / "samples").touch()
    project.write("train.py", TRAINS.format(data=place))
    project.write("mgpu.yaml", f"clusters: {{local: {{container: {{python: {sys.executable}}}}}}}\n")
    words = ["--container", "torch.sif", "--mount", f"../data:{place}:ro", "--nodes", "2"]
    run, facts = project.run(*words, "train.py")
    assert facts["state"] == "COMPLETED", facts
    for rank in range(2):
        found = json.loads((project.folder / f"facts-{rank}").read_text())
        assert found == [["samples", os.strerror(errno.EROFS)], 2, "1"]
    probe, *ranks = container_stand_in.said(tools)
    assert len(ranks) == 2
    assert f"--bind={run}/package" not in probe
    package = f":{run}/package/mgpu_slurm"
    assert all(call.startswith(f"exec --pwd={run} --bind=") and f"{package} " in call for call in ranks)
    assert list((run / "package" / "mgpu_slurm").iterdir()) == []


def refused(project: Project, *words: str) -> str:
    done = project.call("submit", "--executor", "local", "--no-follow", *words)
    assert done.returncode == 2, done.stderr
    assert not (project.folder / "runs").exists() or not list((project.folder / "runs").iterdir())
    return done.stderr


def test_image_without_python_is_refused_before_anything_starts(project: Project, tools: Path) -> None:
    project.write("train.py", "def train(run, config): pass\n")
    project.write("mgpu.yaml", "clusters: {local: {container: {image: torch.sif, python: python9}}}\n")
    assert refused(project, "train.py") == (
        f"mgpu-slurm: container {project.folder}/torch.sif: it has no python9: name its Python as `python:` of"
        " `container:` in mgpu.yaml\n"
    )


@pytest.mark.parametrize("image", ["/cluster/torch.sif", "nvcr.io#nvidia/pytorch"])
def test_rehearsal_needs_no_cluster(project: Project, image: str) -> None:
    project.write("train.py", "def train(run, config): pass\n")
    words = ["--executor", "slurm", "--gpus-per-node", "2", "--container", image, "--mount", "/cluster/data"]
    done = project.call("submit", "--dry-run", *words, "train.py")
    assert done.returncode == 0, done.stderr
    assert f"container {image} (" in done.stdout
    assert "not checked, as this is no machine of a cluster" in done.stdout
    assert "/cluster/data:/cluster/data" in done.stdout


def test_missing_runtime_is_named(project: Project) -> None:
    project.write("torch.sif", "")
    project.write("train.py", "def train(run, config): pass\n")
    project.write("mgpu.yaml", "clusters: {local: {container: {image: torch.sif, runtime: singularity}}}\n")
    assert refused(project, "train.py") == (
        f"mgpu-slurm: container {project.folder}/torch.sif: singularity is not on PATH: load its module here, or in"
        " `setup:` of mgpu.yaml\n"
    )
    project.write("torch.sqsh", "")
    project.write("mgpu.yaml", "clusters: {local: {container: torch.sqsh}}\n")
    assert "Pyxis is a plugin of srun" in refused(project, "train.py")
    # the cluster file has an image, and this run wants none
    done = project.call("submit", "--executor", "local", "--container", "none", "--dry-run", "train.py")
    assert (done.returncode, "container" in done.stdout) == (0, False)
