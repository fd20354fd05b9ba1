"""What the documentation says of the tests is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from tests.support import REPOSITORY

NAMED = sorted(
    {
        name
        for path in (REPOSITORY / "docs").rglob("*.md")
        for name in re.findall(r"tests/[\w/]+\.py(?:::\w+)*", path.read_text())
    }
)


def test_docs_refer_to_tests() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize("name", NAMED)
def test_named_test_exists(name: str) -> None:
    path, *parts = name.split("::")
    body: list[ast.stmt] = ast.parse((REPOSITORY / path).read_text()).body
    for part in parts:
        (found,) = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        body = found.body


def test_modules_on_the_paths_of_the_architecture_exist() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text()
    paths = text[text.index("## Paths") : text.index("## Where to add")]
    named = set(re.findall(r"(?<![\w/.])(?:[a-z_0-9]+/)+[a-z_0-9]+\b", paths))
    assert len(named) > 40
    packages = [REPOSITORY / "mgpu_slurm", REPOSITORY / "mgpu_slurm/sweeps", REPOSITORY]
    assert not {
        name for name in named if not any((each / f"{name}.py").exists() or (each / name).is_dir() for each in packages)
    }


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(name: str) -> None:
    """MkDocs checks those of the other pages."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (REPOSITORY / name).read_text())
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


# -- docs/strategies.md: a test for each layout


def test_each_cell_of_the_table_of_layouts_names_a_test() -> None:
    text = (REPOSITORY / "docs/strategies.md").read_text()
    cells = {kind: {*re.findall(rf"{kind}\[([^\]]+)\]", text)} for kind in "EROC"}
    assert all(text.count(f"| {kind}[") == text.count("| E[") for kind in "OC")
    tree = ast.parse((REPOSITORY / "tests/training/parallel/test_strategies.py").read_text())
    named = {ast.unparse(each.targets[0]): each.value for each in tree.body if isinstance(each, ast.Assign)}
    layouts = {ast.unparse(each.target): each.value for each in tree.body if isinstance(each, ast.AnnAssign)}["LAYOUTS"]
    assert isinstance(layouts, ast.Dict)
    assert cells["E"] <= {ast.literal_eval(key) for key in layouts.keys if key is not None}
    (resumed,) = [each for each in tree.body if isinstance(each, ast.FunctionDef) and "_bit_for_bit_" in each.name]
    (mark,) = resumed.decorator_list
    assert isinstance(mark, ast.Call)
    cases = mark.args[1]
    # some of them are left to `make long`
    assert isinstance(cases, ast.Call)
    assert cells["R"] == cells["E"] <= {*ast.literal_eval(cases.args[0])}
    pairs = {f"{before}-{after}" for before, after in ast.literal_eval(named["PAIRS"])}
    assert cells["O"] <= pairs
    assert f"{len(pairs)} pairs of layouts" in text
    chaos = re.findall(r'_under\("([\w-]+)"', (REPOSITORY / "tests/chaos/training.py").read_text())
    assert cells["C"] == {*chaos, "ddp"}


# -- docs/architecture.md: who notices the end of a process or thread, and what bounds a wait

PACKAGE = REPOSITORY / "mgpu_slurm"
STARTS_PROCESSES = {"subprocess.Popen", "os.fork"}
STARTS_THREADS = {"threading.Thread", "threading.Timer"}
WAITS = {"select", "accept", "recv", "recv_fds", "readline", "communicate", "sigtimedwait", "sigwaitinfo", "waitpid"}
WAITS |= {"flock", "lockf", "wait", "wait_for", "poll", "sleep", "broadcast", "broadcast_object_list", "all_reduce"}
RUNS_PROCESSES = {"subprocess.run"}


@cache
def calls() -> Sequence[tuple[str, str]]:
    """The module and the name of everything that the package calls by a dotted name."""
    return [
        (str(path.relative_to(PACKAGE)), ast.unparse(node.func))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]


def table(title: str) -> set[str]:
    """The modules in the first column of a table of docs/architecture.md."""
    text = (REPOSITORY / "docs/architecture.md").read_text()
    rows = [line for line in text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines() if line[:1] == "|"]
    return {name for row in rows[2:] for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[1])}


@pytest.mark.parametrize(
    ("title", "is_one"),
    [
        ("Processes", lambda call: call in STARTS_PROCESSES),
        ("Threads", lambda call: call in STARTS_THREADS),
        (
            "Waits",
            lambda call: call.rpartition(".")[2] in WAITS or call.endswith("thread.join") or call in RUNS_PROCESSES,
        ),
    ],
    ids=["processes", "threads", "waits"],
)
def test_tables_of_the_architecture_are_complete(title: str, is_one: Callable[[str], bool]) -> None:
    assert table(title) == {module for module, call in calls() if is_one(call)}


def test_exactly_these_modules_start_guarded_threads() -> None:
    assert {module for module, call in calls() if call == "crash.guarded_thread"} == {
        "rank/signals.py",
        "rank/communication/step_sync.py",
        "metrics/sinks.py",
        "rank/watchdog.py",
    }
