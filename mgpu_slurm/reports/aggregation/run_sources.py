"""Find the runs whose curves to read: own runs, trials of sweeps, and folders with event files of other programs."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import lookup
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission.project.outputs import AGGREGATE

EVENT_FILES = "*tfevents*"
PARTS = frozenset({"train", "training", "val", "valid", "validation", "test", "eval", "evaluation"})
"""Names of folders in which loggers keep a part of a run's curves, as Keras does."""


@dataclass(frozen=True)
class Source:
    """A run to read: an own run, or a folder with event files."""

    name: str
    place: str
    path: Path
    own: RunFolder | None = None
    is_study: bool = False
    """Whether it represents all trials of a sweep, including future ones."""
    parts: tuple[Path, ...] = ()
    """Folders below that of a foreign run, with more of its curves: they are no runs, and no repetitions of it."""

    @property
    def curves(self) -> Path:
        """The folder of its event files."""
        return self.path if self.own is None else self.own.tensorboard


def sources(words: Sequence[str], made_here: bool = False) -> list[Source]:
    """Return the runs that words name: runs, groups, sweeps, or folders with event files somewhere below.

    A sweep counts as one source; see `trials_of`.

    Args:
        made_here: whether curves that `aggregate` wrote are runs too.

    Raises:
        UserError: a word names nothing.
    """
    found: dict[Path, Source] = {}
    for word in words:
        for source in _sources_of(word, made_here):
            if source.own is None and len(words) > 1:
                # every logger has a version_0
                source = replace(source, name=_below_its_place(source))
            found.setdefault(source.path.resolve(), source)
    return list(found.values())


def _below_its_place(source: Source) -> str:
    place = Path(source.place).absolute().name
    return source.name if source.name == place else f"{place}/{source.name}"


def _sources_of(word: str, made_here: bool) -> Iterator[Source]:
    # other programs have trials as well
    is_foreign = os.path.isdir(word) and not RunFolder(Path(word).absolute()).sweep.exists()
    if not is_foreign and (trial := lookup.trial(word)) is not None:
        yield _trial(trial)
        return
    folder = Path(word)
    # of a name that is too long for a file, `Path.is_dir` raises an error
    if os.path.isdir(folder):
        below = list(_below(folder, made_here))
        if below:
            yield from below
            return
        if os.sep in word or word in (os.curdir, os.pardir):
            raise UserError(f"folder {word!r} has neither a run nor event files: name another")
    yield from _members(lookup.find(word))


def trials_of(found: Sequence[Source]) -> list[Source]:
    """Return the runs, with each sweep replaced by its trials that have begun."""
    return [run for source in found for run in (_trials(source) if source.is_study else [source])]


def runs_of(found: Sequence[Source]) -> list[Source]:
    """Return the runs as `trials_of`, with each trial that is trained with several seeds replaced by its runs."""
    return [run for trial in trials_of(found) for run in _runs(trial)]


def _runs(trial: Source) -> list[Source]:
    seeds = [] if trial.own is None else trial.own.with_seeds()[1:]
    return [_trial(run) for run in sorted(seeds, key=lambda run: int(run.path.name))] or [trial]


def _trials(study: Source) -> Iterator[Source]:
    assert study.own is not None
    names = os.listdir(study.own.trials) if study.own.trials.is_dir() else []
    for number in sorted(int(name) for name in names if name.isdigit()):
        yield _trial(study.own.of_trial(number))


def _trial(folder: RunFolder) -> Source:
    return Source(folder.run, folder.group.run, folder.path, folder)


def _members(folder: RunFolder) -> Iterator[Source]:
    if records.read_state(folder).kind == "sweep":
        # a sweep's tasks are workers, which train one trial after another and have no curves themselves
        yield Source(folder.run, folder.run, folder.path, folder, is_study=True)
        return
    for member in lookup.members(folder):
        yield Source(member.run, member.group.run, member.path, member)


def _below(folder: Path, made_here: bool) -> Iterator[Source]:
    """Yield the runs in a folder: own runs, and each folder with event files that is no part of another run, except
    hidden ones."""
    seen = set()
    # the foreign run of each folder with event files
    foreign: dict[Path, Path] = {}
    for path, subfolders, files in os.walk(folder, followlinks=True):
        place = os.path.realpath(path)
        if place in seen:
            # a link to a folder that was visited already
            subfolders.clear()
            continue
        seen.add(place)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if "spec.yaml" in files and "state.json" in files:
            yield from _members(RunFolder(Path(path).absolute()))
            subfolders.clear()
        elif AGGREGATE in files and not made_here:
            # curves of several runs, and not a run itself
            subfolders.clear()
        elif fnmatch.filter(files, EVENT_FILES):
            foreign[Path(path)] = _run_of(Path(path), folder, foreign)
    parts: dict[Path, list[Path]] = {}
    for curves, run in foreign.items():
        parts.setdefault(run, []).extend([curves] if curves != run else [])
    for run, below in parts.items():
        name = os.path.relpath(run, folder).removeprefix("tensorboard/")
        yield Source(folder.absolute().name if name == os.curdir else name, str(folder), run, parts=tuple(below))


def _run_of(path: Path, top: Path, known: Mapping[Path, Path]) -> Path:
    """Return the folder of the run to which a folder with event files belongs.

    Args:
        top: the folder that was searched.
        known: those of the folders above it.
    """
    if path == top:
        return path
    above = next((known[each] for each in path.parents if each in known), None)
    if above is not None:
        return above
    return path.parent if path.name.lower() in PARTS else path
