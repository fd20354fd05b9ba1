"""Part of `make long`: sweeps whose workers are killed at each write to the study, on a journal and on PostgreSQL."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests import postgresql as databases
from tests.deaths.sweeps import SCHEDULERS, Deaths
from tests.deaths.workers import Death
from tests.on_slurm.packages import DATABASE_PASSWORD

VARIABLE = "DEATHS_PASSWORD"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deaths", description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th write")
    parser.add_argument(
        "--rounds", type=int, default=40, help="sweeps of three workers that are killed again and again"
    )
    asked = parser.parse_args(words)
    os.environ[VARIABLE] = DATABASE_PASSWORD
    bad = 0
    with ExitStack() as stack:
        # the path of a Unix socket is short
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deaths-")))
        server = stack.enter_context(databases.server(base / "server"))
        for storage in ("journal", "postgresql"):
            for scheduler in SCHEDULERS:
                place = base / f"{storage}-{scheduler}"
                if storage == "journal":
                    deaths = Deaths(place, scheduler)
                else:
                    deaths = Deaths(place, scheduler, lambda: server.url(server.new_database(), f"${{{VARIABLE}}}"))
                bad += _kill_all(f"{scheduler} on a {storage}", deaths, storage == "journal", asked.every, asked.rounds)
    return int(bad > 0)


def _kill_all(what: str, deaths: Deaths, is_journal: bool, every: int, rounds: int) -> int:
    """Kill workers in all ways, print what came of it, and return how many sweeps went wrong."""
    began, writes, count, bad = time.monotonic(), deaths.writes(), 0, 0
    for how in ("before", "after", "torn") if is_journal else ("before", "after"):
        for write in range(1, writes + 1, every):
            count += 1
            bad += _told(f"{what}, killed {how} write {write}", deaths.one(Death(write, how)))
    for seed in range(rounds):
        count += 1
        bad += _told(f"{what}, three workers, seed {seed}", deaths.many(seed, writes // 2))
    minutes = (time.monotonic() - began) / 60
    print(f"{what}: {writes} writes, {count} sweeps with deaths, {bad} of them wrong ({minutes:.1f} min)", flush=True)
    return bad


def _told(what: str, problems: list[str]) -> bool:
    for problem in problems:
        print(f"{what}: {problem}", flush=True)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
