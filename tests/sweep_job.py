"""A job for sweeps: its score follows from its parameters, and on the way it does what it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

JOB = """
    import json, os, signal, time
    from dataclasses import asdict, dataclass, field
    from pathlib import Path

    import torch

    LEAKED = []


    @dataclass
    class Config:
        x: float = 0.5
        whole: int = 0
        text: str = ""
        metric: str = "score"
        sizes: list[int] = field(default_factory=list)
        does: str = ""
        broken: str = ""
        epochs: int = 3
        pause: float = 0.0
        place: str = "."


    class Still:
        # one of torch would have each worker import torch's compiler, for more than a second

        def step(self):
            pass

        def zero_grad(self):
            pass

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass


    def train(run, config: Config):
        def saw(**facts):
            with open(run.folder / f"saw-{run.rank}.jsonl", "a") as file:
                file.write(json.dumps({"attempt": run.attempt, "pid": os.getpid(), **facts}) + "\\n")

        place, last = Path(config.place), run.rank == run.world_size - 1
        model = run.wrap(torch.nn.Linear(1, 1))
        torch.nn.init.constant_(next(model.parameters()), config.x)
        optimizer = Still()
        state = run.restore(model=model, optimizer=optimizer)
        saw(config=asdict(config), x=config.x.hex(), restored=state.progress)
        for epoch in state.epochs(config.epochs):
            run.backward(model(torch.ones(1, 1)).sum())
            run.update(optimizer)
            saw(epoch=epoch)
            time.sleep(config.pause)
            if config.does == "fails" or config.does == f"fails on {run.rank}" or config.broken == os.uname().nodename:
                raise ValueError(f"broken on {run.rank}")
            is_killed = config.does == "is killed" or (config.does == "is killed once" and run.attempt == 1)
            if is_killed and last and epoch == 2:
                # with both parts of the first epoch's checkpoint on the disk, or there is none to go on from
                while len(list(run.folder.glob("checkpoints/*step-*/rank-*.json"))) < run.world_size:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if config.does == "leaks":
                LEAKED.extend(open(os.devnull) for _ in range(40))
            while config.does == "waits" and epoch == 2 and run.attempt == 1:
                if run._loop_control.stop.asked or (place / "gate").exists():
                    break
                time.sleep(0.01)
            if config.does == "goes on until told" and (place / "gate").exists():
                break
            score = {"hopeless": -1.0, "nan": float("nan"), "reports x": config.x}.get(config.does, 1.0)
            try:
                run.report(epoch, **{config.metric: score})
            except Exception:
                saw(swallowed=True)
        return {config.metric: float(next(model.parameters()).detach())}


    CASES = [
        "", "hopeless", "nan", "leaks", "fails on 0", "fails on 1", "is killed once", "is killed", "",
    ]


    def choose(trial):
        x = trial.suggest_float("x", 0.1, 1.0)
        return {"x": x, "whole": 2**53 + 1, "text": "it's \\"ü\\"", "sizes": [3, 2**40], "does": CASES[trial.number]}
"""


def seen(trial: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank has written down of a trial, over all attempts."""
    path = trial / f"saw-{rank}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def epochs(trial: Path, rank: int = 0) -> dict[int, list[int]]:
    """The epochs that were trained, by attempt."""
    found: dict[int, list[int]] = {}
    for line in seen(trial, rank):
        if "epoch" in line:
            found.setdefault(line["attempt"], []).append(line["epoch"])
    return found


def pids(trial: Path, rank: int = 0) -> list[int]:
    """The processes that have trained it, in their order."""
    return list(dict.fromkeys(line["pid"] for line in seen(trial, rank)))
