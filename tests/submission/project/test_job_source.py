"""What is read from a job's source takes and refuses the values that the imported job does."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import target
from mgpu_slurm.request.job_function import JobFunction
from mgpu_slurm.submission.project import job_source
from mgpu_slurm.submission.project.job_source import Reading

WHOLE = """
    from __future__ import annotations

    import typing as t
    from dataclasses import dataclass, field
    from enum import Enum
    from pathlib import Path
    from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional

    import nothing_that_is_installed

    if TYPE_CHECKING:
        from mgpu_slurm import Run

    EPOCHS = 3
    Kind = Literal["a", "b", 3]

    class Colour(str, Enum):
        RED = "red"
        BLUE = "blue"

    @dataclass
    class Base:
        '''What all have.'''

        name: str = "x"
        '''Of the run.'''
        scale: ClassVar[int] = 2
        kept = None

        def scaled(self):
            return self.scale * 2

    @dataclass(frozen=True)
    class Inner:
        width: int = 3

    @dataclass
    class Config(Base):
        needed: float = field(kw_only=True)
        epochs: int = EPOCHS
        on: bool = False
        data: Path = Path("data")
        kind: Kind = "a"
        colour: Colour = Colour.RED
        maybe: int | None = None
        older: Optional[str] = None
        inner: Inner = field(default_factory=Inner)
        other: Inner | None = None
        whole: Inner = Inner(width=4)
        sizes: list[int] = field(default_factory=lambda: [1, 2])
        pair: tuple[int, str] = (1, "x")
        table: dict[str, float] = field(default_factory=dict)
        free: t.Any = None

    def train(run: Run, config: Config) -> dict[str, float]:
        return nothing_that_is_installed.train(config)
"""

BY_NAME = """
    from pathlib import Path
    import torch_of_another_machine as torch

    def train(run, lr=0.1, epochs: int = 3, *, data: Path = Path("data"), layers=[1, 2], seed=None):
        pass
"""


def read(folder: Path, text: str, name: str = "job:train") -> Reading | None:
    (folder / "job.py").write_text(textwrap.dedent(text))
    return job_source.read(name, folder)


def imported(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> JobFunction:
    """The same job by its import, with what it lacks here in place."""
    for name in ("nothing_that_is_installed", "torch_of_another_machine"):
        (folder / f"{name}.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "real_job.py").write_text(textwrap.dedent(text))
    monkeypatch.delitem(sys.modules, "real_job", raising=False)
    return target.load("real_job.py:train", folder)


def outcome(job: JobFunction, values: dict[str, Any], base: Path) -> Any:
    try:
        return job.fill_plain(values, base)
    except UserError as error:
        return str(error).replace("real_job.py:train", "job:train")


@pytest.mark.parametrize(
    "values",
    [
        {"needed": 1},
        {"needed": "1e-3", "epochs": "7", "on": "yes", "kind": "b", "maybe": 4, "older": "x", "free": [1]},
        {"needed": 1, "inner": {"width": "5"}, "other": {"width": 6}, "sizes": [3], "pair": [2, "y"], "name": "y"},
        {"needed": 1, "kind": 3, "data": "elsewhere", "table": {"a": 1}, "colour": "blue", "whole": {}},
        {},
        {"needed": 1, "epochs": 1.5},
        {"needed": 1, "kind": "c"},
        {"needed": 1, "colour": "green"},
        {"needed": 1, "needded": 1},
        {"needed": 1, "scale": 1},
        {"needed": 1, "inner": {"widht": 1}},
        {"needed": 1, "sizes": ["x"]},
        {"needed": 1, "maybe": "x"},
    ],
)
def test_dataclass_read_from_source_validates_like_the_imported_one(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = read(tmp_path, WHOLE)
    assert reading is not None
    assert reading.is_whole
    assert outcome(reading.job, values, tmp_path) == outcome(imported(tmp_path, WHOLE, monkeypatch), values, tmp_path)


@pytest.mark.parametrize("values", [{}, {"lr": 1, "epochs": "4", "seed": 3, "layers": [3]}, {"lr": "x"}, {"lrr": 1}])
def test_parameters_read_from_source_validate_like_imported_ones(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = read(tmp_path, BY_NAME)
    assert reading is not None
    assert reading.is_whole
    assert outcome(reading.job, values, tmp_path) == outcome(imported(tmp_path, BY_NAME, monkeypatch), values, tmp_path)


HEAD = """
    import os
    from dataclasses import dataclass, field
    from elsewhere import Optimizer, Model, make
