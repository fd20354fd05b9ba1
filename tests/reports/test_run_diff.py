"""What differs between two runs is found, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import read_json, write_json
from mgpu_slurm.reports import run_diff
from mgpu_slurm.reports.run_diff import compare
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder
from tests.metrics.event_files import ended_run
from tests.support import Project

JOB = "def train(run, lr: float = 0.1, epochs: int = 1):\n    for epoch in run.restore().epochs(epochs):\n"
REPORT = "        run.report(epoch, loss=lr)\n"


def test_two_runs_are_compared(project: Project) -> None:
    project.write("job.py", JOB + REPORT)
    project.write("notes.txt", "as before\n")
    first = project.submit("job.py")
    project.write("job.py", JOB + "        # one more line\n" + REPORT)
    (project.folder / "data.bin").write_bytes(b"\xff\xfe")
    second = project.submit("job.py", "lr=0.2", "--time", "5")
    for folder in (first, second):
        project.finish(folder)
    environment = RunFolder(second).environment
    found = read_json(environment) or {}
    write_json(environment, found | {"packages": found["packages"] | {"click": "0.1"}})
    done = project.call("diff", "--json", first.name, second.name)
    assert done.returncode == 0, done.stderr
    diff = json.loads(done.stdout)
    assert diff["runs"] == [first.name, second.name]
    assert diff["config"] == {"lr": [0.1, 0.2]}
    assert diff["request"] == {"lead": [None, 60], "resources.time": [None, "5"]}
    assert diff["code"] == {"data.bin": {"added": 0, "removed": 0}, "job.py": {"added": 1, "removed": 0}}
    assert diff["environment"] == {"click": [found["packages"]["click"], "0.1"]}
    assert diff["result"] == {"loss": [0.1, 0.2]}
    table = [line.split() for line in project.call("diff", first.name, second.name).stdout.splitlines()]
    assert table == [
        [first.name, second.name],
        ["config", "lr", "0.1", "0.2"],
        ["request", "--time", "-", "5"],
        ["--signal", "@SECONDS", "-", "60"],
        ["code", "data.bin", "differs"],
        ["job.py", "+1", "-0", "lines"],
        ["environment", "click", found["packages"]["click"], "0.1"],
        ["result", "loss", "0.1", "0.2"],
    ]
    patch = project.call("diff", first.name, second.name, "--code").stdout.splitlines()
    assert patch[0] == f"Binary files {first.name}/data.bin and {second.name}/data.bin differ"
    assert [line for line in patch if line[:1] == "+"] == [f"+++ {second.name}/job.py", "+        # one more line"]
    same = project.call("diff", first.name, first.name).stdout.split()
    assert same[2:] == [
        each for title in ("config", "request", "code", "environment", "result") for each in (title, "(same)")
    ]
    assert project.call("diff", first.name, first.name, "--code").stdout == "no difference\n"


def test_files_that_differ_in_their_line_ends_are_named(tmp_path: Path) -> None:
    first, second = (RunFolder(tmp_path / name) for name in ("a", "b"))
    for folder, text in ((first, b"x = 1\n"), (second, b"x = 1\r\n")):
        folder.create()
        folder.code.mkdir()
        (folder.code / "job.py").write_bytes(text)
    assert list(run_diff.patch(first, second)) == [
        "Files a/job.py and b/job.py differ in their line ends, or one of them is empty"
    ]


def test_damaged_result_is_named(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        folder.create()
        Spec(folder.run, Target(command=("true",)), "local", Resources()).write(folder)
    folders[1].result.write_text("{")
    with pytest.raises(UserError, match="json' is damaged: delete it to compare without it"):
        run_diff.compare(*folders)


def test_table_fits_a_terminal(tmp_path: Path) -> None:
    names = [f"train-imagenet-long-2026110{day}-120000-01a{day}" for day in (1, 2)]
    folders = [RunFolder(ended_run(tmp_path / name)) for name in names]
    found = compare(*folders)
    head, *others = run_diff.lines(found, 60)
    assert head.split() == ["train-...0000-01a1", "train-...0000-01a2"]
    assert max(map(len, (head, *others))) <= 60
    # their ends are the same, and their beginnings too
    alike = replace(found, runs=(f"{30 * 'a'}1{30 * 'b'}", f"{30 * 'a'}2{30 * 'b'}"))
    assert run_diff.lines(alike, 60)[0].split() == [*alike.runs]


def test_target_may_be_written_in_two_ways(tmp_path: Path) -> None:
    folders = []
    for place, function in enumerate(("train:train", "./train.py:train", "/else/train.py:train")):
        folders.append(RunFolder(tmp_path / str(place)))
        folders[-1].create()
        Spec(folders[-1].run, Target(function=function), "local", Resources()).write(folders[-1])
    assert compare(*folders[:2]).request == {}
    assert compare(*folders[1:]).request == {"target.function": ("./train.py:train", "/else/train.py:train")}


def test_groups_are_compared_by_their_means(tmp_path: Path) -> None:
    groups = [RunFolder(ended_run(tmp_path / name, tasks=2)) for name in ("a", "b")]
    for place, group in enumerate(groups):
        for task in range(2):
            member = RunFolder(ended_run(group.of_task(task).path))
            write_json(member.result, {"result": {"loss": place + task, "same": 1.0}})
    found = compare(*groups)
    assert found.result == {"loss": (0.5, 1.5)}
