"""Sweeps on the local executor, by real workers: what becomes of trials, whatever happens to who trains them."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from tests.support import Project, make_project, processes_of, wait_until
from tests.sweep_job import JOB, epochs, pids, seen

WIDE = {"space": {"x": {"float": [0.0, 1.0]}}}
GRID = {"sampler": "grid", "space": {"x": {"choice": [0.25, 0.1 + 0.2, 0.75]}}}


def write_sweep(project: Project, **values: Any) -> Path:
    project.write("job.py", JOB)
    base = {"study": "study", "job": "job.py", "metric": "score"}
    return project.write("sweep.yaml", yaml.safe_dump(base | values))


def start(project: Project, **values: Any) -> Path:
    """A sweep of one worker that has been started, unless more are asked for; its folder."""
    write_sweep(project, **values)
    done = project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow")
    assert done.returncode == 0, done.stderr
    return project.runs / "study"


def wait(project: Project) -> subprocess.CompletedProcess[str]:
    done = project.call("wait", "study", "--timeout", "300")
    assert done.returncode in (0, 1), done.stderr
    return done


def facts_of(project: Project) -> dict[str, Any]:
    (facts,) = project.json("status", "study")
    return dict(facts)


def trials_of(folder: Path) -> list[FrozenTrial]:
    """As Optuna itself reads the journal."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    return optuna.load_study(storage=storage, study_name="study").trials


def states(folder: Path) -> list[str]:
    return [trial.state.name for trial in trials_of(folder)]


def ends(folder: Path, number: int) -> dict[str, Any]:
    """What is written down of a trial's end, which it has had once."""
    trial = folder / "trials" / str(number)
    (end,) = [path for path in (trial / "result.json", trial / "failure.json") if path.exists()]
    return dict(json.loads(end.read_text()))


def test_failed_pruned_and_killed_trials_do_not_affect_other_trials(project: Project) -> None:
    folder = start(
        project,
        trials=9,
        space="job.py:choose",
        sampler="random",
        pruner={"name": "median", "startup_trials": 1},
        max_retries=1,
        resources={"nodes": 2},
    )
    done = wait(project)
    assert done.returncode == 0, done.stdout
    plain, hopeless, nan, leaks, fails_on_0, fails_on_1, killed_once, killed, last = (
        folder / "trials" / str(number) for number in range(9)
    )
    assert " ".join(states(folder)) == "COMPLETE PRUNED PRUNED COMPLETE FAIL FAIL COMPLETE FAIL COMPLETE"
    assert [ends(folder, number)["state"] for number in range(9)] == states(folder)

    # every rank has got what the study has
    for number, trial in enumerate(trials_of(folder)):
        for rank in range(2):
            begun = seen(folder / "trials" / str(number), rank)[0]
            assert float.fromhex(begun["x"]) == trial.params["x"]
            given = {name: begun["config"][name] for name in ("whole", "text", "sizes")}
            assert given == {"whole": 2**53 + 1, "text": 'it\'s "ü"', "sizes": [3, 2**40]}
    assert [ends(folder, 0)["value"], trials_of(folder)[8].value] == [
        pytest.approx(trials_of(folder)[number].params["x"]) for number in (0, 8)
    ]

    # a trial that is given up ends on all ranks at the same step, whatever its code catches
    for trial in (hopeless, nan):
        assert [epochs(trial, rank) for rank in range(2)] == [{1: [1]}] * 2
        assert not any("swallowed" in line for line in seen(trial))
    assert ends(folder, 2)["reason"] == "score is nan"
    assert ends(folder, 4)["message"] == "ValueError: broken on 0"
    assert ends(folder, 5)["message"] == "ValueError: broken on 1"

    # one that loses a rank goes on from its checkpoint, but not for ever
    assert epochs(killed_once) == {1: [1, 2], 2: [2, 3]}
    assert [line["restored"] for line in seen(killed_once, rank=1) if "restored" in line] == [0, 1]
    assert epochs(killed) == {1: [1, 2], 2: [2]}
    assert ends(folder, 7)["message"] == "its attempt ended: rank 1 was killed by SIGKILL (2 of 2 times)"

    told = project.call("why", "study").stdout.splitlines()
    assert told[0] == "COMPLETED  study: 9 of 9 trials; 3 trials failed"
    assert told[1].startswith("failed    trial 7: its attempt ended: rank 1 was killed by SIGKILL  (")

    # all of that in the same processes, but where ranks may be out of step or hold too much
    for rank in range(2):
        assert len({pids(trial, rank)[0] for trial in (plain, hopeless, nan, leaks)}) == 1
    assert pids(leaks) != pids(fails_on_0) != pids(fails_on_1) != pids(killed_once)[:1]
    assert pids(killed)[-1:] != pids(last)
    assert "trials have left 120 open files: restarting the ranks" in (folder / "tasks/0/logs/1-0.log").read_text()
    facts = facts_of(project)
    assert (facts["state"], facts["reason"]) == ("COMPLETED", "9 of 9 trials")


