"""Imports point one way, and what runs without torch loads none."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mgpu_slurm
from tests.support import REPOSITORY, Project

PACKAGE = REPOSITORY / "mgpu_slurm"
HEAVY = {"torch", "torchvision", "optuna", "tensorboard", "submitit", "mlflow", "wandb"}
SUBMITIT_MODULE = "mgpu_slurm.slurm.submitit_adapter"

MAY_IMPORT = {
    # package: the packages that it may import besides itself, all of them above it
    "core": "",
    "run_folder": "core",
    "request": "core run_folder",
    "slurm": "core run_folder request",
    "trackers": "core run_folder request",
    # on the login node
    "executors": "core run_folder request slurm",
    "registry": "core run_folder request slurm executors",
    "submission": "core run_folder request slurm trackers executors registry",
    # in the job, once per node
    "job": "core run_folder request slurm trackers",
    # in the job, in each rank
    "rank": "core run_folder request slurm job",
    "metrics": "core run_folder job rank",
    "checkpoints": "core run_folder rank",
    "data": "core run_folder rank checkpoints",
    "training": "core run_folder request job rank metrics checkpoints data",
    # both
    "local_cluster": "core run_folder request slurm trackers executors registry job rank training",
    "sweeps": "core run_folder request slurm registry submission job rank metrics checkpoints training",
    # what people call
    "reports": "core run_folder request slurm trackers executors registry submission metrics sweeps",
    "handles": "core run_folder request registry submission sweeps reports",
    "api": "core run_folder request registry submission sweeps handles",
    "doctor": "core run_folder request slurm executors registry submission job rank training handles api",
    "cli": "core run_folder request slurm trackers executors registry submission sweeps reports handles api doctor"
    " checkpoints",
}

LIGHT = (
    "core",
    "run_folder",
    "request",
    "slurm",
    "trackers",
    "executors",
    "registry",
    "submission",
    "job",
    "reports",
    "handles",
    "api",
    "doctor",
    "cli",
)
"""Packages of which no module loads any of `HEAVY` when it is imported."""

HEAVY_MODULES = {SUBMITIT_MODULE: {"submitit"}}
"""Exceptions, besides `doctor.in_job`, which each rank of a job runs."""

LOADED_BY_HELP = {
    *("mgpu_slurm", "mgpu_slurm.core", "mgpu_slurm.core.errors", "mgpu_slurm.core.formatting", "mgpu_slurm.cli"),
    *(f"mgpu_slurm.cli.{name}" for name in ("main", "options", "output")),
    *(f"mgpu_slurm.cli.{name}" for name in ("manage", "results", "setup", "submit", "sweeps", "views")),
}
"""All modules that `--help` and completion may load: what a command needs beyond them, it imports when it runs."""

OF_VERSION_0_1 = ("runtime", "sweeping")
"""Packages with modules at the names that version 0.1 had for them."""


def module_files() -> dict[str, Path]:
    """Return the file of each module by its name; the starter's files are a user's, not the package's."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if "starter" not in parts and parts[1] not in OF_VERSION_0_1:
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


FILES = module_files()


def package_of(module: str) -> str:
    """Return the package of a module, or the name of a module at the top; empty for the root."""
    return module.partition(".")[2].partition(".")[0]


def is_light(module: str) -> bool:
    return package_of(module) in LIGHT and not module.startswith("mgpu_slurm.doctor.in_job")


@functools.cache
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


def test_table_of_allowed_imports_has_no_cycles() -> None:
    above: set[str] = set()
    for package, imported in MAY_IMPORT.items():
        assert set(imported.split()) <= above
        above.add(package)


@pytest.mark.parametrize("module", sorted(FILES.keys() - {"mgpu_slurm", "mgpu_slurm.__main__"}))
def test_module_imports_only_what_its_package_may(module: str) -> None:
    own = package_of(module)
    assert own in MAY_IMPORT, f"package {own!r} has no line in MAY_IMPORT"
    imported = {package_of(name) for name in imports(module, everywhere=True) & set(FILES)}
    assert imported <= {own, *MAY_IMPORT[own].split()}


