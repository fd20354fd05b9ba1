"""How long it takes to get a run going: until `submit` returns, and until two ranks have made three steps."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measure import interleave, median, ratio
from benchmarks.project import JOBS, MGPU, Project, project
from benchmarks.report import Row, Section

ROUNDS = 15
RETURN_TARGET_S = 0.5
EDITED_TARGET = 1.2
TORCHRUN_TARGET = 0.6
COMMAND_TARGET = 1.05
IMPORTS = "import torch.distributed, torch._dynamo"
"""What a rank of a job function needs before its third step, whoever starts it."""
RANKS = "2"

FUNCTION = f"{JOBS}.three_steps_function"
SCRIPT = ["-m", f"{JOBS}.three_steps_script"]


def run() -> Section:
    # one whose code has been submitted before, and one whose code changes before each submission
    with project() as known, project() as edited:
        returned = interleave(_returning(known, edited), ROUNDS)
        trained = _train_three_steps(known, edited)
    return Section("launch", _ABOUT, [*_return_rows(returned), *_step_rows(trained)], _NOTES)


# -- until submit returns


def _returning(known: Project, edited: Project) -> dict[str, Callable[[], float]]:
    return {
        "command": partial(_submitted, known, "--", "true"),
        "function": partial(_submitted, known, f"{JOBS}.returns_at_once"),
        "edited": partial(_edited_and_submitted, edited, f"{JOBS}.returns_at_once"),
    }


def _edited_and_submitted(made: Project, *words: str) -> float:
    made.edit()
    return _submitted(made, *words)


def _submitted(made: Project, *words: str) -> float:
    seconds, folder = made.submit(*words)
    # the run's own work must not fall into the next measurement
    made.wait(folder)
    return seconds


def _return_rows(seconds: dict[str, list[float]]) -> list[Row]:
    function = "`submit --no-follow` of a job function that imports torch"
    edited = ratio(seconds["edited"], seconds["command"])
    return [
        Row("`submit --no-follow -- true`", median(seconds["command"]), "s", 2, RETURN_TARGET_S),
        Row(f"{function}, code submitted before", median(seconds["function"]), "s", 2, RETURN_TARGET_S),
        Row(f"{function}, code just edited", median(seconds["edited"]), "s", 2, RETURN_TARGET_S),
        Row("`submit --no-follow`, code just edited / `submit --no-follow -- true`", edited, "", 2, EDITED_TARGET),
    ]


# -- until two ranks have made three steps


@dataclass(frozen=True)
class Times:
    """Seconds since the command was started."""

    third_step: float
    """Until the last rank had done its third step."""
    exit: float
    """Until the command had ended."""


def _train_three_steps(known: Project, edited: Project) -> dict[str, list[Times]]:
    submit = [*MGPU, "submit", "--executor", "local", "--follow", "--ntasks-per-node", RANKS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", RANKS]
    cases = {
        "function": partial(_times, known, [*submit, FUNCTION], "out={}"),
        "edited": partial(_edited_times, edited, [*submit, FUNCTION], "out={}"),
        "command": partial(_times, known, [*submit, "--", "python", *SCRIPT], "{}"),
        "torchrun": partial(_times, known, [*torchrun, *SCRIPT], "{}"),
        "imports": partial(_time_of_imports, known),
    }
    return interleave(cases, ROUNDS)


def _time_of_imports(made: Project) -> Times:
    seconds = made.wall_time([sys.executable, "-c", IMPORTS])
    return Times(seconds, seconds)


def _edited_times(made: Project, command: list[str], last_word: str) -> Times:
    made.edit()
    return _times(made, command, last_word)


def _times(made: Project, command: list[str], last_word: str) -> Times:
    """Runs a command, its last word with a folder put in where the ranks write down when they were done."""
    with tempfile.TemporaryDirectory(dir=made.base) as out:
        start = time.monotonic()
        made.call([*command, last_word.format(out)])
        end = time.monotonic()
        return Times(_last_third_step(Path(out)) - start, end - start)


def _last_third_step(out: Path) -> float:
    """When the last rank was done, by the clock that all processes of the machine share."""
    times = [float(path.read_text()) for path in out.iterdir()]
    if len(times) != int(RANKS):
        raise RuntimeError(f"{len(times)} ranks reported their third step, wanted {RANKS}")
    return max(times)


def _step_rows(trained: dict[str, list[Times]]) -> list[Row]:
    third_step = {name: [times.third_step for times in measured] for name, measured in trained.items()}
    exit_ = {name: [times.exit for times in measured] for name, measured in trained.items()}
    imports = third_step.pop("imports")
    exit_.pop("imports")
    of_them = ratio(third_step["function"], imports)
    return [
        *_rows_until("third step", third_step),
        *_rows_until("exit", exit_),
        Row(f"`python -c '{IMPORTS}'`", median(imports), "s", 2),
        Row("job function, to the third step / these imports alone", of_them, "", 3),
    ]


def _rows_until(end: str, seconds: dict[str, list[float]]) -> list[Row]:
    ratios = [
        Row(f"{_NAMES[case]} / torchrun, to the {end}", ratio(seconds[case], seconds["torchrun"]), "", 3, target)
        for case, target in (("function", TORCHRUN_TARGET), ("edited", TORCHRUN_TARGET), ("command", COMMAND_TARGET))
    ]
    return ratios + [Row(f"{name}, to the {end}", median(seconds[case]), "s", 2) for case, name in _NAMES.items()]


_NAMES = {
    "function": "job function",
    "edited": "job function just edited",
    "command": "`submit -- python`",
    "torchrun": "torchrun",
}

_ABOUT = (
    "Until `submit --no-follow` returns; and three steps of a tiny DDP model on two ranks of this machine, as a job"
    " function, as a script behind `submit --`, and as the same script under `torchrun --nproc_per_node 2`. Times are"
    " from the start of the command: to the last rank's third step, and to the exit of the command, which follows its"
    " run. One thread per rank everywhere."
)
_NOTES = [
    "A job function's config is checked before the run exists, as far as its source tells it: nothing is imported for"
    " that.",
    "The local executor gives its ranks `GLOO_SOCKET_IFNAME=lo`; torchrun looks the host name up.",
]
