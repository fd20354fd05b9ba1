"""What a call needs and this machine or the run's code lacks."""

from __future__ import annotations

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.container import Container
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.submission.missing import check_torch, notes_on_torch


def spec(**values: object) -> Spec:
    facts = {"target": Target(function="a:b"), "executor": "slurm", "resources": Resources()} | values
    return Spec("r", **facts)  # type: ignore[arg-type]


def test_torch_that_is_too_old_is_refused() -> None:
    with pytest.raises(UserError, match=r"^torch 2\.5\.1\+cu124 is too old: install 2\.6 or newer, or use a container"):
        check_torch(spec(), {"torch": "2.5.1+cu124"})
    check_torch(spec(), {"torch": "2.6.0"})
    check_torch(spec(), {"torch": "2.13.0a0+git"})


@pytest.mark.parametrize(
    "values",
    [{"setup": ("module load torch",)}, {"container": Container("/i.sif")}, {"target": Target(command=("true",))}],
)
def test_ranks_may_have_another_torch(values: dict[str, object]) -> None:
    check_torch(spec(**values), {"torch": "2.5.1"})
    check_torch(spec(), {})
    assert notes_on_torch(spec(resources=Resources(gpus_per_node=2), **values), {"torch": "2.13.0+cpu"}) == []


def test_torch_that_would_leave_gpus_idle_is_noted() -> None:
    with_gpus = spec(resources=Resources(gpus_per_node=2))
    assert notes_on_torch(with_gpus, {"torch": "2.13.0+cpu"}) == [
        "note      torch 2.13.0+cpu computes on the CPU: install a build for the nodes' GPUs (pytorch.org),"
        " or submit with --gpus-per-node 0"
    ]
    for ranks, torch in ((spec(), "2.13.0+cpu"), (with_gpus, "2.13.0"), (with_gpus, "2.13.0+cu130")):
        assert notes_on_torch(ranks, {"torch": torch}) == []
    assert notes_on_torch(with_gpus, {}) == []
