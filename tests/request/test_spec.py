"""The request: what is refused, and that the file gives back what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import resources as requested
from mgpu_slurm.request import spec
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"nodes": 0}, "--nodes 0: expected a whole number of at least 1"),
        ({"gpus-per-node": -1}, "--gpus-per-node -1"),
        ({"gpus-per-node": "-1"}, "--gpus-per-node -1: expected a whole number of at least 0"),
        (
            {"gpus-per-node": "9" * 5000},
            f"--gpus-per-node {'9' * 5000}: expected a number, or a type with one as in a100:2",
        ),
        ({"gpus-per-node": "a100"}, "--gpus-per-node a100: expected a number, or a type with one as in a100:2"),
        ({"gpus-per-node": "a100:2,h100:1"}, "--gpus-per-node a100:2,h100:1: expected a number"),
        ({"gpus-per-node": "a100:"}, "--gpus-per-node a100:: expected a number"),
        ({"time": -5}, "--time '-5'"),
        ({"node": 2}, r"unknown flag 'node' \(did you mean 'nodes'\?\)"),
        ({"nodes": "two"}, "nodes='two': expected a valid integer"),
    ],
)
def test_invalid_resources_are_rejected(flags: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        requested.resources_from(flags, "the call")


@pytest.mark.parametrize("kind", ["a100", "1g.5gb", "nvidia_a100_3g.39gb", "GH200-96"])
def test_gpus_may_have_a_type(kind: str) -> None:
    resources = requested.resources_from({"nodes": 2, "gpus-per-node": f"{kind}:4"}, "the call")
    assert (resources.gpu_type, resources.gpus_per_node, resources.ranks, resources.gpus) == (kind, 4, 8, 8)
    assert resources.gpus_as_requested == resources.value_of("gpus-per-node") == f"{kind}:4"
    # as a resume with other flags does
    flags = {name: resources.value_of(name) for name in requested.RESOURCE_FLAGS}
    assert requested.resources_from(flags, "the call") == resources
    assert requested.resources_from(flags | {"gpus_per_node": "2"}, "the call").gpus_as_requested == "2"


def test_one_rank_per_gpu_unless_asked_otherwise() -> None:
    assert Resources(nodes=2).ranks == 2
    assert Resources(nodes=2, gpus_per_node=4).ranks == 8
    assert Resources(nodes=2, gpus_per_node=4, ntasks_per_node=1).ranks == 2
    assert Resources(gpus_per_node=0).ranks == 1


@pytest.mark.parametrize("name", ["a/b", "a b", "", ".a", "-a", "a\n", "ä", "x" * 101])
def test_invalid_run_name_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match="run name"):
        spec.check_run_name(name)


@pytest.mark.parametrize(
    ("item", "words"),
    [("nodes=3", "write --nodes 3 instead"), ("=x", "expected KEY=VALUE"), ("Mail=x", "expected KEY=VALUE")],
)
def test_invalid_sbatch_option_is_rejected(item: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        requested.sbatch_pairs((item,))


def test_spec_round_trips_through_its_file(tmp_path: Path) -> None:
    written = Spec(
        run="digits-1",
        target=Target(command=("python", "a b.py", "--x=$(y)")),
        executor="slurm",
        resources=Resources(nodes=2, time="1-2:03:04", sbatch={"mail-type": "END"}),
        config={"lr": 1e-5, "name": "null", "deep": {"on": True, "none": None}},
        rename={"mem": None, "gpus-per-node": "gres=gpu:{}"},
        setup=("module load cuda",),
        environment={"A": "0"},
        lead=30,
    )
    folder = RunFolder(tmp_path / "digits-1")
    folder.create()
    written.write(folder)
    assert spec.read_spec(folder) == written


def test_invalid_value_in_an_edited_file_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.create()
    folder.spec.write_text("run: r\ntarget: {function: 'a:b'}\nexecutor: slrum\nresources: {}\n")
    with pytest.raises(UserError, match=r"spec\.yaml: executor='slrum': expected 'slurm'"):
        spec.read_spec(folder)
