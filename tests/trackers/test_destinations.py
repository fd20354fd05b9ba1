"""Where reports are sent, as a call, the cluster file and the trackers' own variables name it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.trackers.destinations import Destination, check_shared, notes, resolve


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def resolved(text: str, cwd: Path = Path("/work")) -> str:
    (found,) = resolve([text], cwd, "vision")
    assert Destination.parse(str(found)) == found
    return str(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mlflow=http://host:5000", "mlflow=http://host:5000#vision"),
        ("mlflow=http://host:5000#other", "mlflow=http://host:5000#other"),
        ("mlflow=sqlite:////tmp/mlflow.db", "mlflow=sqlite:////tmp/mlflow.db#vision"),
        ("mlflow=databricks", "mlflow=databricks#vision"),
        ("mlflow=postgresql://me@host/db", "mlflow=postgresql://me@host/db#vision"),
        ("wandb", "wandb=vision"),
        ("wandb=nets", "wandb=nets"),
        ("wandb=team/nets", "wandb=team/nets"),
    ],
)
def test_what_a_call_leaves_open_is_the_project(text: str, expected: str) -> None:
    assert resolved(text) == expected


def test_a_relative_path_of_sqlite_starts_at_the_working_directory(tmp_path: Path) -> None:
    assert resolved("mlflow=sqlite:///mlflow.db", tmp_path) == f"mlflow=sqlite:///{tmp_path}/mlflow.db#vision"


def test_variables_of_the_trackers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://host")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "/Users/me/nets")
    monkeypatch.setenv("WANDB_PROJECT", "nets")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert resolved("mlflow") == "mlflow=https://host#/Users/me/nets"
    assert resolved("wandb") == "wandb=team/nets"
    assert resolved("wandb=me/own") == "wandb=me/own"


def test_a_tracker_that_is_switched_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UserError, match="WANDB_MODE is disabled"):
        resolved("wandb")


@pytest.mark.parametrize(
    "uri", ["localhost:5000", "foo:bar", "http//host:5000", "http://", "sqlite://", "sqlite:///", "http://[abc", "runs"]
)
def test_what_mlflow_cannot_reach_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match=r"^mlflow=.*such as mlflow=http://HOST:5000"):
        resolved(f"mlflow={uri}")


def test_none_means_no_tracker() -> None:
    assert resolve(["none"], Path("/work"), "vision") == ()
    with pytest.raises(UserError, match=r"--sink none: expected"):
        resolve(["none", "wandb"], Path("/work"), "vision")


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_library_that_is_missing_is_named_with_its_installation(
    tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == tracker else find(name))
    with pytest.raises(UserError) as refused:
        resolve([f"{tracker}=http://host"], Path("/work"), "vision")
    assert str(refused.value) == f"{tracker}: not installed: pip install 'mgpu-slurm[{tracker}]'"


def test_sqlite_is_for_runs_of_this_machine() -> None:
    found = resolve(["mlflow=sqlite:////tmp/mlflow.db"], Path("/work"), "vision")
    check_shared(found, is_this_machine=True)
    with pytest.raises(UserError, match=r"SQLite is not safe .*`export RUN --to mlflow=\.\.\.`"):
        check_shared(found, is_this_machine=False)
    check_shared(resolve(["mlflow=http://host", "wandb"], Path("/work"), "vision"), is_this_machine=False)


def notes_with(tmp_path: Path, *sinks: str, **environ: str) -> tuple[str, ...]:
    files = {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
    return notes(resolve(sinks or ["wandb"], tmp_path, "vision"), files | environ)


def test_run_without_a_key_for_wandb_is_told_so(tmp_path: Path) -> None:
    (note,) = notes_with(tmp_path)
    assert "W&B has no API key: run `wandb login`" in note
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert notes_with(tmp_path, WANDB_BASE_URL="https://wandb.lab.org")
    assert notes_with(tmp_path, WANDB_MODE="online") == ()


@pytest.mark.parametrize(
    "environ", [{"WANDB_API_KEY": "key"}, {"WANDB_IDENTITY_TOKEN_FILE": "token"}, {"WANDB_MODE": "offline"}]
)
def test_variables_may_have_the_key_for_wandb_or_need_none(tmp_path: Path, environ: dict[str, str]) -> None:
    assert notes_with(tmp_path, **environ) == ()


def test_settings_of_wandb_may_have_its_key(tmp_path: Path) -> None:
    (tmp_path / "settings").write_text("[default]\nentity = lab\n")
    assert notes_with(tmp_path)
    (tmp_path / "settings").write_text("[default]\napi_key = key\n")
    assert notes_with(tmp_path) == ()


@pytest.mark.parametrize("content", [b"machine\n", b"machine \xff\xfe\x00"])
def test_files_that_cannot_be_read_have_no_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "netrc").write_bytes(content)
    (tmp_path / "settings").write_bytes(content)
    assert notes_with(tmp_path)
    assert notes_with(tmp_path, WANDB_BASE_URL="http://[lab")


def test_mlflow_needs_no_key(tmp_path: Path) -> None:
    assert notes_with(tmp_path, "mlflow=http://host") == ()