@pytest.mark.long
def test_trial_of_a_killed_worker_continues_and_the_sweep_can_grow(project: Project) -> None:
    folder = start(
        project,
        trials=5,
        workers=2,
        sampler={"name": "random", "seed": 1},
        space={"x": {"float": [0.0, 1.0]}},
        fixed={"does": "waits", "place": str(project.folder)},
    )
    written = (folder / "sweep.yaml").read_text()
    wait_until(lambda: [epochs(trial) for trial in (folder / "trials").iterdir()].count({1: [1, 2]}) == 2)
    facts = facts_of(project)
    assert (facts["kind"], facts["state"]) == ("sweep", "RUNNING")
    assert facts["reason"] == "0 of 5 trials, 2 of 2 workers running"
    assert (facts["trials"]["RUNNING"], facts["trials"]["WAITING"], facts["best"]) == (2, 3, None)
    assert [worker["run"] for worker in facts["workers"]] == ["study/0", "study/1"]

    # what makes it another study is refused, with the difference
    for words, said in [
        (["metric=loss", "direction=minimize"], "metric was score (maximize) and is loss (minimize)"),
        (["space.x.float=[0, 2]"], "space: x was float 0 to 1 and is float 0 to 2"),
        (["fixed.epochs=4"], "fixed was "),
        (["job=other.py"], "job was job.py and is other.py"),
    ]:
        done = project.call("sweep", "sweep.yaml", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr
    assert (folder / "sweep.yaml").read_text() == written

    more = project.call("sweep", "sweep.yaml", "trials=6", "--no-follow")
    assert more.returncode == 0, more.stderr
    assert "2 workers running\ntrials    6 (was 5)\n" in more.stdout
    follow, watch = project.start("logs", "study", "--follow"), project.start("status", "study", "--watch")
    killed, other = (json.loads((folder / "tasks" / number / "state.json").read_text()) for number in ("0", "1"))
    os.kill(killed["supervisor"][0], signal.SIGKILL)
    wait_until(lambda: processes_of(folder / "tasks" / "0") == [])
    # one that nobody trains waits
    counts = facts_of(project)["trials"]
    assert (counts["RUNNING"], counts["WAITING"]) == (1, 5)
    (project.folder / "gate").touch()
    assert wait(project).returncode == 0
    facts = facts_of(project)
    assert (facts["state"], facts["trials"]["COMPLETE"]) == ("COMPLETED", 6)
    assert [worker["state"] for worker in facts["workers"]] == ["FAILED", "COMPLETED"]
    assert "its supervisor process" in facts["workers"][0]["reason"]
    lost, kept = folder / "trials" / str(killed["trial"]), folder / "trials" / str(other["trial"])
    assert (epochs(lost), epochs(kept)) == ({1: [1, 2], 2: [2, 3]}, {1: [1, 2, 3]})
    out, _ = follow.communicate(timeout=60)
    assert follow.returncode == 0
    assert [f"-- trial   {number}  complete" in out for number in range(6)] == [True] * 6
    assert "study     study  COMPLETED" in out
    assert "-- study/0  FAILED: " in out
    shown, _ = watch.communicate(timeout=60)
    assert (watch.returncode, "trials    6: 6 complete" in shown) == (0, True)

    # one worker is left as it was, which the next trials start again, and a new one
    again = project.call("sweep", "sweep.yaml", "trials=9", "workers=3", "--executor", "local")
    assert again.returncode == 0, again.stderr
    assert "starts    3 workers\n" in again.stdout
    assert states(folder) == ["COMPLETE"] * 9
    assert [ends(folder, number)["state"] for number in range(9)] == ["COMPLETE"] * 9
    assert len({trial.params["x"] for trial in trials_of(folder)}) == 9
    assert [worker["attempts"] for worker in facts_of(project)["workers"]] == [2, 2, 1]
    assert (
        "starts    no worker: all trials are done\n"
        in project.call("sweep", "sweep.yaml", "trials=9", "workers=3").stdout
    )


def test_trial_continues_after_worker_time_limit_and_after_cancel(project: Project) -> None:
    folder = start(
        project,
        trials=2,
        space={"x": {"float": [0.0, 1.0]}},
        fixed={"does": "goes on until told", "epochs": 100000, "pause": 0.01, "place": str(project.folder)},
    )
    trial = folder / "trials" / "0"
    wait_until(lambda: len(epochs(trial).get(1, [])) > 3)
    # as the supervisor sends it some time before the limit
    os.kill(pids(trial)[0], signal.SIGUSR2)
    wait_until(lambda: len(epochs(trial).get(2, [])) > 3)
    assert "asked to save and end" in project.call("cancel", "study").stdout
    assert wait(project).returncode == 1
    assert (facts_of(project)["state"], states(folder)) == ("CANCELLED", ["WAITING"])
    first, second, *_ = project.call("status", "study").stdout.splitlines()
    assert first.endswith("2 unfinished: cancelled")
    assert second.startswith("continue  ")
    assert second.endswith(" resume study")
    (project.folder / "gate").touch()
    done = project.call("resume", "study")
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(folder) == ["COMPLETE", "COMPLETE"]
    found = epochs(trial)
    assert list(found) == [1, 2, 3]
    # no epoch twice, and none left out
    assert list(itertools.chain(*found.values())) == list(range(1, found[3][-1] + 1))
    assert facts_of(project)["attempts"] == 3


def test_sweep_takes_new_code_and_incompatible_code_changes_nothing(project: Project) -> None:
    folder = start(project, trials=2, space={"x": {"float": [0.0, 1.0]}}, fixed={"epochs": 1})
    assert wait(project).returncode == 0
    before = facts_of(project)
    more = ["sweep", "sweep.yaml", "trials=3", "--executor", "local"]
    project.write("job.py", JOB.replace("config.x", "config.y").replace("x: float", "y: float"))
    done = project.call(*more, "--code", "new")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unknown key 'x'" in done.stderr
    assert facts_of(project) == before
    project.write("job.py", f"{JOB}\n    # mended\n")
    done = project.call(*more, "--code", "new")
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(folder) == ["COMPLETE"] * 3
    assert (folder / "code" / "job.py").read_text().endswith("# mended\n")
    assert (folder / "code-1" / "job.py").exists()


def test_killing_all_supervising_processes_ends_the_worker(project: Project) -> None:
    folder = start(project, trials=2, fixed={"does": "waits", "place": str(project.folder)}, **WIDE)
    worker = folder / "tasks" / "0"
    # the batch step, and the rank that has only just begun
    wait_until(lambda: len(processes_of(worker)) > 1)
    supervisor = json.loads((worker / "state.json").read_text())["supervisor"][0]
    for pid in [supervisor, *children(supervisor)]:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: processes_of(worker) == [])
    assert facts_of(project)["state"] == "FAILED"


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_sweep_stops_if_all_first_trials_fail_with_the_same_error(project: Project) -> None:
    write_sweep(project, trials=50, workers=2, space={"x": {"float": [0.0, 1.0]}}, fixed={"does": "fails"})
    done = project.call("sweep", "sweep.yaml", "--executor", "local")
    assert done.returncode == 1
    assert "failed with the same error: ValueError: broken on 0" in done.stdout
    assert wait(project).returncode == 1
    facts = facts_of(project)
    assert facts["state"] == "FAILED"
    assert facts["reason"].endswith("failed with the same error: ValueError: broken on 0")
    assert facts["trials"]["RUNNING"] == 0
    assert 5 <= facts["trials"]["FAIL"] <= 6
    done = project.call("best", "study")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no trial is complete yet" in done.stderr


