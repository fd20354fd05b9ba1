"""What must hold of a training or a sweep at its end, whatever came over it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.reports.aggregation import history as histories
from mgpu_slurm.reports.aggregation import run_sources
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.checkpoint_names import below_checkpoints, checkpoint_step, complete_checkpoints
from tests.chaos.faults import Fault
from tests.chaos.job import SAMPLES, SAVE_EVERY, STEPS_OF_EPOCH
from tests.chaos.training import Trained, Training
from tests.support import wait_until

# it says of each attempt that the run went back
logging.getLogger("tensorboard").setLevel(logging.ERROR)

PATIENCE = 10.0
"""Seconds in which the last processes end."""

Points = dict[str, list[tuple[int, float]]]
"""Steps and values, by metric."""


@dataclass(frozen=True)
class Result:
    """What one training has come to."""

    weights: bytes
    """Of the files with the final weights of each rank, and what its random generator gives next."""
    samples: dict[int, list[list[int]]]
    """What each rank has seen in each step that counts."""
    curves: Points
    best: str
    """The name of the best checkpoint."""

    @classmethod
    def of(cls, trained: Trained) -> Result:
        final = b"".join(path.read_bytes() for path in sorted(trained.path.glob("final-*.pt")))
        best = (trained.folder.checkpoints / checkpoints.BEST).resolve().name
        return cls(final, samples(trained), curves(trained), best)


def results(training: Training) -> dict[str, Result]:
    """Of all its parts."""
    return {name: Result.of(part) for name, part in training.parts().items()}


def samples(trained: Trained) -> dict[int, list[list[int]]]:
    """By step. Of a step that several attempts have done the last one counts: it went back behind it."""
    found: dict[int, list[list[int]]] = {}
    for attempt in trained.attempts():
        lines = [trained.seen(attempt, rank)[1:] for rank in range(trained.world_size)]
        of_ranks = [{line["step"]: line["samples"] for line in of_rank} for of_rank in lines]
        for step in of_ranks[0]:
            found[step] = [of_rank.get(step, []) for of_rank in of_ranks]
    return found


def curves(trained: Trained) -> Points:
    """As this package reads them."""
    (history,) = histories.read(run_sources.sources([str(trained.path)]), "step")
    return {
        name: list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
        for name, curve in history.curves.items()
    }


def problems(
    training: Training, facts: dict[str, Any], expected: dict[str, Result], hit: Sequence[Fault] = ()
) -> list[str]:
    """Return what is wrong: nothing if all is as if the training had not been disturbed, and it was resumed.

    Args:
        hit: the faults that have hit it.
    """
    has_cost_checkpoints = any(fault.costs_checkpoints for fault in hit)
    found = [*_of_its_end(training, facts), *_of_record(training, facts)]
    parts = training.parts()
    if any(fault.ends_attempt for fault in hit) and not training.has_resumed(facts):
        found.append("nothing shows that it was resumed from a checkpoint")
    if not has_cost_checkpoints:
        found += [problem for part in parts.values() for problem in _of_starts(part)]
    if parts.keys() != expected.keys():
        found.append(f"there are {sorted(parts)}, and not {sorted(expected)}")
    if has_cost_checkpoints:
        expected = {name: replace(result, best="") for name, result in expected.items()}
    for name in sorted(parts.keys() & expected.keys()):
        found += [f"{name}: {problem}" if name else problem for problem in _of_part(parts[name], expected[name])]
    return found


def _of_part(trained: Trained, expected: Result) -> Iterator[str]:
    result = Result.of(trained)
    if result.weights != expected.weights:
        yield "the final weights are others"
    if expected.best not in ("", result.best):
        yield f"the best checkpoint is {result.best} instead of {expected.best}"
    yield from _of_checkpoints(trained, max(expected.samples))
    yield from _of_samples(result.samples, expected.samples)
    if result.curves != expected.curves:
        yield f"the curves are others: {result.curves} instead of {expected.curves}"
    yield from _of_tensorboard(trained, expected.curves)


def _of_starts(trained: Trained) -> Iterator[str]:
    """Each attempt begins near the step to which the one before had come: equal weights alone do not prove that, since
    a training that begins anew has them too."""
    for attempt, start in trained.starts().items():
        before = max(number for number in trained.attempts() if number < attempt)
        reached = max((line["step"] for line in trained.seen(before, 0)[1:]), default=0)
        saves = [step for step in range(1, reached + 1) if step % SAVE_EVERY == 0 or step % STEPS_OF_EPOCH == 0]
        # the newest may not have begun, the one before it may be on its way, and the next one damaged
        if len(saves) > 3 and start < saves[-4]:
            yield f"attempt {attempt} began after step {start}, and the one before it had come to step {reached}"


def _of_its_end(training: Training, facts: dict[str, Any]) -> Iterator[str]:
    if facts["state"] != states.COMPLETED:
        yield f"it ended {facts['state']}: {facts['reason']}"
    try:
        wait_until(lambda: not training.processes(), seconds=PATIENCE)
    except AssertionError:
        yield f"processes are left: {training.processes()}"


def _of_checkpoints(trained: Trained, last: int) -> Iterator[str]:
    """
    Args:
        last: the step at the end.
    """
    run = trained.folder
    found = complete_checkpoints(run)
    for path in found:
        if (problem := checkpoints.problem(path, range(trained.world_size))) is not None:
            yield f"{path.name}: {problem}"
    if not found or checkpoint_step(found[-1]) != last:
        yield f"the newest checkpoint is {found[-1].name if found else 'none'}"
    if torn := [path.name for path in below_checkpoints(run) if path.name.startswith(".")]:
        yield f"parts of checkpoints are left: {' '.join(torn)}"
    if (run.checkpoints / checkpoints.BEST).resolve() not in found:
        yield "the link to the best checkpoint leads nowhere"


def _of_samples(seen: dict[int, list[list[int]]], expected: dict[int, list[list[int]]]) -> Iterator[str]:
    if seen != expected:
        differing = sorted(step for step in seen.keys() | expected.keys() if seen.get(step) != expected.get(step))
        yield f"other samples in steps {differing}"
    for epoch in range(max(expected) // STEPS_OF_EPOCH):
        steps = range(epoch * STEPS_OF_EPOCH + 1, (epoch + 1) * STEPS_OF_EPOCH + 1)
        drawn = sorted(itertools.chain(*(ids for step in steps for ids in seen.get(step, []))))
        if drawn != list(range(SAMPLES)):
            yield f"epoch {epoch + 1} has not seen each sample once"


def _of_record(training: Training, facts: dict[str, Any]) -> Iterator[str]:
    """Each attempt has begun, and all but the last have ended and been followed by a reason to start again."""
    events = list(read_jsonl(training.worker.attempts))
    started = [event["attempt"] for event in events if event["event"] == "started"]
    ended = [event["attempt"] for event in events if event["event"] == "ended"]
    if started != list(range(1, facts["attempts"] + 1)):
        yield f"the record has attempts {started}, and the state {facts['attempts']}"
    if sorted(set(ended)) != started:
        yield f"of attempts {started} {ended} have ended"
    if any(end is None for _, end in records.spans(training.worker)):
        yield "an attempt has no end"


def _of_tensorboard(trained: Trained, expected: Points) -> Iterator[str]:
    """By its own reader, which has 32 bits of each value: no step twice, none missing."""
    shown = EventAccumulator(str(trained.folder.tensorboard), size_guidance={"scalars": 0})
    shown.Reload()
    for name, points in expected.items():
        found = [(event.step, event.value) for event in shown.Scalars(name)] if name in shown.Tags()["scalars"] else []
        if found != [(step, float(np.float32(value))) for step, value in points]:
            yield f"TensorBoard shows {name} as {found}"
