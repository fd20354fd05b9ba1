"""Attempts replace each other, files of restarts too, and files of processes that write at once are joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_slurm.metrics.event_reader import read_files
from mgpu_slurm.reports.aggregation.merging import Curve, EventFiles, newest
from tests.metrics.event_files import opened, restarted, scalar, write

WRITERS = some.lists(some.lists(some.tuples(some.integers(0, 20), some.floats(0, 1)), max_size=12), max_size=5)


def points(curve: Curve) -> dict[int, float]:
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


@given(WRITERS)
def test_newer_writer_replaces_everything_from_its_first_step_on(writers: list[list[tuple[int, float]]]) -> None:
    expected: dict[int, float] = {}
    for said in writers:
        first = min((step for step, _ in said), default=99)
        expected = {step: value for step, value in expected.items() if step < first} | dict(said)
    arrays = [
        (np.asarray([step for step, _ in said], np.int64), np.asarray([value for _, value in said], float))
        for said in writers
    ]
    curve = newest(arrays)
    assert points(curve) == expected
    assert curve.steps.tolist() == sorted(expected)


# -- event files


def file(tmp_path: Path, name: str, steps: range, value: float, at: float, every: float = 1.0) -> Path:
    """A file with a value at each step, the first one written at a time."""
    events = [scalar("loss", step, value, at + every * place) for place, step in enumerate(steps)]
    return write(tmp_path / f"events.out.tfevents.{name}", [opened(at), *events])


def merged(*paths: Path) -> tuple[dict[int, float], list[str]]:
    files = EventFiles(read_files(list(paths)))
    return points(files.curves()["loss"]), files.notes()


def test_file_begun_after_another_one_ended_continues_it(tmp_path: Path) -> None:
    first = file(tmp_path, "1.a", range(10), 1.0, at=100)
    second = file(tmp_path, "2.a", range(9, 12), 2.0, at=200)
    # a step is repeated, which a restart does
    assert merged(second, first) == (dict.fromkeys(range(9), 1.0) | dict.fromkeys(range(9, 12), 2.0), [])


def test_points_that_a_later_file_makes_void_are_noted_if_they_are_many(tmp_path: Path) -> None:
    first = file(tmp_path, "1.a", range(10), 1.0, at=100)
    second = file(tmp_path, "2.a", range(4, 6), 2.0, at=200)
    found, notes = merged(first, second)
    assert found == dict.fromkeys(range(4), 1.0) | {4: 2.0, 5: 2.0}
    assert notes == [
        "6 of 10 points of loss in events.out.tfevents.1.a left out:"
        " events.out.tfevents.2.a continues from an earlier step"
    ]
    write(second, [opened(200), restarted(2)])
    assert merged(first, second)[1][0].startswith("8 of 10 points of loss in events.out.tfevents.1.a left out")


def test_files_written_at_the_same_time_are_joined_step_by_step(tmp_path: Path) -> None:
    """Two processes that log into one folder; the later value of a step counts."""
    even = file(tmp_path, "1.a", range(0, 20, 2), 1.0, at=100, every=2)
    # begun while the other one is written; its steps 3, 6, 9, ... come later than, or with, the other one's
    third = file(tmp_path, "2.b", range(3, 20, 3), 2.0, at=105, every=3)
    found, notes = merged(even, third)
    assert set(found) == {*range(0, 20, 2), *range(3, 20, 3)}
    assert {step for step, value in found.items() if value == 2.0} == set(range(3, 20, 3))
    assert notes == []
    early = file(tmp_path, "3.c", range(0, 20, 2), 3.0, at=99, every=2)
    assert merged(even, early)[0] == dict.fromkeys(range(0, 20, 2), 1.0)


def test_names_and_clocks_that_disagree_are_noted(tmp_path: Path) -> None:
    older = file(tmp_path, "10.a", range(5), 1.0, at=500)
    newer = file(tmp_path, "20.a", range(3, 6), 2.0, at=100)
    found, notes = merged(newer, older)
    assert notes == ["events.out.tfevents.20.a was written before events.out.tfevents.10.a, whose name is older"]
    # nothing is void, as the clock does not say which one continues the other
    assert set(found) == set(range(6))


FILES = some.lists(
    some.tuples(some.integers(0, 15), some.integers(1, 8), some.integers(0, 60), some.integers(1, 4)), max_size=4
)


@given(FILES)
def test_every_step_of_a_file_that_none_continues_is_there(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[int, int, int, int]]
) -> None:
    """Points disappear only if a file was begun after theirs had ended."""
    folder = tmp_path_factory.mktemp("files")
    paths, kept = [], set()
    for place, (first, count, at, every) in enumerate(made):
        paths.append(file(folder, f"{at}.{place}", range(first, first + count), float(place), at, every))
        ended = at + every * (count - 1)
        later = [begun for begun, _, start, _ in made if start > ended]
        kept |= {step for step in range(first, first + count) if step < min(later, default=99)}
    curves = EventFiles(read_files(paths)).curves()
    assert set(points(curves["loss"]) if curves else ()) == kept
