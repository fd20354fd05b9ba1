"""Scripts written for torchrun run unchanged as commands, and `attach()` gives them the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import wrappers
from tests.support import Project, log, make_project

PLAIN = """
    import argparse
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    lr = parser.parse_args().lr

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    start = model.module.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    seen = 0.0
    for _ in range(16):
        batch = torch.randn(4, 4)
        seen += batch.sum().item()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    facts = {"world": dist.get_world_size(), "steps": 16, "seen": seen, "start": start, "lr": lr}
    torch.save(facts | {"weight": model.module.weight.detach()}, f"{os.environ['MGPU_RUN_FOLDER']}/trained-{rank}.pt")
    dist.destroy_process_group()
"""

LIGHTNING = """
    import os

    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset


    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.seen = 0.0

        def training_step(self, batch, index):
            self.seen += batch[0].sum().item()
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)


    lightning.seed_everything(1)
    data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    model = Model()
    start = model.layer.weight.detach().clone()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(model, data)
    facts = {"world": trainer.world_size, "steps": trainer.global_step, "seen": model.seen, "start": start}
    place = f"{os.environ['MGPU_RUN_FOLDER']}/trained-{trainer.global_rank}.pt"
    torch.save(facts | {"weight": model.layer.weight.detach()}, place)
"""

ACCELERATE = """
    import os

    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    model = torch.nn.Linear(4, 1)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    seen, steps = 0.0, 0
    for epoch in range(2):
        for (batch,) in data:
            seen += batch.sum().item()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    weight = accelerator.unwrap_model(model).weight.detach()
    facts = {"world": accelerator.num_processes, "steps": steps, "seen": seen, "start": start}
    torch.save(facts | {"weight": weight}, f"{os.environ['MGPU_RUN_FOLDER']}/trained-{accelerator.process_index}.pt")
    accelerator.end_training()
"""

ATTACHED = """
    import os
    import signal

    import torch
    from torch.utils.data import TensorDataset

    from mgpu_slurm import attach

    run = attach()
    run.seed(1)
    model = run.wrap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(points), batch_size=8, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    for epoch in state.epochs(2):
        for (batch,) in data:
            run.backward(model(batch).square().mean())
            run.update(optimizer)
            if os.environ.get("STOP_AT") == str(run.step) and run.attempt == 1 and run.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
        run.report(epoch, loss=epoch)
    assert attach() is run
    # what the ranks write may come out as one piece
    print(f"rank {run.rank} of {run.world_size} is at step {run.step} of attempt {run.attempt}\\n", end="", flush=True)
    inner = model.module if hasattr(model, "module") else model
    torch.save(inner.state_dict(), run.folder / f"weights-{run.rank}.pt")
"""

SHOWS = """
    import json, os, sys
    from pathlib import Path

    Path(os.environ["MGPU_RUN_FOLDER"], "seen.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
"""

# Beside a CPU-only torch, PyPI's torchvision fails on import, and Lightning imports it where it is installed. Where the
# plain import works, this changes nothing.
REPAIR = """
    import os

    if "LOCAL_RANK" in os.environ:
        from mgpu_slurm.rank.torchvision_adapter import import_torchvision

        import_torchvision()
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Project:
    base = tmp_path_factory.mktemp("commands")
    project = make_project(base)
    project.write("train.py", PLAIN)
    project.write("lightning_script.py", LIGHTNING)
    project.write("accelerate_script.py", ACCELERATE)
    project.write("attached.py", ATTACHED)
    project.write("shows.py", SHOWS)
    return project


# -- three ways of distributed training, none of which knows of this project


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        # on SLURM: tests/on_slurm/test_runs.py
        pytest.param(["python", "train.py", "--lr", "0.1"], 16, marks=pytest.mark.long),
        (["python", "lightning_script.py"], 16),
        pytest.param(["python", "accelerate_script.py"], 16, marks=pytest.mark.long),
    ],
    ids=["plain", "lightning", "accelerate"],
)
def test_unmodified_script_trains_on_two_nodes(
    scripts: Project, tmp_path: Path, command: list[str], steps: int
) -> None:
    environ = scripts.environ
    if "lightning" in command[1]:
        Project(tmp_path).write("sitecustomize.py", REPAIR)
        environ = environ | {"PYTHONPATH": str(tmp_path)}
    folder, facts = Project(scripts.folder, environ).run("--nodes", "2", "--", *command)
    assert facts["state"] == "COMPLETED", log(folder, 0) + log(folder, 1)
    first, second = (torch.load(folder / f"trained-{rank}.pt") for rank in (0, 1))
    assert (first["world"], second["world"]) == (2, 2)
    assert (first["steps"], second["steps"]) == (steps, steps)
    # other samples on each rank, and yet the same weights: gradients were exchanged
    assert first["seen"] != second["seen"]
    assert not torch.equal(first["weight"], first["start"])
    assert torch.equal(first["weight"], second["weight"])
    assert first.get("lr", 0.1) == 0.1


# -- attach


def weights(folder: Path, rank: int = 0) -> list[Any]:
    return [tensor.tolist() for tensor in torch.load(folder / f"weights-{rank}.pt").values()]