def test_modules_have_no_import_cycles() -> None:
    graph = {module: imports(module, everywhere=True) & set(FILES) for module in FILES}
    # raises CycleError with the modules of a circle
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(FILES)


def test_top_of_the_package_has_only_its_entry_modules() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == {
        *("__init__.py", "__main__.py", "api.py", "handles.py", "py.typed")
    }


def test_module_names_are_unique() -> None:
    names = Counter(name.rpartition(".")[2] for name in FILES if package_of(name) not in ("cli", "executors"))
    assert [name for name, count in names.items() if count > 1 and name != "__main__"] == []


def test_packages_and_modules_have_a_size_that_one_can_survey() -> None:
    sizes = Counter(name.rpartition(".")[0] for name in FILES if FILES[name].stem not in ("__init__", "__main__"))
    assert [package for package, count in sizes.items() if count > 12] == []
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert [name for name, length in lengths.items() if length > 400] == []


def test_no_module_hides_a_public_name() -> None:
    """Importing `mgpu_slurm.NAME` sets that attribute of the package, whatever it offered by that name before."""
    assert {path.stem for path in PACKAGE.iterdir()}.isdisjoint(mgpu_slurm.__all__)


@pytest.mark.parametrize("module", sorted(filter(is_light, FILES)))
def test_light_module_loads_no_heavy_package(module: str) -> None:
    assert loaded(module) & HEAVY == HEAVY_MODULES.get(module, set())


def test_submitit_is_imported_in_one_module() -> None:
    importing = {module for module in FILES if any(n.split(".")[0] == "submitit" for n in imports(module, True))}
    assert importing == {SUBMITIT_MODULE}


def test_import_scan_sees_top_level_and_lazy_imports() -> None:
    assert "torch" in loaded("mgpu_slurm.training.run")
    assert "mgpu_slurm.submission.submit" in imports("mgpu_slurm.cli.submit", everywhere=True)
    assert "mgpu_slurm.submission.submit" not in imports("mgpu_slurm.cli.submit", everywhere=False)
    assert package_of("mgpu_slurm.run_folder.layout") == "run_folder"


@pytest.mark.parametrize(
    "code",
    [
        "import mgpu_slurm",
        "from mgpu_slurm import submit, runs; runs()",
        "from mgpu_slurm.cli.main import main; main(['--help'])",
        "from mgpu_slurm.cli.main import main; main(['status'])",
        "from mgpu_slurm.cli.main import main; main(['clean'])",
        "from mgpu_slurm.cli.main import main; main(['submit', '--dry-run', '--executor', 'local', '--', 'true'])",
    ],
    ids=["package", "python", "help", "status", "clean", "dry-run"],
)
def test_login_side_loads_no_heavy_package(project: Project, code: str) -> None:
    assert loaded_by(code, project) & HEAVY == set()


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["submit", "--help"]], ids=" ".join)
def test_help_loads_only_the_command_line(project: Project, words: list[str]) -> None:
    names = loaded_by(f"from mgpu_slurm.cli.main import main; main({words})", project)
    assert {name for name in names if name.partition(".")[0] == "mgpu_slurm"} <= LOADED_BY_HELP


def test_completion_loads_only_the_command_line(project: Project) -> None:
    asked = {"_MGPU_SLURM_COMPLETE": "bash_complete", "COMP_WORDS": "mgpu-slurm sub", "COMP_CWORD": "1"}
    names = loaded_by("from mgpu_slurm.cli.main import main; main()", project, asked)
    assert {name for name in names if name.partition(".")[0] == "mgpu_slurm"} <= LOADED_BY_HELP


def loaded_by(code: str, project: Project, environ: dict[str, str] | None = None) -> set[str]:
    """Return the names of all modules that a new interpreter has loaded when it has run some code."""
    # the program ends by SystemExit
    code = f"import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules))); {code}"
    environ = os.environ | project.environ | (environ or {})
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=project.folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("path", sorted((REPOSITORY / "jobs").rglob("*.py")), ids=lambda path: path.stem)
def test_jobs_use_only_public_names(path: Path) -> None:
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mgpu_slurm")
        for alias in node.names
    }
    assert names <= {f"mgpu_slurm.{name}" for name in mgpu_slurm.__all__}
