"""Make a report: `mgpu-slurm report`."""

from __future__ import annotations

import html
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import chain, count
from pathlib import Path

from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.files import write_whole
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.reports.facts.gather import ReportOptions, gather
from mgpu_slurm.reports.facts.report_facts import Facts
from mgpu_slurm.reports.page.html_page import page, stylesheet
from mgpu_slurm.run_folder import states
from mgpu_slurm.submission.project.outputs import GENERATOR, is_page

_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.DOTALL)
_LONGEST_NAME = 100
_SVG = re.compile(r"<svg id=\"(?P<ident>[\w-]+)\".*?</svg>", re.DOTALL)


def check_output(out: Path | None, folder: Path | None) -> None:
    """Check that the output can be written, before anything is read.

    Args:
        out: None for standard output.
        folder: for the charts as files; None for none.

    Raises:
        UserError: it cannot.
    """
    if out is not None:
        if out.is_dir():
            raise UserError(f"-o {out}: it is a folder: name a file, such as {out / 'report.html'}")
        if out.is_file() and out.stat().st_size > 0 and not is_page(out):
            raise UserError(f"-o {out}: the file exists and is no report: delete it, or name another")
        _check_folder(f"-o {out}", out.absolute().parent)
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--svg {folder}: it is a file: name a folder")
        _check_folder(f"--svg {folder}", folder if folder.exists() else folder.absolute().parent)


def _check_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{option}: there is no folder {folder}: create it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise UserError(f"{option}: folder {folder} is not yours to write into: name another")


def write_page(facts: Facts, out: Path | None, refresh: int | None, with_points: bool) -> int:
    """Write the page whole, or to standard output; return its bytes."""
    text = page(facts, refresh, with_points).encode()
    if out is None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        write_whole(out, text, sync=False)
    return len(text)


def write_charts(facts: Facts, folder: Path) -> list[str]:
    """Write each chart as an SVG file of its own, named after its title; return the names."""
    folder.mkdir(exist_ok=True)
    style = f"<!-- {GENERATOR} --><style>{stylesheet()}</style>"
    names: list[str] = []
    for found in _SVG.finditer(page(facts, with_points=False)):
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', found[0])
        assert size is not None
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[1]}" height="{size[2]}" font-family="sans-serif" '
        text = found[0].replace("<svg ", head, 1).replace(">", f">{style}", 1)
        names.append(_new_name(_words_of(found, facts), names))
        write_whole(folder / names[-1], text, sync=False)
    return names


def _words_of(chart: re.Match[str], facts: Facts) -> str:
    """Return the title of a chart; for a chart of a sweep, preceded by the sweep's name."""
    title = _TITLE.search(chart[0])
    words = html.unescape(title[1]) if title else chart["ident"]
    of_sweep = re.match(r"sweep-(\d+)-", chart["ident"])
    return f"{facts.sweeps[int(of_sweep[1])].run}-{words}" if of_sweep else words


def _new_name(title: str, taken: Collection[str]) -> str:
    words = re.sub(r"[^\w.]+", "-", title, flags=re.ASCII).strip("-.")[:_LONGEST_NAME]
    name = words or "chart"
    others = (f"{name}-{number}.svg" for number in count(2))
    return next(each for each in chain([f"{name}.svg"], others) if each not in taken)


def is_over(facts: Facts) -> bool:
    """Return whether all runs and sweeps have ended."""
    found = [run.state for run in facts.runs if run.kind == "run"] + [sweep.state for sweep in facts.sweeps]
    return not any(states.is_alive(state) for state in found)


def make(
    words: Sequence[str],
    options: ReportOptions,
    out: Path | None,
    refresh: int | None,
    with_points: bool,
    note: Note = quiet,
    said: Callable[[Facts, int], None] = lambda facts, size: None,
) -> Facts:
    """Gather and write a report; with `refresh`, again and again until all runs have ended.

    Args:
        refresh: seconds between two writes; None writes once.
        said: called after each write with what was written, and its bytes.
    """
    is_written = False
    while True:
        try:
            facts = gather(words, options, note)
            ends = refresh is None or is_over(facts)
            said(facts, write_page(facts, out, None if ends else refresh, with_points))
            is_written = True
            if ends or refresh is None:
                return facts
        except (MgpuError, OSError) as error:
            # a disk or a cluster that fails for a while does not end a page that is kept up to date
            if not is_written or refresh is None:
                raise
            note(f"the page is written again in {refresh} s: {error}")
        time.sleep(refresh)
