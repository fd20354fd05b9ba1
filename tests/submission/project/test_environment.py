from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.submission.project.environment import describe
from mgpu_slurm.submission.project.snapshot import Snapshot


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_packages_match_importlib_metadata() -> None:
    expected: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        expected.setdefault(normalized(distribution.name), distribution.version)
    expected.pop("mgpu-slurm", None)  # a checkout's own egg-info has no version in its name
    found = describe(None).packages
    found.pop("mgpu-slurm", None)
    assert found == expected
    assert {"torch", "torchvision", "optuna", "submitit", "tensorboard", "numpy"} <= found.keys()


def test_describes_user_host_python_command_and_code(tmp_path: Path) -> None:
    snapshot = Snapshot(tmp_path, commit="c" * 40, dirty=True, files=1, bytes=2, digest="d" * 64)
    facts = json.loads(json.dumps(describe(snapshot).to_json()))
    assert (facts["commit"], facts["dirty"], facts["digest"]) == ("c" * 40, True, "d" * 64)
    assert facts["python"] == {"version": sys.version.split()[0], "executable": sys.executable}
    assert facts["host"] == os.uname().nodename
    assert facts["user"] == subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    assert facts["command"] == sys.orig_argv


def test_without_a_snapshot_the_code_is_unknown() -> None:
    facts = describe(None).to_json()
    assert facts["commit"] is facts["dirty"] is facts["digest"] is None


def test_no_environment_variable_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "sesame-1234")
    monkeypatch.setenv("LOGNAME", "sesame-1234")
    assert "sesame-1234" not in json.dumps(describe(None).to_json())


def test_imports_neither_torch_nor_importlib_metadata() -> None:
    code = "import sys, mgpu_slurm.submission.project.environment as e; e.describe(None)"
    code += (
        "; print([m for m in ('torch', 'optuna', 'submitit', 'tensorboard', 'importlib.metadata') if m in sys.modules])"
    )
    # -I -S: no site, so that no .pth file of this interpreter imports something by itself
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
