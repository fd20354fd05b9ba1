"""The documentation builds as a site that needs nothing from another host."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.cli.main import COMMANDS
from tests.support import REPOSITORY, require

_OF_ANOTHER_HOST = re.compile(
    r"""(?:<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=|url\()["']?(?:https?:)?//[^"')\s]*"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(None if importlib.util.find_spec("mkdocs") else "no mkdocs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_command_shows_its_help(site: Path) -> None:
    page = (site / "reference" / "command-line" / "index.html").read_text()
    assert [command.name for command in COMMANDS if f"Usage: mgpu-slurm {command.name} " not in page] == []


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    texts = [path.read_text() for path in site.rglob("*") if path.suffix in (".css", ".html")]
    assert len(texts) > 20
    assert [found for text in texts for found in _OF_ANOTHER_HOST.findall(text)] == []
