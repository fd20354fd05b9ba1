"""From text to a validated dataclass, and what is said when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config


@dataclass
class Model:
    width: int = 16
    kind: Literal["small", "big"] = "small"


@dataclass
class Config:
    lr: float = 0.1
    epochs: int = 3
    name: str = "x"
    data: Path = Path("data")
    model: Model = field(default_factory=Model)
    extra: Model | None = None
    layers: list[int] = field(default_factory=list)


def filled(*overrides: str) -> Config:
    return config.fill(Config, config.parse_overrides(overrides), "config of job")


def test_overrides_are_applied_to_defaults_and_nested_keys() -> None:
    assert filled() == Config()
    got = filled("lr=1e-3", "model.width=32", "model.kind=big", "layers=[1, 2]", "extra.width=4", "name=")
    assert got == Config(lr=1e-3, name="", model=Model(32, "big"), layers=[1, 2], extra=Model(4))


def test_overrides_are_merged_into_a_file_key_by_key() -> None:
    file = {"lr": 0.5, "model": {"width": 8, "kind": "big"}}
    merged = config.merge(file, config.parse_overrides(["model.width=9"]))
    assert merged == {"lr": 0.5, "model": {"width": 9, "kind": "big"}}
    assert file["model"] == {"width": 8, "kind": "big"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lrr=1", r"config of job: unknown key 'lrr' \(did you mean 'lr'\?\)"),
        ("model.widht=1", r"unknown key 'model.widht' \(did you mean 'width'\?\)"),
        ("extra.zzz=1", r"unknown key 'extra.zzz' \(known: width, kind\)"),
        ("lr=fast", "lr='fast': expected a valid number"),
        ("epochs=1.5", "epochs=1.5: expected a valid integer"),
        ("model.kind=huge", "model.kind='huge': expected 'small' or 'big'"),
        ("model=3", "model=3: expected"),
        ("layers=[1, a]", r"layers.1='a': expected a valid integer"),
        ("lr", "'lr' is not key=value"),
        ("=3", "'=3' is not key=value"),
        ("lr=[1", r"'lr=\[1': incomplete YAML value"),
    ],
)
def test_invalid_override_is_rejected_with_its_key(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        filled(override)


def test_override_inside_a_key_that_is_set_whole_is_rejected() -> None:
    with pytest.raises(UserError, match=r"'model.width=3' sets a key inside 'model'"):
        filled("model=3", "model.width=3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2\n", r"f\.yaml:2:2: .*fix the YAML"),
        ("a: 1\na: 2\n", r"f\.yaml:2:1: duplicate key 'a'"),
        ("a: !!python/object/apply:os.system [true]\n", r"f\.yaml:1:4: could not determine a constructor"),
        ("- 1\n", "expected `key: value` lines, found a list"),
    ],
)
def test_broken_yaml_is_rejected_with_its_position(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        config.read_yaml(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nothing\.yaml' \(No such file"):
        config.read_yaml(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), (".5e1", 5.0), ("4:00:00", "4:00:00"), ("0.1", 0.1), ("yes", True)],
)
def test_yaml_values_are_read_as_people_mean_them(text: str, value: Any) -> None:
    got = config.parse_yaml(f"key: {text}", "text")["key"]
    assert (got, type(got)) == (value, type(value))


def test_config_round_trips_through_yaml() -> None:
    values = Config(lr=1e-5, data=Path("/data"), extra=Model(1))
    plain = config.parse_yaml(config.dump_yaml(config.to_plain(values)), "dump")
    assert config.fill(Config, plain, "config") == values


def test_nested_paths_become_absolute(tmp_path: Path) -> None:
    @dataclass
    class Nested:
        folders: list[Path]
        inner: Config

    values = Nested([Path("a"), Path("/b")], Config())
    made = config.absolute_paths(values, tmp_path)
    assert made.folders == [tmp_path / "a", Path("/b")]
    assert made.inner.data == tmp_path / "data"
