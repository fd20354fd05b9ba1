"""What is reported: rows with figure, interval, target and verdict, kept as one section per benchmark in a file."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.measure import Estimate

HEADER = ["What", "Figure", "95% interval", "Pairs", "Target", "Met"]
TARGETS = "Targets"
"""Title of the section with all figures that have a target."""
PACKAGES = ("mgpu-slurm", "torch", "click", "numpy")


@dataclass(frozen=True)
class Row:
    """One figure. Targets are upper bounds."""

    what: str
    estimate: Estimate
    unit: str
    digits: int
    """Places behind the decimal point."""
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the figure meets the target; says where the interval leaves that open."""
        if self.target is None:
            return ""
        if self.estimate.value <= self.target:
            return "yes" if self.estimate.high <= self.target else "yes, but the interval reaches above"
        return "NO" if self.estimate.low > self.target else "NO, but the interval reaches below"

    def cells(self) -> list[str]:
        estimate = self.estimate
        shown = f"{estimate.value:.{self.digits}f} {self.unit}".rstrip()
        interval = f"{estimate.low:.{self.digits}f} to {estimate.high:.{self.digits}f}"
        target = "" if self.target is None else f"at most {self.target:g} {self.unit}".rstrip()
        return [self.what, shown, interval, str(estimate.count), target, self.verdict]


@dataclass(frozen=True)
class Section:
    """The outcome of one benchmark."""

    title: str
    about: str
    """What was measured, how, and against what."""
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def text(self, circumstances: str) -> str:
        """The section in Markdown, with its heading."""
        table = tabulate([row.cells() for row in self.rows], headers=HEADER, tablefmt="github", disable_numparse=True)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"## {self.title}\n\n{self.about}\n\n{circumstances}\n\n{table}\n" + (f"{notes}\n" if notes else "")


def replace_section(document: str, title: str, text: str) -> str:
    """The document with the section of that title replaced, or added at the end."""
    found = re.search(rf"^## {re.escape(title)}$.*?(?=^## |\Z)", document, re.MULTILINE | re.DOTALL)
    if found is None:
        return f"{document.rstrip()}\n\n{text}"
    rest = document[found.end() :]
    return document[: found.start()] + text + ("\n" + rest if rest else "")


def save(path: Path, preface: str, title: str, text: str) -> None:
    """Write a section, and the list of all figures with a target at the top."""
    document = path.read_text() if path.exists() else f"{preface}\n## {TARGETS}\n"
    document = replace_section(document, title, text)
    path.write_text(replace_section(document, TARGETS, _targets(document)))


def _targets(document: str) -> str:
    """The section with all rows of the document that have a target."""
    rows = []
    for title, section in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", document, re.MULTILINE | re.DOTALL):
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if title != TARGETS and len(cells) == len(HEADER) and cells[4].startswith("at most"):
                what, figure, _, _, target, met = cells
                rows.append([title, what, figure, target, met])
    missed = sum(row[-1].startswith("NO") for row in rows)
    table = tabulate(rows, headers=["Benchmark", "What", "Figure", "Target", "Met"], tablefmt="github")
    return f"## {TARGETS}\n\n{len(rows)} figures have a target; {missed} miss it.\n\n{table}\n"


def circumstances(load_before: float) -> str:
    """When and on what: figures without that say little.

    Args:
        load_before: the load average when the measurement started.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    if torch.cuda.is_available():
        versions += f", {torch.cuda.get_device_name()} with CUDA {torch.version.cuda}"
    return (
        f"{datetime.now():%Y-%m-%d %H:%M}; {len(os.sched_getaffinity(0))} cores of {_cpu_model()};"
        f" Linux {platform.release()}; Python {platform.python_version()}, {versions};"
        f" load average {load_before:.2f} before, {load():.2f} after."
    )


def load() -> float:
    """Processes that wanted to run, averaged over the last minute."""
    return os.getloadavg()[0]


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()
