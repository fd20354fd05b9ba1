"""What makes runs faster and what measures them, on the nodes of a real SLURM."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.on_slurm.cluster import Cluster
from tests.support import Project, log, with_long

JOB = """
    import torch
    from torch import nn
    from mgpu_slurm import staged


    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return x + torch.relu(self.linear(x))


    def train(run, data: str = "data", batch_size: int = 8):
        torch.manual_seed(0)
        path = staged(data) / "inputs.pt"
        print("reads", path)
        model = run.wrap(nn.Sequential(Block(), Block(), nn.Linear(16, 1)), blocks=(Block,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = run.loader(torch.utils.data.TensorDataset(torch.load(path)), batch_size=batch_size)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(2):
            for (inputs,) in data:
                run.backward(model(inputs).square().mean())
                run.update(optimizer)
            run.report(epoch, loss=0.5)
"""

TWO_NODES = ("--nodes", "2", "--nodelist", "n1,n2", "--gpus-per-node", "0")


def write_job(project: Project) -> None:
    project.write("train.py", JOB)
    (project.folder / "data").mkdir()
    torch.save(torch.randn(64, 16), project.folder / "data" / "inputs.pt")


@pytest.fixture
def disk(cluster: Cluster) -> Iterator[Path]:
    """A disk on which each node has a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("compiles", with_long([False, True], {False}))
def test_data_is_staged_and_blocks_are_compiled_and_profiled_on_each_node(
    compiles: bool, slurm_project: Project, disk: Path
) -> None:
    slurm_project.write("mgpu.yaml", f"clusters: {{slurm: {{stage-to: {disk}/$SLURMD_NODENAME}}}}\n")
    write_job(slurm_project)
    options = ("--stage", "data", "--profile", "3-5@all", *(["--compile"] if compiles else []))
    folder, state = slurm_project.run("train.py", *TWO_NODES, "--ntasks-per-node", "2", *options)
    logs = [log(folder, rank) for rank in range(4)]
    assert state["state"] == "COMPLETED", logs
    for rank, text in enumerate(logs):
        assert f"reads {disk}/n{1 + rank // 2}/mgpu-stage-" in text
    # once on each node, and deleted at the end
    assert ["".join(logs).count(f"to {disk}/n{node}/") for node in (1, 2)] == [1, 1]
    assert [*disk.rglob("*.pt")] == []
    recorded = slurm_project.json("profile", folder.name)
    assert [(each["rank"], each["steps"]) for each in recorded["ranks"]] == [(rank, 3) for rank in range(4)]
    names = {each["name"] for each in recorded["operators"]}
    assert any("CompiledFxGraph" in name or "Torch-Compiled" in name for name in names) == compiles, names


@pytest.mark.long
def test_job_is_measured_on_one_and_two_nodes(slurm_project: Project) -> None:
    write_job(slurm_project)
    options = ("--gpus-per-node", "0", "--ntasks-per-node", "1", "--steps", "4", "--warm-up", "2")
    facts = slurm_project.json("scaling", "train.py", "--nodes", "1,2", *options)
    assert [(size["nodes"], size["ranks"], size["state"]) for size in facts["sizes"]] == [
        (1, 1, "COMPLETED"),
        (2, 2, "COMPLETED"),
    ]
    first, second = facts["sizes"]
    assert (first["speed_up"], first["steps"], second["steps"]) == (1.0, 4, 4)
    assert second["speed_up"] > 0
