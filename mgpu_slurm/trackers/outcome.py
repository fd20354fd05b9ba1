"""What trackers have of a run, as its folder records it, in words for people."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from mgpu_slurm.core.files import hold_if_free, read_json, write_json
from mgpu_slurm.core.formatting import counted, program, time_of
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import from_known
from mgpu_slurm.trackers.destinations import Destination
from mgpu_slurm.trackers.settled import Reports

FINISH_SECONDS = 30
"""How long the process that sends reports may take when the run has ended."""
GIVING_UP_SECONDS = 5
"""For so long after the end of a run, the process that sends its reports may still be starting."""


@dataclass(frozen=True)
class Sent:
    """What one tracker has of a run."""

    destination: str
    id: str = ""
    """The tracker's own id of the run."""
    address: str = ""
    step: int = 0
    """The step of the last report that was sent."""
    progress: int = 0
    """The progress of that report."""
    reports: int = 0
    """The number of reports that the tracker has."""
    problem: str = ""
    """Why the last attempt to send something failed; empty if it did not."""
    ended: str | None = None
    """When the tracker was told of the end of a job; None before."""
    attempt: int = 0
    """The attempt that was the last one then."""

    def knows_end_of(self, attempt: int) -> bool:
        """Return whether the tracker was told of the end of the job in which this attempt was the last one."""
        return self.ended is not None and self.attempt == attempt

    def changed(self, **values: Any) -> Sent:
        return replace(self, **values)


def read_sent(folder: RunFolder) -> list[Sent]:
    """Return what trackers have of a run."""
    return [from_known(Sent, each) for each in _recorded(folder).values()]


def _recorded(folder: RunFolder) -> dict[str, Any]:
    found = None
    # a file system that was lost may have left it empty
    with suppress(ValueError):
        found = read_json(folder.sinks)
    return found if isinstance(found, dict) else {}


def write_sent(folder: RunFolder, sent: Iterable[Sent]) -> None:
    """Record what trackers have of a run, next to what is recorded of others."""
    before = _recorded(folder)
    write_json(folder.sinks, before | {each.destination: asdict(each) for each in sent}, sync=False)


def runs_of_sweep(sweep: RunFolder, without: Collection[Path] = ()) -> Iterator[RunFolder]:
    """Yield the trials of a sweep that have reported anything; of a trial with several seeds, its runs.

    Args:
        without: folders of those to leave out, whose files are not looked at.
    """
    names = os.listdir(sweep.trials) if sweep.trials.is_dir() else []
    for number in sorted(int(name) for name in names if name.isdigit()):
        if sweep.of_trial(number).path not in without:
            trial, *seeds = sweep.of_trial(number).with_seeds()
            yield from (run for run in seeds or [trial] if run.path not in without and run.metrics.exists())


def lock_of(folder: RunFolder) -> Path:
    """Return the file that the process that sends a run's reports has locked."""
    return folder.sinks.with_suffix(".lock")


def await_end(runs: Sequence[RunFolder], sinks: Sequence[str], ended: str | None) -> None:
    """Wait until trackers know of the end of runs, or no process tells them any more; at most as long as that may take.

    Args:
        ended: when the last of them ended.
    """
    left, last = [run for run in runs if sinks and _has_started(run)], time_of(ended)
    while last is not None and (passed := datetime.now(last.tzinfo) - last) < timedelta(seconds=FINISH_SECONDS):
        left = [run for run in left if _lacking(run, sinks)]
        is_new = passed < timedelta(seconds=GIVING_UP_SECONDS)
        if not left or not (is_new or any(_may_be_told(run, sinks) for run in left)):
            return
        time.sleep(0.1)


def _has_started(run: RunFolder) -> bool:
    return run.metrics.exists() or records.attempts_started(run) > 0


def _lacking(run: RunFolder, sinks: Sequence[str]) -> list[Sent]:
    """Return what is recorded of the trackers that have not been told of the end of a run."""
    sent, attempt = _by_destination(run), records.attempts_started(run)
    return [each for sink in sinks if not (each := sent.get(sink, Sent(sink))).knows_end_of(attempt)]


def _may_be_told(run: RunFolder, sinks: Sequence[str]) -> bool:
    """Return whether a tracker may still be told of the end of a run: a process whose tracker has failed keeps its lock
    until it succeeds or ends."""
    if not all(sent.problem for sent in _lacking(run, sinks)):
        return True
    try:
        lock = hold_if_free(lock_of(run))
    except OSError:
        return True
    if lock is not None:
        os.close(lock)
    return lock is None


def has_all(folder: RunFolder, sinks: Sequence[str]) -> bool:
    """Return whether each tracker has all reports of a run and its end."""
    count, sent, attempt = _count(folder), _by_destination(folder), records.attempts_started(folder)
    return all(each in sent and _is_complete(sent[each], count, attempt) for each in sinks)


def lines(folder: RunFolder, sinks: Sequence[str]) -> list[str]:
    """Return for each tracker of a run where to find it, or how to send what it lacks."""
    if not sinks or not _has_started(folder):
        return []
    count, sent = _count(folder), _by_destination(folder)
    return [_line(folder, sent.get(each, Sent(each)), count) for each in sinks]


def lines_of_several(group: RunFolder, runs: Sequence[RunFolder], sinks: Sequence[str], thing: str) -> list[str]:
    """Return for each tracker of a group or sweep how many runs it has, and how to send what it lacks.

    Args:
        thing: what a run is, such as `trial`.
    """
    found = []
    runs = [run for run in runs if _has_started(run)]
    for sink in sinks if runs else ():
        complete = sum(has_all(run, [sink]) for run in runs)
        more = "" if complete == len(runs) else f"; send all: {_export(group, sink)}"
        found.append(f"{_tracker(sink):<9} has {complete} of {counted(len(runs), thing)}{more}")
    return found


def _tracker(sink: str) -> str:
    return Destination.parse(sink).tracker


def _line(folder: RunFolder, sent: Sent, count: int) -> str:
    word = f"{_tracker(sent.destination):<9}"
    attempt = records.attempts_started(folder)
    if _is_complete(sent, count, attempt):
        return f"{word} {sent.address}"
    late = "" if sent.knows_end_of(attempt) else f"it took longer than {FINISH_SECONDS} s"
    why = sent.problem or late or "a resume would repeat the others"
    part = f"{sent.reports} of {counted(count, 'report')} sent ({why})"
    return f"{word} {part}; send all: {_export(folder, sent.destination)}"


def _export(folder: RunFolder, sink: str) -> str:
    return f"{program()} export {folder.run} --to {_tracker(sink)}"


def _is_complete(sent: Sent, count: int, attempt: int) -> bool:
    return sent.reports == count and sent.knows_end_of(attempt) and not sent.problem


def _by_destination(folder: RunFolder) -> dict[str, Sent]:
    return {each.destination: each for each in read_sent(folder)}


def _count(folder: RunFolder) -> int:
    """Return the number of reports of a run."""
    reports = Reports(folder)
    reports.read()
    return len(reports.standing)
