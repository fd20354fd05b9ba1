"""What a run waits for before it starts: other runs that complete (`afterok`) or just end (`afterany`)."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.executors.selection import is_queued
from mgpu_slurm.registry import current_state, lookup
from mgpu_slurm.registry.watch import ASK_EVERY


@dataclass(frozen=True)
class Standing:
    """How far that is."""

    waiting_for: tuple[tuple[str, current_state.State], ...] = ()
    """`afterok` or `afterany`, and how a run stands that has not ended."""
    broken: str = ""
    """Why it will never be: a run that had to complete did not; empty where none has failed."""


def named(after: Iterable[str], after_any: Iterable[str]) -> tuple[str, ...]:
    """The spec's form of what a call named, by the whole names of the runs.

    Raises:
        UserError: there is no such run.
    """
    pairs = [("afterok", name) for name in after] + [("afterany", name) for name in after_any]
    return tuple(f"{kind}:{lookup.find(name).run}" for kind, name in pairs)


def left(folder: RunFolder, after: Sequence[str]) -> Sequence[str]:
    """What a run or group still has to wait for, of what its spec names: once one has started, all has been."""
    has_started = after and any(records.attempts_started(member) for member in lookup.members(folder.group))
    return () if has_started else after


def standing(after: Iterable[str]) -> Standing:
    """Looks at the runs that a spec's `after` names.

    Raises:
        UserError: one is not there any more.
    """
    pairs = [dependency.partition(":")[::2] for dependency in after]
    try:
        asked = [(kind, lookup.find(name)) for kind, name in pairs]
    except UserError as gone:
        raise UserError(f"the run it waited for no longer exists ({gone}): submit it again without --after") from None
    # one question to SLURM serves all
    now = dict(current_state.current([folder for _, folder in asked]))
    waiting = []
    for kind, folder in asked:
        for member in lookup.members(folder):
            state = now[member]
            if states.is_alive(state["state"]):
                waiting.append((kind, state))
            elif kind == "afterok" and state["state"] != states.COMPLETED:
                return Standing(broken=f"waited for run {state['run']}, which is {state['state']}")
    return Standing(tuple(waiting))


def wait(folder: RunFolder, after: Sequence[str]) -> str:
    """Blocks until a local run or group may start, and returns why it may not; empty where it may.

    Expects SIGTERM blocked: it means a cancel.
    """
    after = left(folder, after)
    pause, longest = 0.5, 1.0
    while True:
        try:
            found = standing(after)
            if found.broken or not found.waiting_for:
                return found.broken
            longest = max(ASK_EVERY.get(state["executor"], 1.0) for _, state in found.waiting_for)
        except UserError as gone:
            return str(gone)
        except OSError:
            # a file system that does not answer does so later
            longest = max(ASK_EVERY.values())
        pause = min(2 * pause, longest)
        if signal.sigtimedwait({signal.SIGTERM}, pause) is not None or folder.cancel_wish.exists():
            return "cancelled"


def sbatch_option(after: Iterable[str]) -> str:
    """What sbatch's --dependency takes; empty where nothing is left to wait for.

    Raises:
        UserError: a run had to complete and did not, or is no job.
        ClusterError: it is one of another cluster.
    """
    found = standing(after)
    if found.broken:
        raise UserError(f"{found.broken}: use --after-any to start all the same, or `resume` that one first")
    jobs: dict[str, list[str]] = {}
    current_state.check_are_of_this_cluster(state for _, state in found.waiting_for)
    for kind, state in found.waiting_for:
        if not is_queued(state) or state["job_id"] is None:
            raise UserError(f"run {state['run']} is no job in SLURM's queue: only such a one can be waited for")
        job = state["job_id"].partition("_")[0] if _is_whole(after, state) else state["job_id"]
        if job not in jobs.setdefault(kind, []):
            jobs[kind].append(job)
    return ",".join(":".join([kind, *ids]) for kind, ids in jobs.items())


def _is_whole(after: Iterable[str], state: current_state.State) -> bool:
    """Whether a group was named, and not this run of it: its array then stands for all its runs."""
    return not any(dependency.endswith(f":{state['run']}") for dependency in after)
