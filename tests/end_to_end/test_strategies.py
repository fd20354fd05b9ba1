"""The strategy of a run reaches its model, from every place where it can be chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, log

TRAIN = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from mgpu_slurm import attach

    class Block(nn.Linear):
        pass

    def train(run, lr: float = 0.1, fails: bool = False):
        run.seed(0)
        torch.manual_seed(0)
        layers = nn.Sequential(Block(4, 4), nn.Tanh(), Block(4, 2))
        model = run.wrap(layers, blocks=(Block,), plan={"0": "column", "2": "row"})
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        data = run.loader(TensorDataset(torch.arange(32.0).reshape(8, 4) / 32), batch_size=4)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        print("wrapped", type(model).__name__, [type(each).__name__ for each in model.parameters()][0])
        for epoch in state.epochs(3):
            if fails and run.attempt == 1 and epoch == 3:
                raise ValueError("as requested")
            for (batch,) in data:
                loss = model(batch).square().mean()
                run.backward(loss)
                run.update(optimizer)
            run.report(epoch, loss=loss.item())
        weights = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
        return {"weight": sum(each.sum().item() for each in weights)}

    if __name__ == "__main__":
        train(attach())
"""

SHARDED, COPIED = "wrapped FSDPSequential DTensor\n", "wrapped Sequential Parameter\n"


@pytest.fixture
def training(project: Project) -> Project:
    project.write("train.py", TRAIN)
    return project


def weight(folder: Path) -> float:
    return float(json.loads((folder / "result.json").read_text())["result"]["weight"])


@pytest.mark.long
def test_run_resumes_with_another_strategy(training: Project) -> None:
    folder, facts = training.run("train.py", "--nodes", "2", "fails=true", "--retries", "0", "--strategy", "fsdp")
    assert facts["state"] == "FAILED", log(folder, 0)
    assert log(folder, 1).startswith(SHARDED)
    assert yaml.safe_load((folder / "spec.yaml").read_text())["parallelism"] == {"strategy": "fsdp"}
    assert "\nstrategy  fsdp\n" in training.call("status", folder.name).stdout
    done = training.call("resume", folder.name, "--no-follow", "--strategy", "ddp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("strategy  ddp (was fsdp)\n")
    assert training.finish(folder)["state"] == "COMPLETED"
    assert log(folder, 1, attempt=2).startswith(COPIED)
    other, facts = training.run("train.py", "--nodes", "1")
    assert facts["state"] == "COMPLETED", log(other, 0)
    assert weight(folder) == pytest.approx(weight(other), abs=1e-6)
    assert "parallelism" not in yaml.safe_load((other / "spec.yaml").read_text())
    done = training.call("export", folder.name, "-o", "model.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "written   model.safetensors: model, 4 tensors, 640 B\n          of step-000000006\n"
    assert load_file(training.folder / "model.safetensors")["0.weight"].shape == (4, 4)
    shown = training.json("export", folder.name, "--checkpoint", "4", "--output", "earlier.safetensors")
    assert (shown["step"], shown["object"]) == (4, "model")
    refused = training.call("export", folder.name, "-o", "model.safetensors")
    assert (refused.returncode, refused.stderr) == (
        2,
        "mgpu-slurm: 'model.safetensors' exists: delete it, or choose another name\n",
    )


@pytest.mark.long
def test_attached_script_uses_the_strategy_of_the_cluster_file(training: Project) -> None:
    training.write("mgpu.yaml", "clusters: {local: {strategy: hsdp, shard: 2}}\n")
    words = ("--nodes", "2", "--", "python", "train.py")
    folder, facts = training.run(*words)
    assert facts["state"] == "COMPLETED", log(folder, 0)
    assert log(folder, 0).startswith(SHARDED)
    assert read_spec(RunFolder(folder)).parallelism.given == {"strategy": "hsdp", "shard": 2}
    # a default that does not fit is left out
    planned = training.json("submit", "--executor", "local", "--dry-run", "--nodes", "3", "train.py")
    assert planned["spec"]["parallelism"]["shard"] is None
    training.write("mgpu.yaml", "clusters: {local: {shard: 2}}\n")
    refused = training.call("submit", "--executor", "local", "--dry-run", "train.py")
    assert "shard 2: add a strategy that shards the model: zero2, fsdp, hsdp" in refused.stderr


def test_compiled_code_of_a_command_is_kept_where_the_user_wants(training: Project, tmp_path: Path) -> None:
    training.write("mgpu.yaml", "clusters: {local: {compile: true}}\n")
    shown = "echo $MGPU_LAYOUT $TORCHINDUCTOR_CACHE_DIR $TORCHINDUCTOR_COMPILE_THREADS; exit 3"
    kept = replace(
        training, environ=training.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "3"}
    )
    folder, facts = kept.run("--", "sh", "-c", shown)
    assert facts["state"] == "FAILED"
    assert log(folder, 0).startswith(f'{{"compile": true}} {tmp_path} 3\n')
    # of the folder, and of the options that are given
    assert "strategy  ddp  compile" in kept.call("status", folder.name).stdout
    planned = kept.call("submit", "--executor", "local", "--dry-run", "--no-compile", "--", "true")
    assert "strategy  ddp  no compile" in planned.stdout
    resumed = kept.call("resume", folder.name, "--no-compile")
    assert "strategy  ddp  no compile (was ddp  compile)" in resumed.stdout, resumed.stderr


@pytest.mark.long
def test_attached_script_divides_its_layers(training: Project) -> None:
    folder, facts = training.run("--nodes", "2", "--tensor", "2", "--", "python", "train.py")
    assert facts["state"] == "COMPLETED", log(folder, 0)
    assert log(folder, 1).startswith("wrapped Sequential DTensor\n")


@pytest.mark.long
def test_trials_of_a_sweep_are_sharded(training: Project) -> None:
    sweep = {
        "study": "study",
        "job": "train.py",
        "metric": "loss",
        "direction": "minimize",
        "space": {"lr": {"float": [0.01, 0.2]}},
        "trials": 3,
        "resources": {"nodes": 2},
        "strategy": "fsdp",
    }
    training.write("sweep.yaml", yaml.safe_dump(sweep))
    done = training.call("sweep", "sweep.yaml", "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    changed = training.call("sweep", "sweep.yaml", "--executor", "local", "precision=bf16", "trials=4")
    assert "strategy was fsdp and is fsdp precision bf16" in changed.stderr
    folder = training.runs / "study"
    assert all(
        (folder / "trials" / str(number) / "logs/1-1.log").read_text().startswith(SHARDED) for number in range(3)
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--strategy", "fdsp"), "--strategy fdsp: unknown strategy (did you mean 'fsdp'?)"),
        (("--shard", "2"), "--shard 2 with --strategy ddp: use --strategy fsdp, zero2 or hsdp"),
        (("--strategy", "fsdp", "--shard", "2"), "--shard 2 does not divide the 3 ranks of the run: use one of 1, 3"),
        (("--tensor", "2"), "3 ranks are not a multiple of --tensor 2: use 2 or 4 ranks"),
        (("--pipeline", "3", "--strategy", "hsdp"), "--pipeline 3 with --strategy hsdp is not supported: use --strat"),
        (("--strategy", "dp"), "--strategy dp runs on one node: use --nodes 1, or --strategy ddp"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_submission(
    training: Project, words: tuple[str, ...], error: str
) -> None:
    done = training.call("submit", "train.py", "--executor", "local", "--nodes", "3", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mgpu-slurm: {error}")
    assert done.stderr.count("\n") == 1
    assert not list(training.runs.glob("*"))
