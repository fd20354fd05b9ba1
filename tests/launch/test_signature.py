"""A class made from a description takes and refuses what the described one does."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from mgpu_slurm import config
from mgpu_slurm.errors import UserError
from mgpu_slurm.job_function import JobFunction
from mgpu_slurm.launch import checked, signature
from tests.support import Project

HERE = Path(__file__).parent


@dataclass
class Inner:
    width: int = 3


@dataclass
class Config:
    needed: float
    epochs: int = 3
    on: bool = False
    data: Path = Path("data")
    kind: Literal["a", "b", 3] = "a"
    maybe: int | None = None
    older: Optional[str] = None  # noqa: UP045
    inner: Inner = field(default_factory=Inner)
    other: Inner | None = None
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    pair: tuple[int, str] = (1, "x")
    table: dict[str, float] = field(default_factory=dict)
    free: Any = None


def rebuilt(cls: Any) -> Any:
    return signature.rebuild(json.loads(json.dumps(signature.describe(cls, HERE))))


@pytest.mark.parametrize(
    "values",
    [
        {"needed": 1},
        {"needed": "1e-3", "epochs": "7", "on": "yes", "kind": "b", "maybe": 4, "older": "x", "free": [1]},
        {
            "needed": 1,
            "inner": {"width": "5"},
            "other": {"width": 6},
            "sizes": [3],
            "pair": [2, "y"],
            "table": {"a": 1},
        },
        {"needed": 1, "kind": 3, "data": "elsewhere"},
        {},
        {"needed": 1, "epochs": 1.5},
        {"needed": 1, "kind": "c"},
        {"needed": 1, "needded": 1},
        {"needed": 1, "inner": {"widht": 1}},
        {"needed": 1, "sizes": ["x"]},
        {"needed": 1, "maybe": "x"},
    ],
)
def test_values_mean_the_same_to_both_classes(values: dict[str, Any], tmp_path: Path) -> None:
    assert resolved(rebuilt(Config), values, tmp_path) == resolved(Config, values, tmp_path)


def resolved(cls: Any, values: dict[str, Any], base: Path) -> Any:
    try:
        return JobFunction("job", print, cls).fill_plain(values, base)
    except UserError as error:
        return str(error)


class Colour(Enum):
    RED = "red"


@dataclass
class WithEnum:
    colour: Colour = Colour.RED


@dataclass
class WithOwnCode:
    lr: float = 0.1

    def __post_init__(self) -> None:
        assert self.lr > 0


@dataclass
class WithHidden:
    lr: float = field(default=0.1, init=False)


@dataclass
class WithComputedDefault:
    run: str = field(default_factory=lambda: str(time.time()))


@dataclass
class WithEnvironment:
    home: str = os.environ["HOME"]


@dataclass
class WithBase(Inner):
    depth: int = 2


@pytest.mark.parametrize("cls", [WithEnum, WithOwnCode, WithHidden, WithComputedDefault, WithEnvironment, WithBase])
def test_classes_that_say_more_are_not_described(cls: Any) -> None:
    assert signature.describe(cls, HERE) is None


def test_classes_from_outside_of_the_snapshot_are_not_described(tmp_path: Path) -> None:
    assert signature.describe(Inner, tmp_path) is None
    assert config.field_types(Inner) == {"width": int}


def test_no_more_descriptions_are_kept_than_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(checked, "KEPT", 3)
    for number in range(5):
        checked.keep(str(number), {"number": number})
    assert checked.recall("4") == {"number": 4}
    assert len(list((tmp_path / "mgpu_slurm" / "checked").iterdir())) == 3


def test_code_that_was_checked_is_not_imported_again_and_changed_code_is(project: Project) -> None:
    imports = project.folder.parent / "imports.log"
    job = f"""
        from dataclasses import dataclass

        with open({str(imports)!r}, "a") as file:
            file.write("imported\\n")

        @dataclass
        class Config:
            lr: float = 0.1

        def train(run, config: Config):
            pass
    """

    def imported_by(override: str, code: int = 0) -> int:
        imports.write_text("")
        assert project.call("submit", "--executor", "slurm", "--dry-run", "job", override).returncode == code
        return len(imports.read_text().splitlines())

    project.write("job.py", job)
    assert imported_by("lr=1") == 1
    assert imported_by("lr=2") == 0
    assert imported_by("lr=fast", code=2) == 0
    project.write("job.py", job + "\n        # changed\n")
    assert imported_by("lr=2") == 1
