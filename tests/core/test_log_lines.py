"""The package's own lines in logs: all are written in one way, by which they are told from a job's."""

from __future__ import annotations

import ast
import sys

import pytest

from mgpu_slurm.core import log_lines
from tests.test_imports import FILES


def test_each_line_starts_with_the_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    log_lines.say("the sweep is over")
    log_lines.warn("the disk is full")
    log_lines.say("the disk does not answer", file=sys.stderr)
    said, errors = capfd.readouterr()
    assert said == "mgpu_slurm: the sweep is over\nmgpu_slurm: WARNING: the disk is full\n"
    assert errors == "mgpu_slurm: the disk does not answer\n"


def test_no_other_module_writes_the_prefix() -> None:
    others = [path for name, path in FILES.items() if name not in ("mgpu_slurm", log_lines.__name__)]
    writing = {
        path.name
        for path in others
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(log_lines.PREFIX)
    }
    assert writing == set()
