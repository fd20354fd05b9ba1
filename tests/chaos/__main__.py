"""`make chaos`: rounds of trainings over which something comes, and a table of what came of them.

    python -m tests.chaos FOLDER --rounds 100 --seed 1 --shard 2/4

Each round is written down in FOLDER when it is done, and is not done again: who is interrupted goes on. Shards do
different rounds, and may be done beside each other, on machines of their own, with one FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tests.chaos import own_children, rounds
from tests.chaos.checks import Result
from tests.chaos.faults import Fault
from tests.chaos.on_slurm import Slurm
from tests.chaos.rounds import Round, Site
from tests.chaos.sweep import Sweep
from tests.chaos.training import LAYOUTS, Training
from tests.on_slurm import packages
from tests.on_slurm.cluster import Cluster

ON_SLURM = 6
"""Every sixth round is on a SLURM."""

SWEEPS_EVERY = 5
"""Rounds, of which one is of a sweep."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="trainings, and what comes over them")
    parser.add_argument("folder", type=Path, help="where rounds are written down")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", default="1", help="of all rounds")
    parser.add_argument("--shard", default="1/1", help="K/N: the K-th of N parts of them")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help="of all trainings, in place of sweeps and copies")
    parser.add_argument("--only", choices=["local", "slurm"], help="those rounds alone")
    parser.add_argument("--slurm", choices=packages.RELEASES, default=packages.OLDEST, help="the release of SLURM")
    parser.add_argument("--again", type=int, metavar="N", help="do this one round, whatever is known of it")
    parser.add_argument("--table", action="store_true", help="print what is known as a table, and do nothing")
    asked = parser.parse_args(words)
    asked.folder.mkdir(parents=True, exist_ok=True)
    if not asked.table:
        do(asked)
    ways = own_children.run(asked.rounds, asked.folder) if _are_children_due(asked) else []
    found = known(asked.folder)
    print("\n".join(table(list(found.values()))))
    bad = [number for number, done in found.items() if done.problems]
    print(f"\n{len(found)} rounds, {len(found) - len(bad)} of them as if nothing had happened")
    for way in ways:
        print(way.line)
    return 1 if bad or any(way.problem for way in ways) else 0


def _are_children_due(asked: argparse.Namespace) -> bool:
    """Whether this call does the rounds of processes that a job starts itself; of several shards the first does."""
    is_first = asked.again is None and asked.layout is None and asked.shard.startswith("1/")
    return is_first and not asked.table and asked.only != "slurm"


def do(asked: argparse.Namespace) -> None:
    part, parts = map(int, asked.shard.split("/"))
    done = {number for number, one in known(asked.folder).items() if one.seed.startswith(f"{asked.seed}-")}
    mine = [number for number in range(asked.rounds) if number % parts == part - 1]
    to_do = [number for number in mine if number not in done]
    if asked.again is not None:
        to_do = [asked.again]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        expected: dict[type[Training], dict[str, Result]] = {}
        slurm: Site | None = None
        for number in to_do:
            seed = f"{asked.seed}-{number}"
            is_on_slurm = number % ON_SLURM == ON_SLURM - 1
            if asked.only not in (None, "slurm" if is_on_slurm else "local"):
                continue
            if is_on_slurm and slurm is None:
                slurm = a_slurm(stack, scratch, asked.slurm)
            site: Site = slurm if is_on_slurm and slurm is not None else rounds.Here()
            turn = number // ON_SLURM if is_on_slurm else number - number // ON_SLURM
            faults = rounds.drawn(site, turn, seed)
            kind = _kind_of(asked, number, faults)
            if kind not in expected:
                (scratch / kind.what).mkdir()
                expected[kind] = rounds.undisturbed(kind, scratch / kind.what)
            one = rounds.run_until_hit(site, kind, faults, seed, expected[kind])
            (asked.folder / f"{number:04d}.json").write_text(json.dumps(asdict(one)) + "\n")
            print(line(number, one), flush=True)


def _kind_of(asked: argparse.Namespace, number: int, faults: Sequence[Fault]) -> type[Training]:
    if asked.layout is not None:
        return LAYOUTS[asked.layout]
    return Sweep if number % SWEEPS_EVERY == SWEEPS_EVERY - 1 and rounds.fit_for_sweeps(faults) else Training


def a_slurm(stack: ExitStack, folder: Path, release: str) -> Slurm:
    cluster = stack.enter_context(Cluster.up(folder / "cluster", release=release))
    # SLURM's commands for this process too, which looks at runs without starting the program each time
    os.environ.update(cluster.environ)
    return Slurm(cluster)


def known(folder: Path) -> dict[int, Round]:
    return {int(path.stem): Round(**json.loads(path.read_text())) for path in sorted(folder.glob("[0-9]*.json"))}


def line(number: int, one: Round) -> str:
    end = "; ".join(one.problems) or "exact"
    resumed = f", {one.resumed} by hand" if one.resumed else ""
    figures = f"{one.attempts} attempts{resumed}, {one.seconds} s"
    return f"{number:4} {one.where:5} {one.what:8} seed {one.seed:7} {one.words}: {figures}: {end}"


def table(found: Sequence[Round]) -> Iterator[str]:
    """By fault, in Markdown."""
    yield "| where | of a | fault | rounds | hit | attempts | resumed by hand | exact |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    kinds = sorted({_kind(one) for one in found})
    for kind in kinds:
        yield _row(*kind, [one for one in found if _kind(one) == kind])
    yield _row("", "", "**all**", found)


def _kind(one: Round) -> tuple[str, str, str]:
    return one.where, one.what, one.words if len(one.faults) == 1 else "two at once"


def _row(where: str, what: str, fault: str, some: Sequence[Round]) -> str:
    exact = sum(not one.problems for one in some)
    counts = [
        len(some),
        sum(one.hit for one in some),
        sum(one.attempts for one in some),
        sum(one.resumed for one in some),
        exact,
    ]
    return f"| {where} | {what} | {fault} | {' | '.join(map(str, counts))} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
