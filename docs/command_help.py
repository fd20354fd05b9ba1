"""Put the `--help` of every command into the page that asks for it: a hook of MkDocs."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from typing import Any
from unittest.mock import patch

from mgpu_slurm.cli.main import COMMANDS, main

MARK = "<!-- the help of every command -->"
COLUMNS = "80"
"""Width of the help, so that no line of it is wider than a page."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text with the help of all commands at the mark. MkDocs calls this for every page."""
    if MARK not in markdown:
        return markdown
    names = sorted(str(command.name) for command in COMMANDS)
    return markdown.replace(MARK, "\n".join([_section("mgpu-slurm", []), *(_section(name, [name]) for name in names)]))


def _section(title: str, words: list[str]) -> str:
    return f"## {title}\n\n```text\n{help_of(words)}```\n"


def help_of(words: list[str]) -> str:
    """Return what a command prints with `--help`."""
    printed = io.StringIO()
    with patch.dict(os.environ, COLUMNS=COLUMNS), redirect_stdout(printed), suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()
