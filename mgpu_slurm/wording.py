"""How things are spelled on the screen; commands the way this program was called, so that they can be pasted."""

from __future__ import annotations

import sys
from pathlib import Path


def program() -> str:
    """`mgpu-slurm`, or `python -m mgpu_slurm` with the interpreter as it was typed."""
    return f"{_python()} -m mgpu_slurm" if _is_module_call() else "mgpu-slurm"


def counted(number: int, thing: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def first_line(text: str) -> str:
    """Of what may be many lines, or none."""
    return (text.splitlines() or [""])[0]


def in_words(seconds: float) -> str:
    """`90 s`, `30 min`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def short_path(path: Path) -> str:
    """Relative to the working directory where it lies below, for pasting."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _is_module_call() -> bool:
    return Path(sys.argv[0]).name == "__main__.py"


def _python() -> str:
    return sys.orig_argv[0]
