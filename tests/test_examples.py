"""The examples of README.md and the documentation work: each page is executed from its first block to its last."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown import PAGES, Block, blocks
from tests.support import REPOSITORY, Project, require, with_long

REASONS = {
    "a part of a program",
    "a real SLURM",
    "an image",
    "another framework",
    "installs packages",
    "takes long",
    "waits for Ctrl-C",
}
RUNS = {
    "bash": ["bash", "-eo", "pipefail", "-c"],
    "console": ["bash", "-eo", "pipefail", "-c"],
    "python": [sys.executable, "-c"],
    "sh": ["bash", "-eo", "pipefail", "-c"],
}
"""The program that executes a block of each kind, which is its last argument."""

SHOWS = {"ini", "json", "text", "yaml"}
"""Kinds of blocks that are only shown."""

BLOCKS = {str(page.relative_to(REPOSITORY)): list(blocks(page)) for page in PAGES}


def code(block: Block) -> str:
    """Return what a block executes; of a console's, the lines behind a prompt."""
    if block.kind != "console":
        return block.text
    return "".join(line[2:] for line in block.text.splitlines(keepends=True) if line.startswith("$ "))


def execute(block: Block, project: Project, place: str) -> None:
    # a page's commands are those of this interpreter
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*RUNS[block.kind], code(block)],
        stdin=subprocess.DEVNULL,
        cwd=project.folder,
        env=os.environ | project.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{place}: exit code {done.returncode}\n{block.text}\n{done.stdout}"


WITH_EXAMPLES = [name for name, found in BLOCKS.items() if any(block.kind in RUNS for block in found)]
SHORT = [name for name in WITH_EXAMPLES if name == "README.md" or name.startswith("docs/tutorials/")]
"""What a new user reads; the commands of other pages have tests of their own, too."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", with_long(WITH_EXAMPLES, SHORT))
def test_examples_of_a_page_succeed(page: str, project: Project) -> None:
    require("a machine without sbatch, where runs are local" if shutil.which("sbatch") else None)
    for block in BLOCKS[page]:
        if block.file is not None:
            project.write(block.file, block.text)
        elif block.kind in RUNS and block.reason is None:
            execute(block, project, f"{page}:{block.line}")


@pytest.mark.parametrize("page", BLOCKS)
def test_each_block_is_run_or_has_a_known_reason(page: str) -> None:
    for block in BLOCKS[page]:
        assert block.kind in RUNS.keys() | SHOWS or block.file, f"{page}:{block.line}: a block of kind {block.kind!r}"
        assert block.reason is None or block.reason in REASONS, f"{page}:{block.line}: {block.reason}"


def test_most_blocks_are_run() -> None:
    examples = [block for found in BLOCKS.values() for block in found if block.kind in RUNS]
    marked = [block for block in examples if block.reason is not None]
    assert len(examples) > 60
    assert len(marked) <= 43
