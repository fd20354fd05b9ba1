"""A part of `python -m tests.deaths`: sweeps whose workers are killed at writes to the study."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deaths.sweeps import Deaths
from tests.deaths.workers import Death
from tests.on_slurm.packages import DATABASE_PASSWORD
from tests.postgresql import Server

VARIABLE = "DEATHS_PASSWORD"


@pytest.mark.parametrize(
    ("scheduler", "how", "first"),
    [("asha", "before", 3), ("asha", "after", 5), ("asha", "torn", 7), ("pbt", "after", 9)],
)
def test_another_worker_ends_the_sweep_of_one_that_was_killed(
    tmp_path: Path, scheduler: str, how: str, first: int
) -> None:
    deaths = Deaths(tmp_path, scheduler)
    writes = range(first, deaths.writes() + 1, 11)
    assert len(writes) >= 6
    for write in writes:
        assert deaths.one(Death(write, how)) == [], write


@pytest.mark.parametrize("scheduler", ["asha", "pbt"])
def test_workers_that_are_killed_again_and_again_lose_no_trial(tmp_path: Path, scheduler: str) -> None:
    deaths = Deaths(tmp_path, scheduler)
    for seed in range(3):
        assert deaths.many(seed, most=40) == [], seed


@pytest.mark.long
def test_deaths_on_postgresql(tmp_path: Path, postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, DATABASE_PASSWORD)
    deaths = Deaths(tmp_path, "asha", lambda: postgresql.url(postgresql.new_database(), f"${{{VARIABLE}}}"))
    for write in (12, 29, 51):
        assert deaths.one(Death(write, "after")) == [], write
    assert deaths.many(0, most=40) == []