@pytest.fixture(scope="module")
def undisturbed(scripts: Project) -> Path:
    folder, facts = scripts.run("--nodes", "2", "--", "python", "attached.py")
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 1), log(folder, 0)
    return folder


def test_attach_in_a_command_returns_the_submitted_run(scripts: Project, undisturbed: Path) -> None:
    (facts,) = scripts.json("status", undisturbed.name)
    assert (facts["step"], facts["progress"], facts["metrics"]) == (16, 2, {"loss": 2.0})
    reports = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert [(report["progress"], report["step"]) for report in reports] == [(1, 8), (2, 16)]
    assert list((undisturbed / "tensorboard").glob("events.*")) != []
    assert "rank 0 of 2 is at step 16 of attempt 1" in log(undisturbed, 0)
    assert log(undisturbed, 1) == "rank 1 of 2 is at step 16 of attempt 1\n"


@pytest.mark.long
def test_attached_script_resumes_exactly_after_lead_signal_requeue(scripts: Project, undisturbed: Path) -> None:
    project = Project(scripts.folder, scripts.environ | {"STOP_AT": "5"})
    # a launcher may have an exit code of its own
    python = shlex.quote(sys.executable)
    launched = f"test $RANK = 0 && exec {python} attached.py; {python} attached.py || exit 1"
    folder, facts = project.run("--nodes", "2", "--", "sh", "-c", launched)
    assert (facts["state"], facts["attempts"], facts["step"]) == ("COMPLETED", 2, 16), log(folder, 0)
    (step,) = re.findall(r"stopped at step (\d+)$", log(folder, 1), flags=re.MULTILINE)
    # the other rank may be one step further when it hears of it
    assert step in ("5", "6")
    assert "Traceback" not in log(folder, 0) + log(folder, 1)
    assert f"restored step {step} from step-{step:0>9}" in log(folder, 0, attempt=2)
    assert weights(folder) == weights(folder, rank=1) == weights(undisturbed)


def run_by_hand(project: Project, *command: str) -> str:
    words = [sys.executable, *command]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | project.environ
    done = subprocess.run(words, cwd=project.folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_attach_works_under_plain_torchrun(scripts: Project, undisturbed: Path, tmp_path: Path) -> None:
    project = Project(scripts.folder, scripts.environ | {"MGPU_RUNS": str(tmp_path)})
    said = run_by_hand(project, "-m", "torch.distributed.run", "--nproc_per_node", "2", "attached.py")
    assert {f"rank {rank} of 2 is at step 16 of attempt 1" for rank in (0, 1)} <= set(said.splitlines())
    (folder,) = tmp_path.glob("attached-attached-*")
    assert weights(folder) == weights(folder, rank=1) == weights(undisturbed)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_attach_works_without_a_launcher(scripts: Project, tmp_path: Path) -> None:
    project = Project(scripts.folder, scripts.environ | {"MGPU_RUNS": str(tmp_path)})
    assert "rank 0 of 1 is at step 16 of attempt 1" in run_by_hand(project, "attached.py")
    (folder,) = tmp_path.glob("attached-attached-*")
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000000008", "step-000000016"}


# -- what reaches a command, and what its end means


def test_arguments_and_cluster_environment_reach_a_command_unchanged(scripts: Project) -> None:
    scripts.write(
        "mgpu.yaml",
        """
        clusters:
          shell:
            environment: {GREETING: 'a b $HOME "q"', LEVEL: 3, OMP_NUM_THREADS: 7}
    """,
    )
    words = ["two words", "it's", '"quoted"', "$HOME", "*", "", "a\nb", "key=value", "--nodes", "--", "\\", "ä"]
    folder, facts = scripts.run("--cluster", "shell", "--", "python", "shows.py", *words)
    assert facts["state"] == "COMPLETED", log(folder, 0)
    arguments, environ = json.loads((folder / "seen.json").read_text())
    assert arguments == words
    assert environ["GREETING"] == 'a b $HOME "q"'
    assert (environ["LEVEL"], environ["OMP_NUM_THREADS"]) == ("3", "7")


def test_dry_run_shows_the_command_quoted_for_the_shell(project: Project) -> None:
    words = ["sh", "-c", "echo 'it''s' $HOME", "two words"]
    done = project.call("submit", "--executor", "local", "--dry-run", "--", *words)
    (line,) = re.findall(r"^target +(.*)$", done.stdout, flags=re.MULTILINE)
    assert shlex.split(line) == words


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_exit_code_of_a_command_decides_the_run_state(project: Project, code: int, state: str) -> None:
    ends = f"test $RANK = 0 || exit {code}"
    done = project.call("submit", "--executor", "local", "--nodes", "2", "--", "sh", "-c", ends)
    assert done.returncode == (1 if code else 0)
    (facts,) = project.json("status")
    assert facts["state"] == state
    assert facts["reason"] == ("rank 1 ended with exit code 3" if code else "")


def test_script_behind_any_launcher_gets_sigterm_once_and_saves(project: Project) -> None:
    run = wrappers.start(project)
    assert project.call("cancel", run.name).returncode == 0
    assert project.finish(run)["state"] == "CANCELLED"
    assert {name: wrappers.heard(project, name) for name in wrappers.RANKS} == {
        name: ["ready", "SIGTERM", "saved"] for name in wrappers.RANKS
    }
