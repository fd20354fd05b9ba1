"""Repair of a damaged journal: write a new file with every record that can be kept, and leave the damaged one as it is.

Optuna numbers trials in the order in which the journal creates them. Removing a line by hand renumbers all trials after
it if it created one, so that values are assigned to the parameters of other trials.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from optuna.study import StudyDirection
from optuna.trial import TrialState

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import write_whole
from mgpu_slurm.core.formatting import counted, program, short_path
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import journal_lines
from mgpu_slurm.sweeps.study.journal_lines import CREATE_STUDY, CREATE_TRIAL, Record

_OPERATION = re.compile(rb'"op_code": ?(\d+)')


@dataclass
class _Place:
    """One line of the journal with its records, or consecutive damaged lines."""

    byte: int
    records: list[Record] = field(default_factory=list)
    damage: list[bytes] = field(default_factory=list)

    @property
    def created(self) -> int | None:
        """Return how many trials the damaged lines created; None if unknown."""
        known = [created for created in map(_created, self.damage) if created is not None]
        return sum(known) if known else None


def repair(folder: RunFolder) -> list[str]:
    """Write what can be kept of a sweep's damaged journal to a new file; return a report for people, in lines.

    Raises:
        UserError: the run is not a sweep, or has no journal.
    """
    if not sweep_state.is_sweep(folder):
        raise sweep_state.not_a_sweep(folder.run)
    if not folder.journal.exists():
        raise UserError(f"study {folder.run} has no journal: it is stored in a database")
    places = _places(folder.journal.read_bytes())
    damaged = [place for place in places if place.damage or len(place.records) > 1]
    if not damaged:
        return [f"{short_path(folder.journal)} is not damaged: nothing was written"]
    restored, left_out = _restore(places, sweep_file.load(folder.sweep))
    records = [record for place in places for record in place.records]
    repaired = folder.journal.with_name(f"{folder.journal.name}.repaired")
    write_whole(repaired, "".join(f"{json.dumps(record.content, separators=(',', ':'))}\n" for record in records))
    journal, copy = (shlex.quote(short_path(path)) for path in (folder.journal, repaired))
    where = ", ".join(str(place.byte) for place in damaged)
    kept = [counted(len(records), "record")]
    if restored:
        kept.append(f"{counted(restored, 'trial')} created again whose creation was lost")
    if left_out:
        kept.append(f"{counted(left_out, 'record')} left out, because it is unknown to which trials they belong")
    return [
        f"damaged   {counted(len(damaged), 'place')} in {journal}, at byte {where}",
        f"written   {copy}: {', '.join(kept)}",
        f"next      when no worker runs: mv {journal} {journal}.damaged && mv {copy} {journal}",
        f"resume    if trials are left: {program()} resume {folder.run}",
    ]


def _places(content: bytes) -> list[_Place]:
    places: list[_Place] = []
    byte = 0
    for line in content.split(b"\n")[:-1]:
        try:
            places.append(_Place(byte, journal_lines.records_of(line)))
        except ValueError:
            if not (places and places[-1].damage):
                places.append(_Place(byte))
            places[-1].damage.append(line)
        byte += len(line) + 1
    return places


def _created(line: bytes) -> int | None:
    """Return how many trials a damaged line created; None if unknown."""
    operations = _OPERATION.findall(line)
    if len(operations) < 2:
        # the keys are more reliable than the operation, which may be damaged
        if b'"study_id":' in line and b'"datetime_start":' in line:
            return 1
        if b'"trial_id":' in line or b'"study_name":' in line:
            return 0
    return operations.count(b"%d" % CREATE_TRIAL) if operations else None


def _restore(places: Sequence[_Place], sweep: Sweep) -> tuple[int, int]:
    """Insert records at damaged places, to keep the numbers of the trials after them.

    Returns:
        How many trials are created again, and how many records are left out because their trial is uncertain.
    """
    damaged = [place for place in places if place.damage]
    records = [record for place in places for record in place.records]
    created = [record for record in records if record.operation == CREATE_TRIAL]
    missing = 1 + max((record.trial for record in records if record.trial is not None), default=-1) - len(created)
    lost = {place.byte: place.created or 0 for place in damaged}
    silent = [place for place in damaged if place.created is None]
    left_out = 0
    missing -= sum(lost.values())
    if missing > 0 and len(silent) == 1:
        lost[silent[0].byte] = missing
    elif missing > 0:
        # it is unknown which place created the trials: records after the first place may belong to other trials
        after = places.index(damaged[0])
        left_out = sum(len(place.records) for place in places[after:])
        for place in places[after:]:
            place.records = []
        lost = {}
    study = created[0].study if created else 0
    if not any(record.operation == CREATE_STUDY for record in records):
        places[0].records.insert(0, _study(sweep))
    for place in damaged:
        place.records += [_trial(study, places, place) for _ in range(lost.get(place.byte, 0))]
    return sum(lost.values()), left_out


def _study(sweep: Sweep) -> Record:
    content = {
        "op_code": CREATE_STUDY,
        "worker_id": "repair",
        "study_name": sweep.study,
        "directions": [StudyDirection[each.direction.upper()] for each in sweep.objectives],
    }
    return Record.from_json(content)


def _trial(study: int | None, places: Sequence[_Place], place: _Place) -> Record:
    """Return a record that begins a trial; later records complete the trial, or a worker resumes it."""
    before = [record for other in places if other.byte < place.byte for record in other.records]
    starts = [record.begun for record in before if record.begun]
    content = {
        "op_code": CREATE_TRIAL,
        "worker_id": "repair",
        "study_id": study,
        "state": TrialState.RUNNING,
        "datetime_start": starts[-1] if starts else datetime.now().astimezone().isoformat(),
    }
    return Record.from_json(content)
