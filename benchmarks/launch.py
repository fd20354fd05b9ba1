"""How long it takes to get a run going: until `submit` returns, and until two ranks have made three steps."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import interleave, median, ratio
from benchmarks.project import MGPU, Project, project
from benchmarks.report import Row, Section

ROUNDS = 15
RETURN_TARGET_S = 0.5
TORCHRUN_TARGET = 0.9
RANKS = "2"

FUNCTION = "three_steps_function"
SCRIPT = "three_steps_script.py"


def run() -> Section:
    with project() as made:
        returned = interleave(_returning(made), ROUNDS)
        steps, whole = _until_three_steps(made)
    return Section("launch", _ABOUT, [*_return_rows(returned), *_step_rows(steps, whole)], _NOTES)


# -- until submit returns


def _returning(made: Project) -> dict[str, Callable[[], float]]:
    return {
        "command": lambda: _submitted(made, "--", "true"),
        "function": lambda: _submitted(made, "returns_at_once"),
        "import": lambda: made.wall_time([sys.executable, "-c", "import torch"]),
    }


def _submitted(made: Project, *words: str) -> float:
    seconds, folder = made.submit(*words)
    # the run's own work must not fall into the next measurement
    made.wait(folder)
    return seconds


def _return_rows(seconds: dict[str, list[float]]) -> list[Row]:
    function = "`submit --no-follow` of a job function that imports torch"
    return [
        Row("`submit --no-follow -- true`", median(seconds["command"]), "s", 2, RETURN_TARGET_S),
        Row(function, median(seconds["function"]), "s", 2, RETURN_TARGET_S),
        Row("a bare `python -c 'import torch'`", median(seconds["import"]), "s", 2),
        Row("the job function's / the bare import", ratio(seconds["function"], seconds["import"]), "", 2),
    ]


# -- until two ranks have made three steps


def _until_three_steps(made: Project) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds until the last rank's third step was done, and until the program had ended, by case."""
    submit = [*MGPU, "submit", "--executor", "local", "--follow", "--ntasks-per-node", RANKS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", RANKS]
    commands: dict[str, Callable[[str], list[str]]] = {
        "function": lambda out: [*submit, FUNCTION, f"out={out}"],
        "command": lambda out: [*submit, "--", "python", SCRIPT, out],
        "torchrun": lambda out: [*torchrun, SCRIPT, out],
    }
    whole: dict[str, list[float]] = {name: [] for name in commands}

    def measure(name: str) -> float:
        with tempfile.TemporaryDirectory(dir=made.base) as out:
            start = time.monotonic()
            made.call(commands[name](out))
            whole[name].append(time.monotonic() - start)
            return _last_third_step(Path(out)) - start

    steps = interleave({name: lambda name=name: measure(name) for name in commands}, ROUNDS)
    return steps, {name: seconds[-ROUNDS:] for name, seconds in whole.items()}


def _last_third_step(out: Path) -> float:
    """When the last rank was done, by the clock that all processes of the machine share."""
    times = [float(path.read_text()) for path in out.iterdir()]
    if len(times) != int(RANKS):
        raise RuntimeError(f"{len(times)} ranks reported their third step, wanted {RANKS}")
    return max(times)


def _step_rows(steps: dict[str, list[float]], whole: dict[str, list[float]]) -> list[Row]:
    rows = []
    for seconds, end in ((steps, "third step"), (whole, "exit")):
        function, command = f"job function / torchrun, to the {end}", f"`submit -- python` / torchrun, to the {end}"
        rows += [
            Row(function, ratio(seconds["function"], seconds["torchrun"]), "", 3, TORCHRUN_TARGET),
            Row(command, ratio(seconds["command"], seconds["torchrun"]), "", 3, TORCHRUN_TARGET),
        ]
        rows += [Row(f"{name}, to the {end}", median(seconds[case]), "s", 2) for case, name in _NAMES.items()]
    return rows


_NAMES = {"function": "job function", "command": "`submit -- python`", "torchrun": "torchrun"}

_ABOUT = (
    "Until `submit --no-follow` returns; and three steps of a tiny DDP model on two ranks of this machine, as a job"
    " function, as a script behind `submit --`, and as the same script under `torchrun --nproc_per_node 2`. Times are"
    " from the start of the command: to the last rank's third step, and to the exit of the command, which follows its"
    " run. One thread per rank everywhere."
)
_NOTES = [
    "A job function's config is checked before the run exists, in a process that imports its module: `submit` cannot"
    " return before that import of torch is done.",
    "The local executor gives its ranks `GLOO_SOCKET_IFNAME=lo`; torchrun looks the host name up.",
]
