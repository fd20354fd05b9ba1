"""What the documentation says of the tests is so."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import REPOSITORY

NAMED = sorted(
    {
        name
        for path in (REPOSITORY / "docs").glob("*.md")
        for name in re.findall(r"tests/[\w/]+\.py(?:::\w+)*", path.read_text())
    }
)


def test_docs_name_tests() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_is_there(name: str) -> None:
    path, *parts = name.split("::")
    body: list[ast.stmt] = ast.parse((REPOSITORY / path).read_text()).body
    for part in parts:
        (found,) = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        body = found.body
