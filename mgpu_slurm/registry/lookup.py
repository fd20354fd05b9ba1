"""Find runs and groups, all of this user or the one of a name or job id, and the logs of a run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from datetime import datetime, timezone
from pathlib import Path

from mgpu_slurm.core.errors import UserError, suggestion
from mgpu_slurm.core.formatting import counted, latest, program, time_of
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors import supervisors
from mgpu_slurm.executors.slurm_states import NEVER_ARRIVED
from mgpu_slurm.registry import cleanup, sweep_state
from mgpu_slurm.registry.current_state import current, recorded
from mgpu_slurm.registry.index import folders, refuse_closed, roots
from mgpu_slurm.registry.run_names import NEWEST, NEWEST_FAILED, first_part, named
from mgpu_slurm.run_folder import layout, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

_JOB_ID = re.compile(r"\d+(_\d+)?")

_TRIAL = re.compile(rf"(?P<sweep>.+)/{layout.TRIALS}/(?P<number>\d{{1,9}})(/{layout.SEEDS}/(?P<seed>\d{{1,19}}))?/*")

_NEVER = datetime.min.replace(tzinfo=timezone.utc)


def all_groups(note: Note = quiet) -> list[RunFolder]:
    """Return all groups and single runs, newest first; `note` is as for `current`."""
    return list(dict.fromkeys(folder.group for folder, _ in all_states(note)))


def all_states(note: Note = quiet) -> list[tuple[RunFolder, RunState]]:
    """Return all runs with their states, newest first, runs of a group in order; `note` is as for `current`."""
    found = current([folder for root in roots() for folder in folders(root)], note)
    gone = _removed(found)
    left = [pair for pair in found if pair[0].group not in gone]
    newest: dict[RunFolder, datetime] = {}
    for folder, state in left:
        # a part of a group may have been resubmitted
        newest[folder.group] = max(newest.get(folder.group, _NEVER), time_of(state.submitted) or _NEVER)
    return sorted(left, key=lambda pair: (newest[pair[0].group], pair[0].group.run), reverse=True)


def _removed(found: list[tuple[RunFolder, RunState]]) -> set[RunFolder]:
    """Delete and return submissions that were killed before SLURM had the job."""
    here = {folder.group for folder, state in found if state.reason != NEVER_ARRIVED.reason}
    gone = {folder.group for folder, _ in found} - here
    unused = {folder for folder in gone if not folder.tasks.exists() and not list(folder.logs.glob("*"))}
    for folder in unused:
        # another user's cannot be deleted
        with contextlib.suppress(UserError):
            cleanup.delete_run(folder)
    return unused


def find(name: str) -> RunFolder:
    """Return the run or group with this name, prefix or job id; `<group>/<index>` is one run of a group.

    `@last` is the run or group that this user has submitted or resumed last, `@last-failed` the newest run or sweep of
    theirs that has failed.

    Raises:
        UserError: none or several match, or it is closed to this user.
    """
    if name == NEWEST:
        return _newest()
    if name == NEWEST_FAILED:
        return _newest_failed()
    if name.startswith("@") and "/" not in name:
        raise UserError(f"{name}: such names are {NEWEST} and {NEWEST_FAILED}")
    if not name:
        raise UserError(f"the name of the run is empty: see `{program()} status`")
    if os.path.exists(Path(name) / "spec.yaml"):
        return RunFolder(Path(name).absolute())
    if (one := trial(name)) is not None:
        raise UserError(
            f"{one.run} is a trial, and only runs can be named here: see `{program()} trials {one.group.run}`"
        )
    head, slash, index = name.rpartition("/")
    if slash and index.isdigit():
        return _task(find(head), int(index))
    known = [folder for root in roots() for folder in folders(root)]
    found = (
        named(name, known)
        or without_confirmations([folder for folder in known if folder.run.startswith(name)])
        or (_with_job(name, known) if _JOB_ID.fullmatch(name) else [])
    )
    here = [folder for folder in found if folder.path.parent == layout.runs_root().resolve()]
    if len(here) == 1:
        # a run of another project may have the same name
        return here[0]
    if len(found) > 1 and len({folder.run for folder in found}) == 1:
        places = ", ".join(str(folder.path) for folder in found[-5:])
        raise UserError(f"run {name!r} exists in several places: name it by its folder: {places}")
    if len(found) > 1:
        names = ", ".join(sorted(folder.run for folder in found)[-5:])
        raise UserError(f"run {name!r} matches several runs ({names}): type more of the name, or use {NEWEST}")
    if not found:
        refuse_closed(name)
        if f"/{layout.TRIALS}/" in name:
            raise UserError(f"there is no trial {name!r}: name one as SWEEP/{layout.TRIALS}/NUMBER")
        hint = suggestion(name, [*(folder.run for folder in known), *(first_part(folder.run) for folder in known)])
        raise UserError(f"there is no run {name!r}{hint}: see `{program()} status`")
    return found[0]


def trial(name: str) -> RunFolder | None:
    """Return the trial that `SWEEP/trials/NUMBER` stands for, or its run with one of several seeds for
    `SWEEP/trials/NUMBER/seeds/SEED`; None for any other name.

    Raises:
        UserError: there is no such sweep or trial, or it has not started.
    """
    found = _TRIAL.fullmatch(name)
    if found is None:
        return None
    sweep = find(found["sweep"])
    folder = sweep.of_trial(int(found["number"]))
    if found["seed"] is not None and folder.path.is_dir():
        folder = folder.of_seed(int(found["seed"]))
    if not sweep_state.is_sweep(sweep):
        raise UserError(f"{sweep.run} is no sweep: it has no trials")
    if not folder.path.is_dir():
        what = f"trial {found['number']}" + ("" if found["seed"] is None else f" with seed {found['seed']}")
        raise UserError(f"{sweep.run} has no {what}, or it has not started: see `{program()} trials {sweep.run}`")
    return folder


def single_trial(name: str) -> RunFolder | None:
    """Return what `trial` returns, if it has logs and checkpoints itself.

    Raises:
        UserError: as `trial`, or its runs with several seeds have them.
    """
    folder = trial(name)
    if folder is not None and (seeds := folder.with_seeds()[1:]):
        first = min(seeds, key=lambda seed: int(seed.path.name))
        raise UserError(f"{folder.run} was trained with {counted(len(seeds), 'seed')}: name one, such as {first.run}")
    return folder


def _newest() -> RunFolder:
    known = without_confirmations([folder for root in roots() for folder in folders(root) if _is_own(folder)])
    if not known:
        raise UserError(f"{NEWEST}: there are no runs yet: start one with `{program()} submit`")
    return max(known, key=_submitted)


def _submitted(folder: RunFolder) -> datetime:
    """Return when a run, or any run of a group, was submitted or resumed last."""
    return time_of(latest(state.submitted for _, state in records.read_states(folder))) or _NEVER


def without_confirmations(found: Collection[RunFolder]) -> list[RunFolder]:
    """Return folders without the confirmations of sweeps among them, whose workers are those of the sweeps."""
    return [
        folder
        for folder in found
        if not (sweep_state.is_confirmation(folder) and sweep_state.confirmed_by(folder) in found)
    ]


def _newest_failed() -> RunFolder:
    groups: dict[RunFolder, dict[RunFolder, RunState]] = {}
    for folder, state in all_states():
        groups.setdefault(folder.group, {})[folder] = state
    for group, runs in groups.items():
        if not _is_own(group):
            continue
        if sweep_state.is_sweep(group):
            if sweep_state.state_of(group, [*runs.values()]).state in states.FAILURES:
                return group
            continue
        failed = {
            folder: time_of(state.ended) or _NEVER for folder, state in runs.items() if state.state in states.FAILURES
        }
        if failed:
            return max(failed, key=lambda folder: failed[folder])
    raise UserError(f"{NEWEST_FAILED}: no run has failed: see `{program()} status`")


def _is_own(folder: RunFolder) -> bool:
    return os.stat(folder.path).st_uid == os.getuid()


def _task(folder: RunFolder, task: int) -> RunFolder:
    runs = len(members(folder))
    if not is_group(folder):
        raise UserError(f"run {folder.run} is a single run, not a group: it has no run {task}")
    if task >= runs and sweep_state.is_sweep(folder):
        workers = f"{folder.run}/0" + (f" to {folder.run}/{runs - 1}" if runs > 1 else "")
        raise UserError(
            f"sweep {folder.run} has no worker {task}, only {workers}; its trials are"
            f" {folder.run}/{layout.TRIALS}/NUMBER"
        )
    if task >= runs:
        raise UserError(f"group {folder.run} has runs {folder.run}/0 to {folder.run}/{runs - 1}, not {task}")
    return folder.of_task(task)


def _with_job(job_id: str, known: list[RunFolder]) -> list[RunFolder]:
    """Return single runs by `42`, groups by the id of their array, and a run of a group by `42_3`."""
    array, _, _ = job_id.partition("_")
    found = []
    for folder in known:
        if sweep_state.is_confirmation(folder):
            # its workers are those of its sweep
            continue
        arrays = {submission.job_id for submission in records.submissions(folder)}
        members = [member for member, state in recorded(folder) if state.job_id == job_id]
        # the job of a group's run that was resumed alone is recorded only in that run
        found += [folder] if job_id in arrays else members or ([folder] if array in arrays else [])
    return found


def is_group(folder: RunFolder) -> bool:
    return records.read_state(folder).tasks is not None


def members(folder: RunFolder) -> list[RunFolder]:
    """Return the runs of a group; for a single run, the run itself."""
    tasks = records.read_state(folder).tasks
    return [folder] if tasks is None else [folder.of_task(task) for task in range(tasks)]


# -- the logs of a run: the output of its ranks, and of its batch scripts or supervisors


def logs_of_rank(folder: RunFolder, rank: int, attempts: range) -> list[Path]:
    """Return the existing logs of a rank in these attempts."""
    return [path for path in (folder.rank_log(attempt, rank) for attempt in attempts) if path.exists()]


def launch_logs(folder: RunFolder) -> list[Path]:
    """Return the logs of the batch scripts or supervisors of a run or group, oldest first."""
    found = sorted(folder.group.logs.glob("launch-*.log"), key=lambda path: path.stat().st_mtime)
    if folder.task is None:
        return found
    # a job may have failed before it started the run
    jobs = {submission.job_of(folder.task) for submission in records.submissions_of(folder)}
    jobs |= {event.job_id for event in records.events(folder)}
    names = jobs | {supervisors.log_name(records.read_state(folder).executor, folder)}
    return [path for path in found if path.stem.removeprefix("launch-") in names]
