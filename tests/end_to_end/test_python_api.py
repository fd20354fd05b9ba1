"""Runs from Python: scripts and notebooks submit, wait and read results as the command line does."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import Project, make_project, processes_of, wait_until, without_gloo

WORK = """
    import time
    from dataclasses import dataclass
    from pathlib import Path

    @dataclass
    class Config:
        lr: float = 0.1
        data: Path = Path("data")

    def train(run, config: Config):
        print("module", config.lr, config.data)
        run.report(1, loss=config.lr)

    def fails(run, config):
        raise RuntimeError(f"nothing to learn from {config}")

    def waits(run, config):
        print("waiting", flush=True)
        time.sleep(600)
"""

SCRIPT = """
    from __future__ import annotations

    import json
    import time
    from dataclasses import dataclass, field

    import work
    from mgpu_slurm import runs, submit
    from mgpu_slurm.core.errors import RunFailed, UserError

    FACTOR = 10

    @dataclass
    class Inner:
        width: int = 2

    @dataclass
    class Config:
        lr: float
        inner: Inner = field(default_factory=Inner)

    def scaled(value):
        return FACTOR * value

    def train(run, config: Config) -> float:
        print(f"rank {run.rank} of {run.world_size} has width {config.inner.width}")
        return scaled(config.lr)

    here = submit(train, Config(lr=2.0, inner=Inner(width=5)), nodes=2, executor="local", name="here")
    module = submit(work.train, work.Config(lr=0.5), executor="local", name="module")
    text = submit("work:train", {"lr": 0.25}, executor="local", name="text")
    failing = submit(work.fails, {"samples": 0}, executor="local", name="failing")
    waiting = submit("work.py:waits", executor="local", name="waiting")

    said = {"repr": repr(waiting), "state": waiting.state}
    said["results"] = [here.result(), module.result(), text.result()]
    said["logs"] = [here.logs(), here.logs(rank=1), module.logs(rank=0)]
    said["waited"] = [here.wait(), here.state]
    try:
        failing.result()
    except RunFailed as error:
        said["failed"] = str(error)
    try:
        waiting.wait(timeout=0.1)
    except TimeoutError as error:
        said["timeout"] = str(error)
    while "waiting" not in waiting.logs():
        time.sleep(0.02)
    said["cancelled"] = [waiting.cancel(), waiting.wait(), waiting.cancel()]
    said["wrong"] = []
    for target, config, more in [
        (train, {"lr": "fast"}, {}),
        (train, 3, {}),
        (lambda run: None, {}, {}),
        ("work:trian", {}, {}),
        (work.train, {}, {"nodez": 2}),
        (work.train, {}, {"nodes": 0}),
    ]:
        try:
            submit(target, config, executor="local", **more)
        except UserError as error:
            said["wrong"].append(str(error))
    said["folders"] = [str(run.folder) for run in (here, module, text, failing, waiting)]
    said["runs"] = [run.name for run in runs()]
    print(json.dumps(said))
