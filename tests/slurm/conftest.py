from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FakeCommand = Callable[[str, str], None]


@pytest.fixture
def fake_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommand:
    """Puts a shell script of a name on PATH; nothing else is there but the system's own tools."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return write
