"""A disk that fills up costs what could not be written, and no training."""

from __future__ import annotations

import json
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.test_sweeps import trials_of
from tests.support import Project, log

BALLAST = '''
    import threading
    from pathlib import Path


    class Ballast(threading.Thread):
        """Takes all room that there is, also what others make."""

        def __init__(self, path: Path):
            super().__init__(daemon=True)
            self.is_full, self._enough = threading.Event(), threading.Event()
            self._path = path

        def run(self):
            with open(self._path, "ab", buffering=0) as file:
                while not self._enough.is_set():
                    for size in (1 << 20, 1):
                        try:
                            while True:
                                file.write(bytes(size))
                        except OSError:
                            pass
                    self.is_full.set()
            self._path.unlink()

        def end(self):
            self._enough.set()
            self.join()
'''

JOB = '''
    """Keeps the disk full from its second epoch to the last thing that it does in its fourth."""
    import time
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from ballast import Ballast


    def train(run, config: dict):
        model = run.wrap(nn.Linear(400, 400))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.loader(TensorDataset(torch.ones(8, 400)), batch_size=4)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        ballast, seen = Ballast(run.folder / "ballast"), []
        for epoch in state.epochs(4):
            if run.is_main and epoch == 2:
                # that of the first epoch is on its way yet
                while not Path(run.folder, "checkpoints", "step-000000002").exists():
                    time.sleep(0.01)
                ballast.start()
                ballast.is_full.wait()
            for (batch,) in data:
                run.backward(model(batch).mean())
                run.update(optimizer)
                print("a line of the job" * 300, flush=True)
            # a report that does not fit into what is left of the last one's block
            run.report(epoch, loss=1.0, **{"long" * 1100: 1.0})
            seen.append(sorted(path.name for path in Path(run.folder, "checkpoints").glob("step-*")))
            if run.is_main and epoch == 4:
                ballast.end()
        return {"kept": float(all(["step-000000002"] == names for names in seen[2:]))}
'''

STEPS = """
    import time


    def train(run, config: dict):
        for step in range(1, 1000):
            run.report(step, loss=1.0)
            time.sleep(0.05)
"""

CANCELLED_WHILE_FULL = """
mkdir runs && mount -t tmpfs -o size=8m tmpfs runs || exit 99
"$@" submit train --executor local --name full --json || exit 1
until grep -q '"progress": [1-9]' runs/full-*/state.json; do sleep 0.1; done
# also of what others give back
touch full && while [ -e full ]; do cat /dev/zero 2>/dev/null >> runs/ballast; sleep 0.01; done &
sleep 1
"$@" cancel full
# longer than one waits for a disk without a word, for which there is no room either
sleep 12
rm full && wait && rm runs/ballast
"$@" wait full --timeout 60
cp -r runs kept
"""

IN_A_SMALL_FILE_SYSTEM = """
mkdir runs && mount -t tmpfs -o size=8m tmpfs runs || exit 99
"$@"
code=$?
cp -r runs kept
exit $code
"""


def call_on_a_small_disk(project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    """The program with a runs folder on a file system of 8 MB; what is in it at the end lies in `kept`."""
    return in_a_namespace(project, IN_A_SMALL_FILE_SYSTEM, *words)


def in_a_namespace(project: Project, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    done = project.call(*words, prefix=["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"])
    if done.returncode == 99:
        pytest.skip("no file system can be mounted here")
    return done


def test_training_continues_while_the_disk_is_full(project: Project) -> None:
    project.write("ballast.py", BALLAST)
    project.write("train.py", JOB)
    done = call_on_a_small_disk(project, "submit", "train", "--executor", "local", "--nodes", "2", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (project.folder / "kept").glob("train-*")
    result = json.loads((folder / "result.json").read_text())["result"]
    assert result == {"kept": 1.0}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000000002", "step-000000008"]
    # what was reported meanwhile was only late
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [2, 4, 6, 8]
    shown = EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("loss")] == [2, 4, 6, 8]
    state = json.loads((folder / "state.json").read_text())
    assert (state["progress"], state["step"], state["metrics"]["loss"]) == (4, 8, 1.0)
    assert "WARNING: rank 0 could not write the checkpoint of step 4: [Errno 28] No space left" in log(folder, 0)


def test_cancel_while_the_disk_is_full_is_recorded(project: Project) -> None:
    project.write("train.py", STEPS)
    done = in_a_namespace(project, CANCELLED_WHILE_FULL)
    (folder,) = (project.folder / "kept").glob("full-*")
    state = json.loads((folder / "state.json").read_text())
    assert state["state"] == "CANCELLED", done.stdout + done.stderr
    assert (
        "cannot be written ([Errno 28] No space left on device); trying again until"
        in (folder / "logs" / "launch-local.log").read_text()
    )


PAUSING = '''
    """Fills the disk when the first trial is to pause, for some seconds."""
    import threading
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from ballast import Ballast


    def train(run, config: dict):
        run.seed(1)
        model = run.wrap(nn.Linear(40, 40))
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        data = run.loader(TensorDataset(torch.ones(8, 40)), batch_size=4)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        mark = Path(run.folder).parent / "was-full"
        for epoch in state.epochs(9):
            for (batch,) in data:
                run.backward(model(batch).square().mean())
                run.update(optimizer)
            run.report(epoch, loss=float(config["lr"]))
            # the trial is to pause now, with a checkpoint that is not written yet
            if epoch == 1 and not mark.exists():
                mark.touch()
                ballast = Ballast(mark.with_name("ballast"))
                ballast.start()
                ballast.is_full.wait()
                threading.Timer(4, ballast.end).start()
        return {"loss": float(config["lr"])}
'''

SWEEP = """
study: study
job: train
metric: loss
direction: minimize
sampler: {name: random, seed: 1}
pruner: {name: asha, min_resource: 1, max_resource: 9, reduction_factor: 3}
trials: 9
workers: 1
space: {lr: {float: [0.001, 0.1], log: true}}
"""


@pytest.mark.long
def test_trial_that_pauses_while_the_disk_is_full_is_not_lost(project: Project) -> None:
    project.write("ballast.py", BALLAST)
    project.write("train.py", PAUSING)
    project.write("sweep.yaml", SWEEP)
    done = call_on_a_small_disk(project, "sweep", "sweep.yaml", "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = project.folder / "kept" / "study"
    facts = json.loads((folder / "summary.json").read_text())
    counts = {state: count for state, count in facts["trials"].items() if count}
    assert sum(counts.values()) == 9
    assert counts.keys() <= {"COMPLETE", "PRUNED", "PAUSED"}, counts
    assert counts["COMPLETE"] >= 1
    # the first trial did not pause at a place that it could not save
    first = (folder / "trials" / "0" / "logs" / "1-0.log").read_text()
    assert "could not write the checkpoint of step 2: [Errno 28] No space left on device" in first
    assert "paused at step 2" not in first
    # each trial that waits has what it needs to continue
    paused = [trial for trial in trials_of(folder) if trial.state.name == "WAITING"]
    assert len(paused) == counts.get("PAUSED", 0)
    for trial in paused:
        assert list((folder / "trials" / str(trial.number) / "checkpoints").glob("step-*"))