VALUES_JOB = """
    import os, signal
    from dataclasses import dataclass

    import torch


    @dataclass
    class Config:
        x: float = 0.5
        does: str = ""


    def train(run, config: Config):
        model = run.wrap(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        state = run.restore(model=model, optimizer=optimizer)
        score = 0.0
        for epoch in state.epochs(6):
            run.backward(model(torch.ones(1, 1)).sum())
            run.update(optimizer)
            score = config.x + epoch
            if config.does.startswith("stops") and epoch == 6:
                os.kill(os.getpid(), signal.SIGUSR2)
            if config.does == "no metric" or (config.does == "every third" and epoch % 3):
                run.report(epoch, loss=1.0)
            else:
                run.report(epoch, score=score)
        if config.does == "stops, number":
            return score
        return {"loss": 1.0} if config.does == "no metric" else {"score": score, "train": 0.5}


    CASES = ["", "stops", "stops, number", "no metric", "every third"]


    def choose(trial):
        return {"x": trial.suggest_float("x", 0.1, 1.0), "does": CASES[trial.number]}
"""


def test_each_trial_records_its_own_final_value_or_failure(project: Project) -> None:
    write_sweep(project, trials=5, space="job.py:choose", sampler="random", pruner={"name": "median"})
    project.write("job.py", VALUES_JOB)
    done = project.call("sweep", "sweep.yaml", "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = project.runs / "study"
    trials = trials_of(folder)
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    # also those that were stopped after their last epoch, so that nothing was left to train in the next attempt
    assert [len(list((folder / "trials" / str(number) / "logs").iterdir())) for number in (0, 1, 2)] == [1, 2, 2]
    reached = [None if trial.state.name == "FAIL" else trial.params["x"] + 6 for trial in trials]
    assert [trial.value for trial in trials] == reached
    assert ends(folder, 1)["result"] == {"score": reached[1], "train": 0.5}
    assert ends(folder, 3)["message"] == ("the job never reported or returned the metric 'score'; it reports loss")
    assert list(trials[4].intermediate_values) == [3, 6]


def test_metric_that_is_never_reported_stops_the_sweep_after_five_trials(project: Project) -> None:
    write_sweep(project, trials=50, space={"x": {"float": [0.0, 1.0]}}, fixed={"metric": "scores"})
    done = project.call("sweep", "sweep.yaml", "--executor", "local")
    assert done.returncode == 1
    facts = facts_of(project)
    assert (facts["state"], facts["trials"]["FAIL"], facts["trials"]["WAITING"]) == ("FAILED", 5, 45)
    said = "the job never reported or returned the metric 'score' (did you mean 'scores'?)"
    assert facts["reason"] == f"5 of 50 trials: the first 5 trials all failed with the same error: {said}"
    assert said in done.stdout


SEVERAL = """
def train(run, config: dict):
    for epoch in range(1, 4):
        run.report(epoch, score=config["x"] * epoch, gib=10 * config["x"])
    return {"score": config["x"] * 3, "size": 100 * config["x"]}
"""


def test_sweep_with_several_metrics_lists_the_front_of_what_its_constraints_allow(project: Project) -> None:
    project.write("several.py", SEVERAL)
    values = {
        "job": "several.py",
        "metric": None,
        "metrics": {"score": "maximize", "size": "minimize"},
        "constraints": {"gib": "<= 5"},
        "sampler": "grid",
        "space": {"x": {"choice": [0.2, 0.4, 0.6]}},
        "workers": 1,
        "trials": 3,
    }
    folder = start(project, **values)
    assert wait(project).returncode == 0
    found = project.json("best", "study")
    assert [(trial["number"], trial["values"]) for trial in found["front"]] == [
        (1, {"score": pytest.approx(1.2), "size": 40}), (0, {"score": pytest.approx(0.6), "size": 20}),
    ]  # fmt: skip
    assert found["metrics"] == values["metrics"]
    told = project.call("status", "study").stdout
    assert "front     score 1.2  size 40  (trial 1)  x=0.4\n          score 0.6  size 20  (trial 0)  x=0.2\n" in told
    assert [each["number"] for each in facts_of(project)["front"]] == [1, 0]
    refused = project.call("best", "study", "--yaml")
    assert (refused.returncode, refused.stderr) == (
        2,
        "mgpu-slurm: --yaml: study study has 2 best trials: add --trial N\n",
    )
    assert yaml.safe_load(project.call("best", "study", "--trial", "0", "--yaml").stdout) == {"x": 0.2}
    assert "infeasible: gib 6, not <= 5" in project.call("best", "study", "--trial", "2").stdout
    assert [trial.constraints for trial in trials_of(folder)] == [{"gib": -3.0}, {"gib": -1.0}, {"gib": 1.0}]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Where a sweep has ended."""
    made = make_project(tmp_path_factory.mktemp("ended"))
    start(made, **GRID, trials=2, fixed={"epochs": 2})
    # more of a grid are the points that are left
    done = made.call("sweep", "sweep.yaml", "trials=3", "--no-follow")
    assert "trials    3 (was 2)\n" in done.stdout, done.stderr
    assert wait(made).returncode == 0
    return made


class TestEndedSweep:
    @pytest.fixture
    def project(self, ended: Project) -> Project:
        return ended

    def test_best_command_reproduces_the_best_value(self, project: Project) -> None:
        best = project.json("best", "study")
        assert (best["number"], best["value"], best["params"]) == (2, 0.75, {"x": 0.75})
        told = project.call("best", "study").stdout
        assert "best      score 0.75, trial 2 of study study\n" in told
        config = project.call("best", "study", "--yaml").stdout
        assert (yaml.safe_load(config)["x"], yaml.safe_load(config)["epochs"]) == (0.75, 2)
        assert yaml.safe_load(config) == best["config"]
        # as a person pastes it
        command = f"{best['command']} --executor local"
        environ = os.environ | project.environ
        done = subprocess.run(["sh", "-c", command], cwd=project.folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "result    score 0.75  " in done.stdout
        assert shlex.split(best["command"])[-2:] == ["--config", "runs/study/trials/2/config.yaml"]

    def test_best_command_works_from_another_folder(self, project: Project, tmp_path: Path) -> None:
        environ = os.environ | project.environ | {"MGPU_RUNS": str(project.runs)}

        def call(command: str) -> str:
            done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        command = json.loads(call(f"{sys.executable} -m mgpu_slurm best study --json"))["command"]
        assert command.startswith(f"cd {project.folder} && ")
        assert "target    job.py:train" in call(f"{command} --executor local --dry-run")

    def test_value_of_the_job_is_no_key_of_a_sweep(self, project: Project) -> None:
        for words, place in (
            (
                ["model.width=3", "other=1"],
                "model.width: a sweep file has no such key: a value of the job that is the same",
            ),
            (["epochs=3"], "in all trials is fixed.epochs=VALUE\n"),
            (["hours=2"], "hours: a sweep file has no such key: a limit of the sweep is budget.hours=VALUE\n"),
            (["nodes=2"], "a resource of each worker is resources.nodes=VALUE\n"),
        ):
            done = project.call("sweep", "sweep.yaml", *words)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert place in done.stderr

    def test_table_of_trials_replaces_tables_only(self, project: Project) -> None:
        before = (project.folder / "job.py").read_text()
        done = project.call("trials", "study", "-o", "job.py")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "-o job.py: the file exists and is no table of trials" in done.stderr
        assert (project.folder / "job.py").read_text() == before
        for name in ("table.csv", "table.csv", "table.txt", "table.txt"):
            assert project.call("trials", "study", "-o", name).returncode == 0

    def test_log_and_weights_of_a_trial(self, project: Project, tmp_path: Path) -> None:
        shown = project.call("logs", "study/trials/1")
        assert shown.stdout == (project.runs / "study" / "trials" / "1" / "logs" / "1-0.log").read_text()
        assert project.call("logs", "study/trials/1", "--grep", "no such line").stderr == (
            "mgpu-slurm: rank 0 of trial study/trials/1 has printed no line that matches 'no such line'\n"
        )
        refused = project.call("logs", "study/trials/1", "--follow")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "follow the sweep with `logs study --follow`" in refused.stderr
        weights = tmp_path / "model.safetensors"
        assert project.json("export", "study/trials/1", "-o", str(weights))["step"] > 0
        refused = project.call("why", "study/trials/1")
        assert "study/trials/1 is a trial, and only runs can be named here: see `" in refused.stderr
        assert project.call("export", "study", "-o", str(tmp_path / "all.csv")).returncode == 0
        assert (tmp_path / "all.csv").read_text().startswith("run,")
        refused = project.call("export", "study/trials/1", "--to", "onnx", "-o", str(tmp_path / "model.onnx"))
        assert "study/trials/1: --to onnx takes no trial: train its config as a run first" in refused.stderr

    def test_trials_are_listed_as_text_json_and_csv(self, project: Project) -> None:
        listed = project.json("trials", "study")
        assert [row["number"] for row in listed] == list(range(len(trials_of(project.runs / "study"))))
        assert [row["value"] for row in listed] == [trial.value for trial in trials_of(project.runs / "study")]
        assert {row["state"] for row in listed} == {"COMPLETE"}
        names = ["number", "state", "value", "params", "rungs", "seconds", "worker", "reason", "infeasible", "values"]
        assert list(listed[0]) == names
        (top,) = project.json("best", "study", "--top", "1")
        assert top["value"] == max(row["value"] for row in listed)
        written = project.call("trials", "study", "-o", "trials.csv")
        assert written.stdout == f"written   trials.csv: {len(listed)} trials\n"
        header, *_ = (project.folder / "trials.csv").read_text().splitlines()
        assert header == "number,state,value,seconds,worker,reason,infeasible,params.x"
        assert project.call("trials", "study").stdout.startswith("TRIAL  STATE     score")

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("trials", "study", "--csv", "--json"), "--csv and --json: choose one of them"),
            (("best", "study", "--top", "2", "--yaml"), "--top: --yaml is about one trial: remove one of them"),
            (("best", "study", "--trial", "9"), "study study: there is no trial 9: the last one is 2"),
            (("importance", "study"), "more are needed for the importance of parameters"),
            (("trials", "nothing"), "there is no run 'nothing'"),
        ],
    )
    def test_what_cannot_be_listed_is_said_in_one_line(
        self, project: Project, words: tuple[str, ...], said: str
    ) -> None:
        done = project.call(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr

    def test_optuna_reads_the_same_trials_from_the_journal(self, project: Project) -> None:
        folder = project.runs / "study"
        values = {trial.number: (trial.params["x"], trial.value) for trial in trials_of(folder)}
        assert {x for x, _ in values.values()} == {0.25, 0.1 + 0.2, 0.75}
        assert values == {
            number: (seen(folder / "trials" / str(number))[0]["config"]["x"], ends(folder, number)["value"])
            for number in range(3)
        }
        assert [trial.intermediate_values for trial in trials_of(folder)] == [{1: 1.0, 2: 1.0}] * 3

    def test_status_shows_the_sweep_on_one_line_and_its_workers_as_runs(self, project: Project) -> None:
        (line,) = [line for line in project.call("status").stdout.splitlines() if line.startswith("study")]
        assert "COMPLETED" in line
        facts = facts_of(project)
        assert (facts["run"], facts["kind"], facts["trials"]["COMPLETE"], facts["best"]["value"]) == (
            *("study", "sweep", 3),
            0.75,
        )
        # a worker is a run too
        assert project.json("status", "study/0")[0]["state"] == "COMPLETED"
        assert "-- trial 1: x=0.3\n" in project.call("logs", "study/0").stdout

    def test_watch_fits_the_size_of_the_terminal(self, project: Project) -> None:
        screen, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 5, 60, 0, 0))
        words = [sys.executable, "-m", "mgpu_slurm", "status", "study", "--watch"]
        # which speak of another terminal
        environ = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
        done = subprocess.run(words, cwd=project.folder, env=environ | project.environ, stdout=terminal)
        os.close(terminal)
        shown = os.read(screen, 4096).decode()
        os.close(screen)
        told = re.sub(r"\x1b\[.", "", shown).splitlines()
        assert done.returncode == 0
        assert [line[:9] for line in told] == ["study    ", "trials   ", "best     ", "... 4 mor"]
        assert all(len(line) <= 60 for line in told)

    def test_dry_run_changes_nothing(self, project: Project) -> None:
        before = sorted(path for path in project.runs.rglob("*"))
        write_sweep(project, **GRID, fixed={"epochs": 2}, workers=2)
        for study in ("study", "another"):
            done = project.call("sweep", "sweep.yaml", f"study={study}", "--dry-run", "--executor", "local")
            assert done.returncode == 0, done.stderr
            assert "nothing was started (--dry-run)" in done.stdout
        assert sorted(path for path in project.runs.rglob("*")) == before

    @pytest.mark.parametrize("words", [["status"], ["status", "study"], ["best", "study"], ["wait", "study"]])
    def test_read_only_commands_import_no_heavy_packages(self, project: Project, words: list[str]) -> None:
        code = (
            "import sys; from mgpu_slurm.cli.main import main\n"
            f"try: main({words})\nexcept SystemExit as ended: assert not ended.code\n"
            "print([name for name in ('torch', 'optuna', 'numpy', 'tensorboard') if name in sys.modules])"
        )
        environ = os.environ | project.environ
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=project.folder, env=environ, capture_output=True, text=True)
        assert done.stdout.endswith("[]\n"), done.stdout + done.stderr

    def test_repair_reports_an_intact_journal(self, project: Project) -> None:
        (journal,) = project.runs.rglob("study.journal")
        before = {path: path.stat().st_mtime_ns for path in journal.parent.iterdir()}
        done = project.call("repair", "study")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("study.journal is not damaged: nothing was written\n")
        assert {path: path.stat().st_mtime_ns for path in journal.parent.iterdir()} == before

    def test_run_cannot_be_used_as_a_study(self, project: Project) -> None:
        run, _ = project.run("--", "true")
        for words in (["best", run.name], ["sweep", "sweep.yaml", f"study={run.name}"]):
            done = project.call(*words)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert "not a sweep" in done.stderr


WRONG_SPACES = """
    print("imported")

    def fails(trial):
        return {"x": 1 / 0}

    def wrong(trial):
        if trial.number == 0:
            return {"x": trial.suggest_float("x", 0, 1)}
        return {"y": 1}
"""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"space": {"lr": {"float": [0.1, 1.0]}}}, "unknown key 'lr' (known: x, whole, "),
        ({"space": {"epoch": {"int": [1, 3]}}}, "(did you mean 'epochs'?)"),
        ({"space": {"epochs": {"float": [1.0, 8.0]}}}, "epochs=3.673762: expected a valid integer"),
        ({"fixed": {"x": "big"}, "space": {"whole": {"int": [0, 1]}}}, "x"),
        ({"space": {"x": {"float": [1.0, 0.1]}}}, "space x: float [1, 0.1]: the lower end comes first: swap them"),
        (
            {"pruner": {"name": "hyperband", "max_resource": 27}},
            "max_resource 27: a trial ends at 3 (the job's epochs)",
        ),
        (
            {
                "job": {"command": "python job.py {x} {epochs}"},
                "fixed": {"epochs": 5},
                "pruner": {"name": "hyperband", "max_resource": 27},
            },
            "max_resource 27: a trial ends at 5 (the job's epochs)",
        ),
        (
            {"pruner": {"name": "pbt", "interval": 3, "max_resource": 3, "perturb": ["x"]}, "trials": None},
            "interval 3: members would never be compared: expected less than max_resource 3",
        ),
        ({"space": "space.py:missing"}, "space.py has no 'missing' (known: fails, wrong)"),
        ({"space": "space.py:fails"}, "space space.py:fails: space.py:5: ZeroDivisionError: "),
        (
            {"space": "space.py:wrong"},
            "space space.py:wrong: config of job.py:train: unknown key 'y' (known: x, whole, ",
        ),
        (
            {"space": "space.py:wrong", "job": {"command": "python job.py {x}"}},
            "space space.py:wrong: y: the command does not take it: write {y} where it belongs",
        ),
        ({"sampler": {"name": "tpe", "options": {"sed": 1}}}, "sampler tpe: "),
        ({"job": "jobb.py"}, "jobb.py"),
        ({"trial": 3}, "(did you mean 'trials'?)"),
    ],
    ids=[
        "unknown parameter",
        "misspelled parameter",
        "wrong type",
        "wrong fixed value",
        "reversed range",
        "max_resource over the epochs",
        "max_resource over fixed epochs",
        "population that is never compared",
        "missing function",
        "failing function",
        "function with an unknown parameter",
        "function parameter not in the command",
        "unknown sampler option",
        "missing job file",
        "unknown key",
    ],
)
def test_invalid_sweep_file_is_refused_and_leaves_no_run(project: Project, values: dict[str, Any], said: str) -> None:
    project.write("space.py", WRONG_SPACES)
    write_sweep(project, **{"trials": 3, "space": {"x": {"float": [0.0, 1.0]}}} | values)
    done = project.call("sweep", "sweep.yaml", "--executor", "local")
    told = done.stderr.removeprefix("imported\n")
    assert (done.returncode, told.count("\n")) == (2, 1), done.stdout + done.stderr
    assert said in told
    assert not project.runs.exists() or list(project.runs.iterdir()) == []