"""


def python(project: Project, *words: str, **options: Any) -> str:
    options = {"cwd": project.folder, "env": os.environ | project.environ} | options
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=110, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("python"))
    project.write("work.py", WORK)
    project.write("script.py", SCRIPT)
    project.write("mgpu.yaml", "clusters: {local: {kill-wait: 1}}\n")
    return project


@pytest.fixture(scope="module")
def said(project: Project) -> dict[str, Any]:
    return dict(json.loads(python(project, "script.py")))


def test_function_of_the_calling_script_runs_with_its_globals(said: dict[str, Any]) -> None:
    assert said["results"][0] == {"value": 20.0}
    assert [*map(without_gloo, said["logs"][:2])] == ["rank 0 of 2 has width 5\n", "rank 1 of 2 has width 5\n"]
    assert said["waited"] == ["COMPLETED", "COMPLETED"]


def test_module_function_and_target_name_run_from_the_snapshot(said: dict[str, Any], project: Project) -> None:
    # the last metrics are the result of a function that returns nothing
    assert said["results"][1:] == [{"loss": 0.5}, {"loss": 0.25}]
    assert said["logs"][2].startswith(f"module 0.5 {project.folder / 'data'}\n")
    module = Path(said["folders"][1])
    assert (module / "code" / "work.py").exists()
    assert not (module / "function.pkl").exists()


def test_result_of_a_failed_run_raises_the_first_cause(said: dict[str, Any]) -> None:
    name = Path(said["folders"][3]).name
    expected = "rank 0 on local1: RuntimeError: nothing to learn from {'samples': 0}"
    assert said["failed"] == f"run {name} is FAILED: {expected}"


def test_wait_times_out_and_cancel_ends_the_run(said: dict[str, Any]) -> None:
    folder = Path(said["folders"][4])
    assert said["state"] in ("PENDING", "RUNNING")
    assert said["repr"].startswith(f"<Handle {folder.name} ")
    assert said["timeout"] == f"run {folder.name} is still RUNNING after 0.1 s"
    assert said["cancelled"] == [True, "CANCELLED", False]
    # the supervisor ends after the state says so
    wait_until(lambda: processes_of(folder) == [])


def test_invalid_calls_raise_one_line_errors_and_leave_no_temp_folders(said: dict[str, Any], project: Project) -> None:
    expected = [
        "config of train: lr='fast': expected a valid number",
        "config: expected a dataclass or a mapping, got int",
        "it must take the run and a config",
        "work has no 'trian' (did you mean 'train'?)",
        "unknown flag 'nodez' (did you mean 'nodes'?)",
        "--nodes 0: expected a whole number of at least 1",
    ]
    assert len(said["wrong"]) == len(expected)
    for message, part in zip(said["wrong"], expected, strict=True):
        assert part in message
        assert "\n" not in message
    assert {path.name for path in project.runs.iterdir()} == {Path(folder).name for folder in said["folders"]}
    assert not any(path.name.startswith(".") for path in project.runs.iterdir())


def test_runs_lists_newest_first_from_another_process(said: dict[str, Any], project: Project, tmp_path: Path) -> None:
    names = [Path(folder).name for folder in said["folders"]]
    assert said["runs"] == names[::-1]
    code = """
        from mgpu_slurm import runs
        for run in runs():
            print(run.name, run.state, run.result() if run.state == "COMPLETED" else "")
    """
    lines = python(project, "-c", textwrap.dedent(code), cwd=tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == names[::-1]
    assert lines[-1] == f"{names[0]} COMPLETED {{'value': 20.0}}"


def test_function_without_a_source_file_runs(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    code = """
        from mgpu_slurm import submit
        SHIFT = 1
        def train(run, config):
            return {"sum": config["a"] + SHIFT, "ranks": run.world_size}
        run = submit(train, {"a": 2}, ntasks_per_node=2, executor="local")
        print(run.name, run.result())
    """
    name, result = python(project, "-c", textwrap.dedent(code)).split(maxsplit=1)
    assert result.strip() == "{'sum': 3.0, 'ranks': 2.0}"
    assert (project.runs / name / "function.pkl").exists()


@pytest.mark.long
def test_group_of_a_function_without_a_file_has_one_seed_per_run(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    code = """
        from __future__ import annotations
        from dataclasses import dataclass
        from mgpu_slurm import submit

        @dataclass
        class Config:
            lr: float = 0.5
            seed: int = 0

        def of_class(run, config: Config):
            return {"seed": config.seed, "lr": config.lr}

        def of_mapping(run, config):
            return config

        def by_name(run, lr: float = 0.5, seed=0):
            return {"seed": seed, "lr": lr}

        groups = [
            submit(of_class, seeds=2, executor="local"),
            submit(of_class, Config(lr=0.25, seed=3), seeds=2, executor="local"),
            submit(of_mapping, {"lr": 0.125, "seed": 5}, seeds=2, executor="local"),
            submit(by_name, {"lr": 1}, seeds=2, executor="local"),
        ]
        for group in groups:
            print([[result["seed"], result["lr"]] for result in group.results()])
    """
    assert python(project, "-c", textwrap.dedent(code)).splitlines() == [
        "[[0.0, 0.5], [1.0, 0.5]]",
        "[[3.0, 0.25], [4.0, 0.25]]",
        "[[5.0, 0.125], [6.0, 0.125]]",
        "[[0.0, 1.0], [1.0, 1.0]]",
    ]


@pytest.mark.long
def test_function_pickled_by_version_0_1_can_be_resumed(tmp_path: Path) -> None:
    """Version 0.1 pickled the function together with the config of the group."""
    project = make_project(tmp_path)
    code = """
        from dataclasses import dataclass
        import cloudpickle
        from mgpu_slurm import submit
        from mgpu_slurm.request import config
        @dataclass
        class Config:
            seed: int = 4
        def train(run, config: Config):
            raise ValueError("once")
        def again(run, config: Config):
            return {"seed": config.seed}
        group = submit(train, seeds=2, executor="local")
        group.wait()
        old = cloudpickle.dumps((again, Config(), config.types_in(Config)))
        (group.folder / "function.pkl").write_bytes(old)
        group.resume()
        print(group.results())
    """
    assert python(project, "-c", textwrap.dedent(code)) == "[{'seed': 4.0}, {'seed': 5.0}]\n"


def test_sweep_of_a_function_without_a_file_continues_and_is_found(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    code = """
        from __future__ import annotations
        from dataclasses import dataclass, field
        from pathlib import Path
        from typing import Literal
        from mgpu_slurm import UserError, find, sweep
        SHIFT = 1

        @dataclass
        class Layer:
            width: int = 8

        @dataclass
        class Inner:
            x: float = 0.0
            data: Path = Path("data")

        @dataclass
        class Base:
            kind: Literal["a", "b"] = "a"

        @dataclass
        class Config(Base):
            inner: Inner | None = None
            layers: list[Layer] = field(default_factory=list)

        def train(run, config: Config):
            assert config.inner.data.is_absolute() and [layer.width for layer in config.layers] == [4]
            return {"score": config.inner.x + SHIFT}
        space = {"inner.x": {"choice": [0.25, 0.5, 0.75]}}
        values = {"study": "typed", "job": train, "metric": "score", "sampler": "random", "space": space}
        values["fixed"] = {"layers": [{"width": 4}]}
        try:
            sweep(values, executor="local")
        except UserError as error:
            print(error)
        try:
            sweep(values, executor="local", trials=2, space={"inner.x": {"choice": [0.5, "wide"]}})
        except UserError as error:
            print(error)
        study = sweep(values, executor="local", trials=2, enqueue=[{"inner.x": 0.25}, {"inner.x": 0.5}])
        print(study, study.wait(), study.best["params"], study.trials["COMPLETE"])
        values = {**values, "trials": 3, "enqueue": [{"inner.x": x} for x in (0.25, 0.5, 0.75)]}
        print(sweep(values).wait(), find("typed").best["params"], study.trials["COMPLETE"])
        print(study.results())
    """
    refused, wrong, first, second, results = python(project, "-c", textwrap.dedent(code)).splitlines()
    assert refused.startswith("the sweep: no stopping condition: add `trials:`")
    assert wrong == "config of train: inner.x='wide': expected a valid number"
    assert first.startswith("<Study typed ")
    assert first.endswith("> COMPLETED {'inner.x': 0.5} 2")
    assert second == "COMPLETED {'inner.x': 0.75} 3"
    assert results == "[{'score': 1.25}, {'score': 1.5}, {'score': 1.75}]"
    assert (project.runs / "typed" / "function.pkl").exists()
    command = project.json("best", "typed")["command"]
    inner = f"{{'x': 0.75, 'data': '{project.folder}/data'}}"
    assert command == f"submit(train, {{'kind': 'a', 'inner': {inner}, 'layers': [{{'width': 4}}]}})"


def test_sweep_file_values_can_be_overridden(project: Project) -> None:
    project.write(
        "sweep.yaml",
        "{study: filed, job: work, metric: loss, direction: maximize, trials: 9, sampler: random,"
        " space: {lr: {float: [0, 1]}}}",
    )
    code = """
        from mgpu_slurm import sweep
        space = {"lr": {"float": [2.0, 3.0]}}
        study = sweep("sweep.yaml", executor="local", trials=1, space=space, sampler={"seed": 1})
        assert (study.folder / "sweep.yaml").read_text().count("name: random") == 1
        print(study.wait(), study.trials["COMPLETE"], study.best["value"] >= 2, study.name)
    """
    assert python(project, "-c", textwrap.dedent(code)) == "COMPLETED 1 True filed\n"


def test_command_is_given_as_a_list_of_words(project: Project) -> None:
    code = "run = submit(['echo', 'a  b'], executor='local'); print(run.wait(), run.logs())"
    assert python(project, "-c", f"from mgpu_slurm import submit; {code}") == "COMPLETED a  b\n\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_pickle_owned_by_another_user_is_not_loaded(tmp_path: Path) -> None:
    """In a shared folder, another user may replace the pickle of a run."""
    project = make_project(tmp_path)
    code = """
        from mgpu_slurm import submit
        def train(run, config):
            raise ValueError("once")
        print(submit(train, executor="local").name)
    """
    name = python(project, "-c", textwrap.dedent(code)).strip()
    folder = project.runs / name
    project.finish(folder)
    mark = project.folder / "was run"
    (folder / "function.pkl").write_bytes(pickle.dumps(Opened(str(mark))))
    os.chown(folder / "function.pkl", 65534, 65534)
    done = project.call("resume", name, "--follow")
    assert done.returncode == 1
    assert "function.pkl' belongs to user 65534: submit the function yourself" in done.stdout
    assert not mark.exists()


class Opened:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self._path, "w")
