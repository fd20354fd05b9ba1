"""The runs of several sizes: what each is asked to do, and in which order they start."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.spec import Measurement
from mgpu_slurm.submission import scaling_runs
from mgpu_slurm.submission.plan import Request
from mgpu_slurm.submission.scaling_runs import SizeRun, planned, sizes_from
from tests.support import Project

TRAIN = """
    def train(run, batch_size: int = 30, lr: float = 0.1):
        pass
"""


@pytest.mark.parametrize(("text", "sizes"), [("1,2,4", [1, 2, 4]), ("4, 1", [1, 4]), ("3", [3])])
def test_sizes_are_read_smallest_first(text: str, sizes: list[int]) -> None:
    assert sizes_from(text) == sizes


@pytest.mark.parametrize("text", ["", "1,,2", "0,1", "1,two", "1-4", "2,02", "1,-2"])
def test_wrong_sizes_are_an_error(text: str) -> None:
    with pytest.raises(UserError, match=f"--nodes {text}: expected different numbers of nodes, such as 1,2,4"):
        sizes_from(text)


@pytest.fixture
def request_of_job(project: Project, monkeypatch: pytest.MonkeyPatch) -> Request:
    project.write("train.py", TRAIN)
    monkeypatch.chdir(project.folder)
    return Request(target="train.py", executor="local", flags={"mem": "1G"}, measurement=Measurement(20, 5))


def values(runs: list[SizeRun]) -> list[Config]:
    return [run.request.values for run in runs]


def test_strong_scaling_changes_the_nodes_only(request_of_job: Request) -> None:
    runs = planned(request_of_job, [1, 2], None, quiet)
    assert [run.request.flags for run in runs] == [{"mem": "1G", "nodes": 1}, {"mem": "1G", "nodes": 2}]
    assert values(runs) == [{}, {}]


def test_weak_scaling_multiplies_the_default_of_the_job(request_of_job: Request, project: Project) -> None:
    assert values(planned(request_of_job, [2, 3, 4], "batch_size", quiet)) == [
        {"batch_size": 30},
        {"batch_size": 45},
        {"batch_size": 60},
    ]
    assert not project.runs.exists()


def test_weak_scaling_multiplies_a_given_value_by_its_dotted_name() -> None:
    request = Request(target="train.py", values={"data": {"batch": 8, "path": "x"}})
    assert values(planned(request, [1, 4], "data.batch", quiet)) == [
        {"data": {"batch": 8, "path": "x"}},
        {"data": {"batch": 32, "path": "x"}},
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lr", "--scale lr: 0.1 is not a whole number: name one, such as batch_size"),
        ("batch", "--scale batch: the config has no such value, or its default is unknown: add batch=VALUE"),
        ("batch_size", r"--scale batch_size: 30 x 5 / 4 is not a whole number: use another batch_size"),
    ],
)
def test_value_that_cannot_grow_is_an_error(request_of_job: Request, key: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        planned(request_of_job, [4, 5], key, quiet)
    assert str(error.value) == message


@dataclass
class Recorded(SizeRun):
    """Writes down what it is asked to do."""

    in_queue: bool = False
    calls: list[str] = field(default_factory=list)

    def submit(self, note: Note) -> None:
        self.calls.append(f"submit {self.nodes}")

    def wait(self, note: Note) -> None:
        self.calls.append(f"wait {self.nodes}")

    @property
    def is_queued(self) -> bool:
        return self.in_queue


def test_runs_of_a_queue_are_all_submitted_at_once() -> None:
    calls: list[str] = []
    runs = [Recorded(nodes, Request(), in_queue=True, calls=calls) for nodes in (1, 2)]
    scaling_runs.run_all(runs, quiet)
    assert calls == ["submit 1", "submit 2", "wait 1", "wait 2"]


def test_runs_elsewhere_do_not_share_the_machine() -> None:
    calls: list[str] = []
    runs = [Recorded(nodes, Request(), calls=calls) for nodes in (1, 2)]
    scaling_runs.run_all(runs, quiet)
    assert calls[:4] == ["submit 1", "wait 1", "submit 2", "wait 2"]


def test_refused_submission_is_recorded_and_leaves_no_run(request_of_job: Request, project: Project) -> None:
    run = SizeRun(1, Request(target="missing.py", executor="local"))
    run.submit(quiet)
    run.wait(quiet)
    assert "there is no file" in str(run.error)
    assert run.folder is None
    assert [*scaling_runs.cancel([run])] == []
