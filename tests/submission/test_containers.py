"""Containers before a submission: what decides on them, and what is refused; the programs are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.container import Container
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission import containers
from tests import container_stand_in


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an image, and the program for it on PATH."""
    container_stand_in.install(tmp_path / "tools", "apptainer")
    # only its name matters
    (tmp_path / "tools" / "sbatch").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/tools", prepend=":")
    (tmp_path / "torch.sif").touch()
    return tmp_path


def check(project: Path, container: Container | None, **values: object) -> tuple[str, bool]:
    facts = {"executor": "slurm", "project": str(project), "python": sys.executable} | values
    spec = Spec("r", Target(function="a:b"), resources=Resources(), container=container, **facts)  # type: ignore[arg-type]
    found = containers.check(spec, RunFolder(project / "runs" / "r"))
    assert found is not None
    return found.words, found.is_complete


def decided(project: Path, *mounts: str, image: str | None = None, default: Container | None = None) -> Container:
    found = containers.decide(image, mounts, default, project)
    assert found is not None
    return found


def python_that_says(project: Path, facts: str, code: int = 0) -> Container:
    python = project / "tools" / "python"
    python.write_text(f"#!/bin/sh\necho '{facts}'\nexit {code}\n")
    python.chmod(0o755)
    return Container(str(project / "torch.sif"), python=str(python))


def test_call_adds_to_the_cluster_file(project: Path) -> None:
    default = Container("other.sif", mounts=("/data",), options=("--rocm",), python="python3.12")
    found = decided(project, "tools:/tools:ro", image="torch.sif", default=default)
    assert found.image == f"{project}/torch.sif"
    assert found.mounts == ("/data", f"{project}/tools:/tools:ro")
    assert (found.runtime, found.options, found.python) == ("apptainer", ("--rocm",), "python3.12")


def test_image_may_be_a_name_or_nothing(project: Path) -> None:
    assert decided(project, image="docker://pytorch/pytorch").image == "docker://pytorch/pytorch"
    assert containers.decide(None, (), None, project) is None
    assert containers.decide(None, (), Container(mounts=("/data",)), project) is None
    assert containers.decide("none", (), Container("torch.sif"), project) is None
    with pytest.raises(UserError, match="--mount /tmp: the run has no container: add --container IMAGE"):
        containers.decide(None, ("/tmp",), None, project)


def test_image_that_does_not_exist_is_refused(project: Path) -> None:
    with pytest.raises(UserError, match=r"container 'none.sif': there is no such file or folder: check the path"):
        decided(project, image="none.sif")


def test_mount_that_does_not_exist_is_refused(project: Path) -> None:
    with pytest.raises(UserError, match="mount /none:/x: there is no /none here: check --mount, or"):
        check(project, decided(project, "/none:/x", image="torch.sif"))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ('{"python": [3, 8, 10], "packages": {}}', "it has Python 3.8.10: use an image with 3.10 or newer"),
        (
            '{"python": [3, 12, 1], "packages": {"PyYAML": "6.0", "torch": null}}',
            "its Python has no torch: install it in the image",
        ),
        (
            '{"python": [3, 12, 1], "packages": {"PyYAML": "6.0", "torch": "2.5.1+cu124"}}',
            r"it has torch 2.5.1\+cu124: use an image with 2.6 or newer",
        ),
    ],
)
def test_image_that_cannot_train_is_refused(project: Path, facts: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^container {project}/torch.sif: {words}$"):
        check(project, python_that_says(project, facts))


def test_versions_of_the_image_are_told(project: Path) -> None:
    facts = '{"python": [3, 12, 1], "packages": {"PyYAML": "6.0", "torch": "2.9.1", "optuna": "4.5.0"}}'
    assert check(project, python_that_says(project, facts), kind="sweep") == (
        f"{project}/torch.sif (apptainer): Python 3.12.1, PyYAML 6.0, torch 2.9.1, optuna 4.5.0",
        True,
    )


def test_container_that_does_not_start_on_a_login_node_may_start_on_others(project: Path) -> None:
    container = python_that_says(project, "", code=3)
    problem = f"container {project}/torch.sif does not start here: exit code 3"
    assert check(project, container) == (f"{project}/torch.sif (apptainer): not checked: {problem}", False)
    with pytest.raises(UserError, match=problem):
        check(project, container, executor="local")


def test_program_may_come_from_the_setup(project: Path) -> None:
    container = Container(str(project / "torch.sif"), runtime="singularity")
    with pytest.raises(UserError, match="singularity is not on PATH: load its module here, or in `setup:`"):
        check(project, container)
    assert check(project, container, setup=("module load singularity",)) == (
        f"{project}/torch.sif (singularity): not checked, as singularity is not on PATH before the cluster's setup",
        False,
    )
