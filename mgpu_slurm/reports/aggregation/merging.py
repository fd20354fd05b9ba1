"""Merge what several writers of one run have written into its curves: attempts of a run, or event files of a folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.metrics.event_layout import Floats, Integers
from mgpu_slurm.metrics.event_reader import EventFile, Points

TOLD_PART = 0.1
"""Part of a metric's points that have to be void before a note says so: a restart repeats a few steps."""

_STAMP = re.compile(r"tfevents\.(\d+)\.")
"""The time in the name of an event file, in seconds since 1970."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run: its values by increasing, distinct steps."""

    steps: Integers
    values: Floats


# -- attempts


def newest(writers: Sequence[tuple[Integers, Floats]]) -> Curve:
    """Merge the points of attempts, oldest first: a newer one replaces everything from its first step on.

    Of two values of one attempt for the same step, the last one counts.
    """
    parts: list[tuple[Integers, Floats]] = []
    for steps, values in reversed(writers):
        if not len(steps):
            continue
        first = min((int(part[0][0]) for part in parts), default=None)
        kept: NDArray[np.bool_] = np.ones(len(steps), bool) if first is None else steps < first
        if kept.any():
            last = _last_of_each(steps[kept])
            parts.append((steps[kept][last], values[kept][last]))
    if not parts:
        return Curve(np.empty(0, np.int64), np.empty(0))
    parts.reverse()
    return Curve(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))


def repeated(steps: Integers) -> int:
    """Return how many points of a writer are replaced by other points of the same writer."""
    return len(steps) - len(np.unique(steps))


def _last_of_each(steps: Integers) -> Integers:
    """Return the index of the last point of each step, by increasing steps."""
    # the first of each in reverse order
    _, places = np.unique(steps[::-1], return_index=True)
    return len(steps) - 1 - places


# -- event files


class EventFiles:
    """The event files of one run.

    A file that was begun after another one had ended continues the run from its first step on: what the other one has
    of later steps is void. Files that were written at the same time, by several processes, are joined step by step,
    and the later value counts. A writer can also say where it restarts (SessionLog.START).
    """

    def __init__(self, files: Sequence[EventFile]) -> None:
        self._files = sorted(files, key=_order)
        self._void: dict[tuple[Path, Path], dict[str, tuple[int, int]]] = {}
        """By the older and the newer file: how many points of how many are void, by tag."""
        self.repeated = 0
        """Maximum number of points of a tag that a file has again."""

    def curves(self) -> dict[str, Curve]:
        """Return the curve of each tag."""
        tags = dict.fromkeys(tag for file in self._files for tag in file.scalars)
        found = {tag: self._curve(tag) for tag in tags}
        return {tag: curve for tag, curve in found.items() if len(curve.steps)}

    def notes(self) -> list[str]:
        """Return what a user should know of files that contradict each other."""
        found = []
        for (older, newer), tags in self._void.items():
            told = {tag: counts for tag, counts in tags.items() if counts[0] > TOLD_PART * counts[1]}
            if told:
                tag, (void, whole) = max(told.items(), key=lambda each: each[1][0])
                more = f" (and {counted(len(told) - 1, 'other metric')})" if len(told) > 1 else ""
                found.append(
                    f"{void} of {counted(whole, 'point')} of {tag}{more} in {older.name} left out:"
                    f" {newer.name} continues from an earlier step"
                )
        with_points = [file for file in self._files if file.scalars]
        for former, latter in itertools.pairwise(with_points):
            if latter.ended < former.started:
                found.append(f"{latter.path.name} was written before {former.path.name}, whose name is older")
        return found

    def _curve(self, tag: str) -> Curve:
        steps, values, times = [], [], []
        for place, file in enumerate(self._files):
            if tag in file.scalars:
                points = file.scalars[tag]
                kept = self._kept(place, tag, points)
                kept = kept[_last_of_each(points.steps[kept])]
                steps.append(points.steps[kept])
                values.append(points.values[kept])
                times.append(points.times[kept])
        all_steps, all_times = np.concatenate(steps), np.concatenate(times)
        # of equal times the newer file's point is last, too
        order = np.lexsort((np.arange(len(all_steps)), all_times, all_steps))
        last = order[_last_of_each(all_steps[order])]
        return Curve(all_steps[last], np.concatenate(values)[last])

    def _kept(self, place: int, tag: str, points: Points) -> Integers:
        """Return the indices of a file's points that later writers have not made void."""
        file = self._files[place]
        kept = np.ones(len(points.steps), bool)
        for record, step in file.restarts:
            kept &= (points.records > record) | (points.steps < step)
        for newer in self._files[place + 1 :]:
            first = _continues_from(newer, file, tag)
            if first is not None:
                void = kept & (points.steps >= first)
                if void.any():
                    counts = (int(void.sum()), len(points.steps))
                    self._void.setdefault((file.path, newer.path), {})[tag] = counts
                kept &= ~void
        indices = np.flatnonzero(kept)
        self.repeated = max(self.repeated, repeated(points.steps[indices]))
        return indices


def _order(file: EventFile) -> tuple[float, float, str]:
    # names of later attempts sort later even if a clock was set back; the first record's time tells two writers of the
    # same second apart
    stamp = _STAMP.search(file.path.name)
    started = file.started if np.isfinite(file.started) else 0.0
    return (float(stamp[1]) if stamp else np.floor(started), started, file.path.name)


def _continues_from(newer: EventFile, older: EventFile, tag: str) -> int | None:
    """Return the step from which a newer file makes an older one's points void; None if it does not."""
    firsts = [step for _, step in newer.restarts]
    if newer.started > older.ended and tag in newer.scalars:
        firsts.append(int(newer.scalars[tag].steps.min()))
    return min(firsts, default=None)
