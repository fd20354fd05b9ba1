"""The tables of `efficiency`."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mgpu_slurm.reports.usage import efficiency_table
from mgpu_slurm.reports.usage.advice import advice_for
from mgpu_slurm.reports.usage.efficiency import Efficiency, RunUse
from mgpu_slurm.reports.usage.ledger import Ledger
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from tests.reports.usage.test_advice import GIB, HOUR, RUN

LEDGER = Ledger(training=Fraction(9 * HOUR), repeated=Fraction(HOUR), saving=Fraction(HOUR, 100))


def found(*names: str) -> Efficiency:
    used = replace(RUN.used, mem_shared=10 * GIB, gpu_mem=21 * GIB, watts=412.3, read=10**12, wrote=5_000_000)
    facts = [replace(RUN, run=name, used=used, ledger=LEDGER) for name in names]
    spec = Spec("train", Target(command=("true",)), "local", Resources())
    return Efficiency([RunUse(each, "run", None, [], spec, [], []) for each in facts], advice_for(facts), ["a warning"])


def test_wide_terminal_shows_all() -> None:
    assert efficiency_table.lines(found("train")) == [
        "where the time went",
        "  RUN        STATE  ATTEMPTS   TIME   ALLOCATED  TRAINING  STARTING  SAVING  REPEATED",
        "  train  COMPLETED         0  3h00m  10.0 GPU h       90%         -     <1%       10%",
        "",
        "used, of what was asked for",
        "  RUN           LONGEST  CORES/RANK           MEMORY/NODE    READ  WRITTEN  GPU  GPU MEMORY  POWER/GPU",
        "  train  3h00m of 4h00m    6.0 of 8  10.0 GiB of 64.0 GiB  1.0 TB   5.0 MB  80%    21.0 GiB      412 W",
        "",
        "next time",
        "  --mem 13G  train  a node needed 10.0 GiB of 64.0 GiB",
        "warning   a warning",
    ]


def test_narrow_terminal_leaves_columns_out() -> None:
    told = efficiency_table.lines(found("train"), columns=50)
    assert told[1] == "  RUN     ALLOCATED  TRAINING  SAVING  REPEATED"
    assert told[5] == "  RUN           LONGEST  CORES/RANK           MEMORY/NODE  GPU"


def test_several_runs_have_a_sum_and_share_their_advice() -> None:
    told = efficiency_table.lines(found("a", "b", "c"))
    assert told[5].split() == ["all", "30.0", "GPU", "h", "90%", "-", "<1%", "10%"]
    assert told[-2].split()[:5] == ["--mem", "13G", "a", "and", "2"]


def test_times_of_all_runs_have_one_unit() -> None:
    made = found("a", "b")
    short = replace(made.runs[0], facts=replace(made.runs[0].facts, ledger=Ledger(training=Fraction(60))))
    assert [line.split()[4:7] for line in efficiency_table.lines(replace(made, runs=[short, made.runs[1]]))[2:4]] == [
        ["<0.1", "GPU", "h"],
        ["10.0", "GPU", "h"],
    ]
    (line,) = efficiency_table.lines(replace(made, runs=[short]))[2:3]
    assert line.split()[4:7] == ["1.0", "GPU", "min"]


def test_cores_that_others_used_are_said() -> None:
    made = found("a", "b")
    facts = replace(made.runs[1].facts, used=replace(made.runs[1].facts.used, wait=0.98))
    told = efficiency_table.lines(replace(made, runs=[made.runs[0], replace(made.runs[1], facts=facts)]))
    words = "cores were short: threads of b waited for one for up to 49% of the time in which they had work"
    assert words in told
