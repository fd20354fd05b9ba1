"""The GPT, as one model and as a pipeline, on two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from jobs import gpt
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import Project, log

SMALL = ("layers=2", "width=32", "context=32", "epochs=1", "batch_size=128", "warmup=4")


@pytest.fixture
def user(project: Project) -> Project:
    """A project with the jobs in it."""
    shutil.copytree(Path(gpt.__file__).parent, project.folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    return project


def held_loss(user: Project, *words: str) -> float:
    folder, facts = user.run(*words, *SMALL)
    assert facts["state"] == "COMPLETED", log(folder, 0)
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    assert metrics["tokens_per_second"] > 0
    return float(json.loads((folder / "result.json").read_text())["result"]["held"])


@pytest.mark.long
def test_gpt_learns_the_same_under_each_layout(user: Project) -> None:
    alone = held_loss(user, "jobs.gpt", "positions=alibi")
    # of 256 equally likely bytes: 5.5
    assert alone < 5
    sharded = held_loss(user, "jobs.gpt", "--nodes", "2", "--strategy", "fsdp", "positions=alibi", "recompute=true")
    assert sharded == pytest.approx(alone, abs=1e-3)
    divided = held_loss(user, "jobs.gpt", "--nodes", "2", "--tensor", "2", "positions=alibi")
    assert divided == pytest.approx(alone, abs=1e-3)


@pytest.mark.long
def test_pipeline_learns_the_same_as_one_process(user: Project) -> None:
    alone = held_loss(user, "jobs.gpt_pipeline")
    assert held_loss(user, "jobs.gpt_pipeline", "--nodes", "2", "--pipeline", "2") == pytest.approx(alone, abs=1e-3)


def test_text_is_a_file_or_generated(tmp_path: Path) -> None:
    assert gpt.sums(2).startswith(b"24 plus 48 is 72.")
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    train, held = gpt.load_text(gpt.Config(text=file, context=9))
    assert (len(train), len(held)) == (18, 2)
    assert train[1][0].tolist() == list(range(10, 20))
    with pytest.raises(UserError, match=r"text=.*missing cannot be read: No such file"):
        gpt.load_text(gpt.Config(text=tmp_path / "missing"))
    with pytest.raises(UserError, match=r"the text has 20 bytes, and context=64 needs 65"):
        gpt.load_text(gpt.Config(text=file))


def test_config_is_checked() -> None:
    with pytest.raises(UserError, match=r"width=30 is not a multiple of heads=4"):
        gpt.Config(width=30)


def attend_with_one_head(run: Run) -> None:
    config = gpt.Config(heads=1, layers=1, width=8)
    run.wrap(gpt.GPT(config), blocks=(gpt.Block,), plan=gpt.PLAN)(torch.zeros(1, 2, dtype=torch.long))


def test_heads_that_ranks_cannot_divide_are_refused() -> None:
    told = run_ranks(attend_with_one_head, 2, may_fail=True, layout=Layout(tensor=2))
    assert told == 2 * ["UserError: heads=1 is not a multiple of --tensor 2: choose another one"]
    run_ranks(attend_with_one_head, 2)


def test_penalty_grows_with_distance_and_hides_later_tokens() -> None:
    block = gpt.Block(gpt.Config(positions="alibi", heads=2, width=8))
    penalty = block.distance_penalty(2, 3, torch.zeros(1))
    assert penalty is not None
    slopes = [2.0**-4, 2.0**-8]
    for head, slope in enumerate(slopes):
        assert penalty[head].tolist() == [
            [0.0, float("-inf"), float("-inf")],
            [-slope, 0.0, float("-inf")],
            [-2 * slope, -slope, 0.0],
        ]
