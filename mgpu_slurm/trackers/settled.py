"""Read the reports of a run, and tell which are settled: those that no later attempt can take back."""

from __future__ import annotations

import json
from pathlib import Path

from mgpu_slurm.core.files import complete_lines
from mgpu_slurm.run_folder.checkpoint_names import complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report, from_known


class Reports:
    """The reports in `metrics.jsonl`, read as the file grows."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._offset = 0
        self.standing: list[Report] = []
        """The reports that no later attempt has taken back yet, by increasing progress."""
        self._saved: tuple[Path, int] | None = None
        """The checkpoint that was looked at last, and the progress of the training in it."""

    def read(self) -> None:
        """Read what was added since the last call."""
        try:
            lines = complete_lines(self._folder.metrics, self._offset)
        except FileNotFoundError:
            return
        for line in lines:
            self._offset += len(line) + 1
            report = _report_of(line)
            if report is not None:
                self._add(report)

    def _add(self, report: Report) -> None:
        if self.standing and report.attempt < self.standing[-1].attempt:
            # an attempt that still runs on an abandoned node
            return
        while self.standing and self.standing[-1].progress >= report.progress:
            # the run went back before it
            self.standing.pop()
        self.standing.append(report)

    def settled(self) -> list[Report]:
        """Return the reports that are in the newest checkpoint: a later attempt starts after them."""
        if not self.standing:
            return []
        saved = self._saved_progress()
        return [report for report in self.standing if report.progress <= saved]

    def _saved_progress(self) -> int:
        for path in reversed(complete_checkpoints(self._folder)):
            if self._saved is not None and self._saved[0] == path:
                return self._saved[1]
            progress = _progress_in(path)
            if progress is not None:
                self._saved = path, progress
                return progress
        return 0


def _report_of(line: bytes) -> Report | None:
    """Return the report in a line, or None if the line is damaged."""
    try:
        values = json.loads(line)
        report = from_known(Report, {"attempt": 1, **values})
        for number in (report.progress, report.step, report.attempt):
            int(number)
        for value in report.values.values():
            float(value)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None
    return report


def _progress_in(checkpoint: Path) -> int | None:
    """Return the progress of the training in a checkpoint; None if that has just been deleted, or is damaged.

    Only these two names of rank 0's record are read, as its package needs torch.
    """
    try:
        facts = json.loads((checkpoint / "rank-00000.json").read_bytes())["shared"]["facts"]
        return int(facts["progress"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
