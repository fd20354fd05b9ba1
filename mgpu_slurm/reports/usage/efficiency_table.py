"""Show in a terminal where the time of runs went, what they used, and what to ask for next time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mgpu_slurm.core.formatting import binary_size, counted, duration, human_size
from mgpu_slurm.reports.usage.advice import LEAST_SECONDS, MOST_WAIT, Advice
from mgpu_slurm.reports.usage.efficiency import Efficiency, RunUse
from mgpu_slurm.reports.usage.ledger import Ledger, Part

ALWAYS: Sequence[Part] = ("training", "starting")
"""Parts that are shown even if they are nothing."""
NAMES: Mapping[Part, str] = {
    "training": "TRAINING",
    "starting": "STARTING",
    "saving": "SAVING",
    "repeated": "REPEATED",
    "failed": "FAILED",
    "between_trials": "IDLE",
    "other": "OTHER",
}
"""The columns of the parts, in their order."""

MOST_NAMES = 2
"""Number of runs that one line names; of more, the first one."""

LEFT_OUT_FIRST = ("ATTEMPTS", "STATE", "TIME", "WRITTEN", "READ", "POWER/GPU", "GPU MEMORY")
"""Columns that are left out on a narrow terminal, in this order; then those of the smallest parts."""


def lines(found: Efficiency, columns: int | None = None) -> list[str]:
    """Return the lines to show.

    Args:
        columns: the width of a terminal.
    """
    warnings = [f"warning   {text}" for text in found.warnings]
    if not found.runs:
        return [*warnings, "no run has started yet"]
    told = ["where the time went", *_table(_ledger_rows(found), columns, _smallest_parts(found))]
    told += ["", "used, of what was asked for", *_table(_use_rows(found.runs), columns)]
    long = [run.facts for run in found.runs if run.facts.used.seconds >= LEAST_SECONDS]
    waits = {facts.run: facts.used.wait for facts in long if (facts.used.wait or 0.0) > MOST_WAIT}
    if most := max((wait or 0.0 for wait in waits.values()), default=0.0):
        share = f"up to {most / (1 + most):.0%} of the time in which they had work"
        told.append(f"cores were short: threads of {_named(list(waits))} waited for one for {share}")
    if not any(run.facts.used.cores is not None for run in found.runs):
        told.append("memory and cores were not sampled: these runs are of an older version, or were killed at once")
    if found.advice:
        told += ["", "next time", *_table([_advice_row(each) for each in found.advice], left=3)]
    return [*told, *warnings]


def _smallest_parts(found: Efficiency) -> list[str]:
    """Return the columns of all parts except training, first those that are small for each run."""
    most = {name: max(run.facts.ledger.share(name) for run in found.runs) for name in NAMES if name != "training"}
    return [NAMES[name] for name in sorted(most, key=lambda name: most[name])]


def _ledger_rows(found: Efficiency) -> list[list[str]]:
    totals = found.ledgers
    shown = [name for name in NAMES if name in ALWAYS or any(total.share(name) for total in totals.values())]
    # one unit of time, so that the column can be compared
    in_hours = max(float(total.total) for total in totals.values()) >= 3600
    rows = [["RUN", "STATE", "ATTEMPTS", "TIME", "ALLOCATED", *(NAMES[name] for name in shown)]]
    for run in found.runs:
        facts = run.facts
        begin = [facts.run, facts.state, str(len(run.attempts)), duration(facts.used.seconds)]
        rows.append([*begin, *_ledger_cells(facts.ledger, facts.asked.unit, in_hours, shown)])
    if len(found.runs) > 1:
        rows += [["all", "", "", "", *_ledger_cells(total, unit, in_hours, shown)] for unit, total in totals.items()]
    return rows


def _ledger_cells(ledger: Ledger, unit: str, in_hours: bool, shown: Sequence[Part]) -> list[str]:
    seconds = float(ledger.total)
    amount, time = (seconds / 3600, "h") if in_hours else (seconds / 60, "min")
    number = "<0.1" if 0 < amount < 0.05 else f"{amount:.1f}"
    allocated = f"{number} {'GPU' if unit == 'gpu' else unit} {time}"
    return [allocated, *(_percent(float(getattr(ledger, name)), seconds) for name in shown)]


def _percent(part: float, total: float) -> str:
    if not part or not total:
        return "-"
    share = 100 * part / total
    return "<1%" if share < 1 else f"{share:.0f}%"


def _use_rows(runs: Sequence[RunUse]) -> list[list[str]]:
    has_gpus = any(run.facts.used.gpu is not None for run in runs)
    header = ["RUN", "LONGEST", "CORES/RANK", "MEMORY/NODE", "READ", "WRITTEN"]
    rows = [[*header, *(["GPU", "GPU MEMORY", "POWER/GPU"] if has_gpus else [])]]
    for run in runs:
        asked, used = run.facts.asked, run.facts.used
        mem = used.needed_memory
        row = [
            run.facts.run,
            _of(duration(used.longest), None if asked.time is None else duration(asked.time)),
            _of(_shown(used.cores, "{:.1f}"), None if asked.cpus_per_task is None else str(asked.cpus_per_task)),
            _of(_size(mem), None if asked.mem is None else binary_size(asked.mem)),
            "-" if used.read is None else human_size(used.read),
            "-" if used.wrote is None else human_size(used.wrote),
        ]
        if has_gpus:
            row += [_shown(used.gpu, "{:.0%}"), _size(used.gpu_mem), _shown(used.watts, "{:.0f} W")]
        rows.append(row)
    return rows


def _of(value: str, asked: str | None) -> str:
    return value if asked is None or value == "-" else f"{value} of {asked}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _size(value: int | None) -> str:
    return "-" if value is None else binary_size(value)


def _advice_row(advice: Advice) -> list[str]:
    return [advice.flags or advice.kind, _named(advice.runs), advice.why]


def _named(runs: Sequence[str]) -> str:
    first, *others = runs
    return ", ".join(runs) if len(runs) <= MOST_NAMES else f"{first} and {counted(len(others), 'other')}"


def _table(
    rows: Sequence[Sequence[str]], columns: int | None = None, left_out: Sequence[str] = (), left: int = 1
) -> list[str]:
    """Return the lines of a table.

    Args:
        columns: the width of a terminal.
        left_out: more columns that are left out on a narrow one.
        left: number of columns with text, which are aligned on the left.
    """
    from tabulate import tabulate

    align = ["left" if column < left else "right" for column in range(len(rows[0]))]
    text = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align)
    told = [f"  {line.rstrip()}" for line in text.splitlines()]
    first = next((name for name in (*LEFT_OUT_FIRST, *left_out) if name in rows[0]), None)
    if columns is None or first is None or max(map(len, told)) <= columns:
        return told
    place = rows[0].index(first)
    return _table([[*row[:place], *row[place + 1 :]] for row in rows], columns, left_out, left)
