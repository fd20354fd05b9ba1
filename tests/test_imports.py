"""Imports point one way, and the login side starts without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mgpu_slurm
from tests.support import REPOSITORY, Project

PACKAGE = REPOSITORY / "mgpu_slurm"
HEAVY = {"torch", "torchvision", "optuna", "tensorboard", "submitit"}
SUBMITIT_MODULE = "mgpu_slurm.launch.submitit_executor"

MAY_IMPORT = {
    "top": {"top"},
    "launch": {"top", "launch"},
    "checkpoints": {"top", "checkpoints"},
    "runtime": {"top", "checkpoints", "runtime"},
    "observe": {"top", "launch", "observe", "sweeping", "handles"},
    "sweeping": {"top", "checkpoints", "launch", "runtime", "sweeping"},
    "handles": {"top", "launch", "sweeping", "handles"},
    "supervisor": {"top", "launch", "runtime", "supervisor"},
    "cli": {"top", "launch", "runtime", "sweeping", "observe", "handles", "cli"},
}
"""The houses of the package and whom they know. The local executor's supervisor is where both sides meet; handles are
what Python holds of runs, groups and sweeps."""

LOGIN_SIDE = ("top", "launch", "observe", "handles", "cli")


def module_files() -> dict[str, Path]:
    """Every module of the package by name; the starter's files are a user's, not the package's."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if "starter" not in parts:
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


FILES = module_files()


def house(module: str) -> str:
    parts = module.split(".")
    if parts[1:] in ([], ["cli"], ["__main__"]):
        # the package's own __init__ names what lives in any house, and imports none of it by itself
        return "cli"
    if parts[1:] == ["handles"]:
        return "handles"
    if parts[1:] in (["supervisor"], ["coordinator"], ["nodes"]):
        return "supervisor"
    return "top" if len(parts) == 2 and FILES[module].name != "__init__.py" else parts[1]


def imports(module: str, everywhere: bool) -> set[str]:
    """What a module imports when it is imported, or anywhere in its code; imports for type checkers do not count."""
    found = set()
    for node in _statements(ast.parse(FILES[module].read_text()), everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            source = node.module or ""
            found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in FILES else source for a in node.names}
    return found


def _statements(tree: ast.AST, everywhere: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not everywhere:
            continue
        yield node
        yield from _statements(node, everywhere)


def loaded(module: str, seen: set[str] | None = None) -> set[str]:
    """The packages outside of the project that importing a module loads, through the project's own modules."""
    seen = set() if seen is None else seen
    seen.add(module)
    packages = set()
    for name in imports(module, everywhere=False):
        if name not in FILES:
            packages.add(name.partition(".")[0])
        elif name not in seen:
            packages |= loaded(name, seen)
    return packages


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_module_imports_only_from_the_houses_it_may_know(module: str) -> None:
    own = house(module)
    assert own in MAY_IMPORT, f"house {own!r} has no line in MAY_IMPORT"
    wrong = []
    for name in imports(module, everywhere=True) & set(FILES):
        if name != "mgpu_slurm" and house(name) not in MAY_IMPORT[own]:
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("module", sorted(name for name in FILES if house(name) in LOGIN_SIDE))
def test_a_module_of_the_login_side_loads_nothing_heavy(module: str) -> None:
    assert loaded(module) & HEAVY == ({"submitit"} if module == SUBMITIT_MODULE else set())


def test_submitit_is_imported_in_one_module() -> None:
    importing = {module for module in FILES if any(n.split(".")[0] == "submitit" for n in imports(module, True))}
    assert importing == {SUBMITIT_MODULE}


def test_these_tests_see_what_modules_import() -> None:
    assert "torch" in loaded("mgpu_slurm.runtime.run")
    assert "mgpu_slurm.launch.registry" in imports("mgpu_slurm.cli", everywhere=True)
    assert "mgpu_slurm.launch.registry" not in imports("mgpu_slurm.cli", everywhere=False)
    assert house("mgpu_slurm.paths") == "top"


@pytest.mark.parametrize(
    "code",
    [
        "import mgpu_slurm",
        "from mgpu_slurm import submit, runs; runs()",
        "from mgpu_slurm.cli import main; main(['--help'])",
        "from mgpu_slurm.cli import main; main(['status'])",
        "from mgpu_slurm.cli import main; main(['clean'])",
        "from mgpu_slurm.cli import main; main(['submit', '--dry-run', '--executor', 'local', '--', 'true'])",
    ],
    ids=["package", "python", "help", "status", "clean", "dry-run"],
)
def test_the_login_side_starts_without_anything_heavy(project: Project, code: str) -> None:
    # the program ends by SystemExit
    code = f"import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules))); {code}"
    environ = os.environ | project.environ
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=project.folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()) & HEAVY == set()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "jobs").rglob("*.py")), ids=lambda path: path.stem)
def test_jobs_use_the_public_names_only(path: Path) -> None:
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mgpu_slurm")
        for alias in node.names
    }
    assert names <= {f"mgpu_slurm.{name}" for name in mgpu_slurm.__all__}
