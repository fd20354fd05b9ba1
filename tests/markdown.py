"""Read the fenced blocks of Markdown pages, and the comments that say what to do with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z ]+): (?P<value>[^\n]*?) -->\n)?(?P<fence>```+)(?P<kind>[^\n]*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    A comment directly before it makes it a file, `<!-- file: NAME -->`, or excludes it from the test,
    `<!-- not run: REASON -->`.
    """

    line: int
    kind: str
    text: str
    file: str | None
    reason: str | None
    """Why it is not run; None if nothing says so."""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        mark, value = found["mark"], found["value"]
        assert mark in (None, "file", "not run"), f"{page}: <!-- {mark}: {value} -->"
        yield Block(
            line=text.count("\n", 0, found.start("fence")) + 1,
            kind=found["kind"].strip(),
            text=found["text"],
            file=value if mark == "file" else None,
            reason=value if mark == "not run" else None,
        )
