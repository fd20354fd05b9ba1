"""The dependencies of a run: other runs that have to complete (`afterok`) or just end (`afterany`) first."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.executors.selection import is_queued
from mgpu_slurm.registry import current_state, lookup
from mgpu_slurm.registry.watch import ASK_EVERY
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState


@dataclass(frozen=True)
class Standing:
    """The state of a run's dependencies."""

    waiting_for: tuple[tuple[str, RunState], ...] = ()
    """`afterok` or `afterany`, with the state of each run that has not ended."""
    broken: str = ""
    """Why they can never be satisfied: a run that had to complete did not; empty if none failed."""


def named(after: Iterable[str], after_any: Iterable[str]) -> tuple[str, ...]:
    """Return dependencies in the spec's form, with the full names of the runs.

    Raises:
        UserError: there is no such run.
    """
    pairs = [("afterok", name) for name in after] + [("afterany", name) for name in after_any]
    return tuple(f"{kind}:{lookup.find(name).run}" for kind, name in pairs)


def left(folder: RunFolder, after: Sequence[str]) -> Sequence[str]:
    """Return the dependencies still to wait for: none once a run of the group has started."""
    has_started = after and any(records.attempts_started(member) for member in lookup.members(folder.group))
    return () if has_started else after


def standing(after: Iterable[str]) -> Standing:
    """Look up the runs in a spec's `after`.

    Raises:
        UserError: one no longer exists.
    """
    pairs = [dependency.partition(":")[::2] for dependency in after]
    try:
        asked = [(kind, lookup.find(name)) for kind, name in pairs]
    except UserError as gone:
        raise UserError(f"the run it waited for no longer exists ({gone}): submit it again without --after") from None
    # one request to SLURM serves all
    now = dict(current_state.current([folder for _, folder in asked]))
    waiting = []
    for kind, folder in asked:
        for member in lookup.members(folder):
            state = now[member]
            if states.is_alive(state.state):
                waiting.append((kind, state))
            elif kind == "afterok" and state.state != states.COMPLETED:
                return Standing(broken=f"waited for run {state.run}, which is {state.state}")
    return Standing(tuple(waiting))


def wait(folder: RunFolder, after: Sequence[str]) -> str:
    """Wait until a local run or group may start; return why it must not, or an empty string.

    SIGTERM has to be blocked: it means a cancel.
    """
    after = left(folder, after)
    pause, longest = 0.5, 1.0
    while True:
        try:
            found = standing(after)
            if found.broken or not found.waiting_for:
                return found.broken
            longest = max(ASK_EVERY.get(state.executor, 1.0) for _, state in found.waiting_for)
        except UserError as gone:
            return str(gone)
        except OSError:
            # the file system may answer again later
            longest = max(ASK_EVERY.values())
        pause = min(2 * pause, longest)
        if signal.sigtimedwait({signal.SIGTERM}, pause) is not None or folder.cancel_request.exists():
            return "cancelled"


def sbatch_option(after: Iterable[str]) -> str:
    """Return the value of sbatch's --dependency; empty if nothing is left to wait for.

    Raises:
        UserError: a run had to complete and did not, or is not a SLURM job.
        ClusterError: its job is on another cluster.
    """
    found = standing(after)
    if found.broken:
        raise UserError(f"{found.broken}: use --after-any to start anyway, or `resume` that run first")
    jobs: dict[str, list[str]] = {}
    current_state.check_are_of_this_cluster(state for _, state in found.waiting_for)
    for kind, state in found.waiting_for:
        if not is_queued(state) or state.job_id is None:
            raise UserError(f"run {state.run} is not in SLURM's queue: a SLURM job can wait only for SLURM jobs")
        job = state.job_id.partition("_")[0] if _is_whole(after, state) else state.job_id
        if job not in jobs.setdefault(kind, []):
            jobs[kind].append(job)
    return ",".join(":".join([kind, *ids]) for kind, ids in jobs.items())


def _is_whole(after: Iterable[str], state: RunState) -> bool:
    """Return whether the group was named, not this run of it: its array id then stands for all its runs."""
    return not any(dependency.endswith(f":{state.run}") for dependency in after)
