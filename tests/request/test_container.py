"""The command lines of containers: the forms of the runtimes' manuals, and mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.container import Container, Mount, inside, without_covered

MOUNTS = [Mount("/lustre/project", "/lustre/project"), Mount("/data", "/mnt", read_only=True)]
RANK = ["python3", "-m", "mgpu_slurm.job", "rank"]


def wrapped(container: Container, gpus: bool = False) -> str:
    return " ".join(container.wrapped(RANK, MOUNTS, "/lustre/run", gpus))


def test_apptainer_mounts_and_gives_gpus() -> None:
    container = Container("/images/torch.sif", options=("--fakeroot",))
    assert wrapped(container, gpus=True) == (
        "apptainer exec --pwd=/lustre/run --nv --bind=/lustre/project:/lustre/project --bind=/data:/mnt:ro --fakeroot"
        " /images/torch.sif python3 -m mgpu_slurm.job rank"
    )
    assert "--nv" not in wrapped(container)
    assert wrapped(Container("/images/torch.sif", runtime="singularity")).startswith("singularity exec --pwd")


def test_charliecloud_uses_the_path_of_the_image(tmp_path: Path) -> None:
    start = "ch-run --cd=/lustre/run --set-env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    end = f"--bind=/lustre/project:/lustre/project --bind=/data:/mnt {tmp_path} -- python3 -m mgpu_slurm.job rank"
    assert wrapped(Container(str(tmp_path))) == f"{start} {end}"
    (tmp_path / "ch").mkdir()
    (tmp_path / "ch" / "environment").touch()
    assert wrapped(Container(str(tmp_path))) == f"{start} --set-env {end}"


def test_pyxis_is_options_of_srun() -> None:
    container = Container("nvcr.io#nvidia/pytorch:25.09-py3", options=("--container-mount-home",))
    assert container.srun_options(MOUNTS, "/lustre/run") == [
        "--container-image=nvcr.io#nvidia/pytorch:25.09-py3",
        "--container-mounts=/lustre/project:/lustre/project,/data:/mnt:ro",
        "--container-workdir=/lustre/run",
        "--container-mount-home",
    ]
    assert wrapped(container) == " ".join(RANK)
    assert Container("/images/torch.sif").srun_options(MOUNTS, "/lustre/run") == []


def test_template_repeats_a_word_for_each_mount() -> None:
    words = ("podman", "run", "--rm", "--network=host", "--volume={source}:{target}", "-w", "{workdir}", "{image}")
    assert wrapped(Container("torch:latest", command=words)) == (
        "podman run --rm --network=host --volume=/lustre/project:/lustre/project --volume=/data:/mnt -w /lustre/run"
        " torch:latest python3 -m mgpu_slurm.job rank"
    )


@pytest.mark.parametrize(
    ("image", "runtime"),
    [
        ("/a/b.sif", "apptainer"),
        ("docker://pytorch/pytorch", "apptainer"),
        ("/a/b.sqsh", "pyxis"),
        ("nvcr.io#nvidia/pytorch", "pyxis"),
        ("/a/b.sqfs", "charliecloud"),
        ("/", "charliecloud"),
    ],
)
def test_runtime_is_known_by_the_image(image: str, runtime: str) -> None:
    assert Container(image).starter == runtime


@pytest.mark.parametrize("image", ["pytorch", "/a/b.img"])
def test_image_of_no_known_runtime_asks_for_it(image: str) -> None:
    with pytest.raises(UserError, match=f"'{image}': the name does not show its runtime: add `runtime:`"):
        _ = Container(image).starter
    assert Container(image, runtime="apptainer").starter == "apptainer"


@pytest.mark.parametrize("text", ["data", "/a:b", "/a:/b:rw", "/a:/b:/c", "/a,/b", ""])
def test_invalid_mount_is_rejected(text: str) -> None:
    with pytest.raises(UserError):
        Mount.parse(text)


def test_mount_that_another_contains_is_left_out() -> None:
    inside_it, elsewhere = Mount("/a/b/c", "/a/b/c"), Mount("/a/b", "/data")
    read_only = Mount("/r", "/r", read_only=True)
    writable = Mount("/r/w", "/r/w")
    found = without_covered([writable, inside_it, elsewhere, Mount("/a/b", "/a/b"), read_only, read_only])
    assert found == [elsewhere, read_only, writable, Mount("/a/b", "/a/b")]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"command": ("podman", "run")}, "no word has {image}"),
        ({"command": ("x", "{image}"), "runtime": "pyxis"}, "exclude each other"),
        ({"runtime": "command"}, "needs `command:`"),
        ({"mounts": ("data",)}, "--mount 'data'"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Container("i", **values)  # type: ignore[arg-type]


def test_python_of_the_image_has_no_packages_of_the_host() -> None:
    assert inside(["python3"], "/run/package") == [
        *("env", "-u", "PYTHONHOME", "-u", "VIRTUAL_ENV", "-u", "CONDA_PREFIX"),
        *("PYTHONNOUSERSITE=1", "PYTHONPATH=/run/package", "python3"),
    ]