"""


def config(body: str) -> str:
    lines = "\n".join(f"        {line}" for line in textwrap.dedent(body).strip().splitlines())
    return f"{HEAD}\n    @dataclass\n    class Config:\n{lines}\n\n    def train(run, config: Config): pass\n"


@pytest.mark.parametrize(
    "text",
    [
        config("lr: float = 0.1\ndef __post_init__(self):\n    assert self.lr > 0"),
        config("lr: float = 0.1\nhome: str = os.environ['HOME']"),
        config("lr: float = 0.1\nrun: str = field(default_factory=lambda: make())"),
        config("lr: float = 0.1\noptimizer: Optimizer = 'sgd'"),
        config("lr: float = 0.1\nmodel: list[Model] = field(default_factory=list)"),
        f"{HEAD}\n    def train(run, lr: float = 0.1, optimizer: Optimizer = make()): pass",
        f"{HEAD}\n    def train(run, lr: float = 0.1, optimizer=make()): pass",
    ],
)
def test_known_fields_are_checked_even_if_others_are_unknown(text: str, tmp_path: Path) -> None:
    reading = read(tmp_path, text)
    assert reading is not None
    assert not reading.is_whole
    assert outcome(reading.job, {"lr": "fast"}, tmp_path) == "config of job:train: lr='fast': expected a valid number"
    assert "unknown key 'lrr' (did you mean 'lr'?)" in outcome(reading.job, {"lrr": 1}, tmp_path)
    assert isinstance(outcome(reading.job, {"lr": 1, "optimizer": [1]} if "optimizer" in text else {}, tmp_path), dict)


INHERITING = """@dataclass
    class Base:
        lr: float = 0.1

    @dataclass
    class Config(Base):"""


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}\n    def train(run, config: Model): pass",
        config("lr: float = 1").replace("class Config:", "class Config(Model):"),
        f"{HEAD}\n    @make\n    class Config:\n        lr: float = 1\n    def train(run, config: Config): pass",
        f"{HEAD}\n    @make\n    def train(run, lr=0.1): pass",
        f"{HEAD}\n    if os.environ:\n        def train(run, lr=0.1): pass",
        f"{HEAD}\n    def train(run, lr=0.1): pass\n    train = make(train)",
        f"{HEAD}\n    def train(run, lr=0.1): pass\n    globals()['train'] = make",
        f"{HEAD}\n    from elsewhere import *\n    def train(run, lr=0.1): pass",
        f"{HEAD}\n    from elsewhere import train",
        config("lr: float = 0.1\ndef __init__(self, rate): self.lr = rate"),
        config("if os.environ:\n    lr: float = 0.1"),
        config("lr: float = 0.1") + "\n    Config.lr = 3",
        config("lr: float = 0.1") + "\n    Config.__dataclass_fields__['lr'].default = 3",
        config("BASE = 3\nlr: float = BASE").replace("import os", "import os\n    BASE = 0.1"),
        config("def Path(self): pass\nlr: Path = 'x'").replace("import os", "import os\n    from pathlib import Path"),
        config("@property\ndef lr(self): return 3").replace("@dataclass\n    class Config:", INHERITING),
        f"{HEAD}\n    def train(run, *, lr: float = 0.1): pass\n    train.__kwdefaults__['lr'] = 3",
        "def make(name):\n    globals()[name] = lambda run, lr=0.1: None\n\nmake('tr' + 'ain')",
        "import sys\ndef other(run, lr=0.1): pass\nsys.modules[__name__].train = other",
        "from elsewhere import make\nmake(__name__, 'train')",
        config("lr: float = 0.1") + "\n    def other():\n        global Config\n        Config = make()",
        config("lr: 'float' = 0.1").replace("import os", "import os\n    float = os.name"),
    ],
)
def test_config_that_is_not_written_out_is_left_to_the_job(text: str, tmp_path: Path) -> None:
    reading = read(tmp_path, text)
    if reading is not None:
        assert not reading.is_whole
        # nothing is refused here: only the job itself knows its config
        assert isinstance(outcome(reading.job, {"lr": "fast"}, tmp_path), dict)


@pytest.mark.parametrize("annotation", ["ClassVar[Model]", "'ClassVar[list[Model]]'", "InitVar[Model]"])
def test_config_with_unknown_class_or_init_variables_is_not_read(annotation: str, tmp_path: Path) -> None:
    text = config(f"models: {annotation}\nlr: float = 0.1")
    imports = "import os\n    from dataclasses import InitVar\n    from typing import ClassVar"
    assert read(tmp_path, text.replace("import os", imports)) is None


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (BY_NAME, "job:trian", r"target 'job:trian': job has no 'trian' \(did you mean 'train'\?\)"),
        ("def trian(run, lr=0.1):\n    load('train')", "job:train", r"job has no 'train' \(did you mean 'trian'\?\)"),
        (BY_NAME, "job.py:other", r"job.py has no 'other' \(known: train\); a script runs as a command"),
        (BY_NAME, "jop:train", r"target 'jop': there is no such module or file here \(did you mean 'job'\?\)"),
        (BY_NAME, "none.py:train", "no file 'none.py' in the run's code"),
        ("def train(run, config):\n    return 1 +\n", "job:train", "job.py:2: SyntaxError: invalid syntax"),
        ("def train(run): pass", "job:train", r"is train\(run\): it must take the run and a config"),
        ("def train(run, **more): pass", "job:train", r"the config values that \*\*more takes"),
    ],
)
def test_target_that_cannot_be_a_job_is_rejected(text: str, name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        read(tmp_path, text, name)


def test_modules_are_found_where_the_job_imports_them_from(tmp_path: Path) -> None:
    for place in ("one.py", "package/two.py", "src/library/__init__.py", "src/three.py"):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def train(run, lr=0.1): pass")
    for name in ("one", "one.py", "package.two", "package/two.py", "library", "three"):
        assert job_source.read(f"{name}:train", tmp_path) is not None, name
    # installed: nothing is read, and nothing is refused
    assert job_source.read("optuna.nothing:train", tmp_path) is None
    with pytest.raises(UserError, match="there is no such module"):
        job_source.read("library.nothing:train", tmp_path)
