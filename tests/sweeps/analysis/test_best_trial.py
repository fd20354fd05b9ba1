"""The command that trains the best trial again: a shell, or Python, takes it as it stands."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.spec import Target, read_spec
from mgpu_slurm.sweeps.analysis import best_trial
from mgpu_slurm.sweeps.study import summary as summaries
from tests.sweeps.sweeps import begin, finish, make, study_of, sweep_of, worker

RESOURCES = {"nodes": 2, "cpus-per-task": 4, "time": None, "sbatch": {"comment": "it's mine", "qos": "high"}}
FLAGS = ["--nodes", "2", "--cpus-per-task", "4", "--sbatch", "comment=it's mine", "--sbatch", "qos=high"]


def command_of(tmp_path: Path, target: Target, cluster: str | None = None, **values: Any) -> str:
    folder = make(tmp_path, resources=RESOURCES, sampler="grid", trials=1, **values)
    replace(read_spec(folder), target=target, project=str(tmp_path), cluster=cluster).write(folder)
    part = worker(folder, 0)
    values = begin(part).values
    # as who trains it does
    files.write_whole(folder.of_trial(0).config, configs.dump_yaml(sweep_of(folder).fixed | values))
    finish(part, 0.5)
    summaries.write(folder, study_of(folder), sweep_of(folder))
    return best_trial.best(folder).command


def test_function_path_with_spaces_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = command_of(tmp_path, Target(function="my job.py:train"), space={"x": {"choice": [0.5]}})
    words = shlex.split(found)
    assert words[words.index("submit") + 1 :] == ["my job.py:train", *FLAGS, "--config", "s/trials/0/config.yaml"]


def test_command_is_filled_with_parameters_and_fixed_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("python", "train.py", "--x", "{x}", "--text", "{text}", "--sizes={sizes}")
    found = command_of(
        tmp_path,
        Target(command=words),
        job={"command": list(words)},
        fixed={"text": 'it\'s "so" $HOME'},
        space={"x": {"choice": [0.1 + 0.2]}, "sizes": {"choice": [[8, 8]]}},
    )
    told = ["python", "train.py", "--x", "0.30000000000000004", "--text", 'it\'s "so" $HOME', "--sizes=[8, 8]"]
    assert shlex.split(found)[-len(FLAGS) - 8 :] == [*FLAGS, "--", *told]


def test_command_from_another_folder_starts_with_cd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, other = tmp_path / "my project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    monkeypatch.chdir(other)
    found = command_of(project, Target(function="job.py:train"), space={"x": {"choice": [0.5]}})
    words = shlex.split(found)
    assert words[:3] == ["cd", str(project), "&&"]
    assert words[-2:] == ["--config", str(project / "s/trials/0/config.yaml")]


def test_function_object_gives_a_python_call(tmp_path: Path) -> None:
    found = command_of(tmp_path, Target(pickled="train"), space={"x": {"choice": [0.5]}}, fixed={"y": "it's"})
    told = eval(found, {"train": "the function", "submit": lambda *given, **resources: (given, resources)})
    assert told == (
        ("the function", {"y": "it's", "x": 0.5}),
        {"nodes": 2, "cpus_per_task": 4, "sbatch": RESOURCES["sbatch"]},
    )


def test_command_names_the_cluster_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = command_of(tmp_path, Target(function="job.py:train"), "hpc", space={"x": {"choice": [0.5]}})
    assert shlex.split(found)[-len(FLAGS) - 4 : -2] == ["--cluster", "hpc", *FLAGS]


def test_python_call_names_the_cluster_of_the_sweep(tmp_path: Path) -> None:
    found = command_of(tmp_path, Target(pickled="train"), "hpc", space={"x": {"choice": [0.5]}})
    told = eval(found, {"train": "the function", "submit": lambda *given, **resources: resources})
    assert told["cluster"] == "hpc"
