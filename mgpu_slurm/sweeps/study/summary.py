"""The summary of a sweep, made from its study: for the file that `status` reads, and for callers with the study."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core.files import locked, write_whole
from mgpu_slurm.registry.sweep_state import confirmation_folder, is_confirmation
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import now
from mgpu_slurm.run_folder.sweep_records import SchedulePart, SweepSummary, TrialSummary
from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS
from mgpu_slurm.sweeps.scheduling.construction import scheduler_of
from mgpu_slurm.sweeps.scheduling.judged_values import is_feasible, value_of
from mgpu_slurm.sweeps.scheduling.observations import COPY_OF
from mgpu_slurm.sweeps.scheduling.rungs import values_at
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.parameters import Parameter, Values, share_of_range
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.snapshots import (
    ORIGIN,
    SECONDS,
    Snapshots,
    copy_of,
    is_paused,
    until_of,
)

RECENT = 50
"""Number of recently ended trials listed in `summary.json`."""

BEST_SHARE, FEWEST_BEST = 0.1, 3
"""The best trials whose values are compared with the ends of ranges."""

EDGE = 0.05
"""Part of a range at each of its ends."""

_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


def own_trials(study: Study) -> list[FrozenTrial]:
    """Return the study's trials without those copied from an earlier study."""
    return [trial for trial in study.get_trials(deepcopy=False) if ORIGIN not in trial.system_attrs]


def ranked(trials: Iterable[FrozenTrial], sweep: Sweep) -> list[FrozenTrial]:
    """Return the complete trials that violate no constraint, best first; of equal ones, the earlier first.

    With several objectives, a later one counts where the earlier ones are equal.
    """
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and is_feasible(trial)]
    return sorted(complete, key=lambda trial: (*losses(trial, sweep), trial.number))


def best_of(trials: Iterable[FrozenTrial], sweep: Sweep) -> FrozenTrial | None:
    return next(iter(ranked(trials, sweep)), None)


def front_of(trials: Iterable[FrozenTrial], sweep: Sweep) -> list[FrozenTrial]:
    """Return the Pareto front: the trials that no other beats, by being better in one objective and as good in all.

    They are ranked by the first objective; of equal trials, only the first is returned.
    """
    front: list[FrozenTrial] = []
    found: list[tuple[float, ...]] = []
    for trial in ranked(trials, sweep):
        # in this order, no later trial is better than an earlier one in all objectives
        own = losses(trial, sweep)
        if not any(covers(other, own) for other in found):
            front.append(trial)
            found.append(own)
    return front


def losses(trial: FrozenTrial, sweep: Sweep) -> tuple[float, ...]:
    """Return the values of a complete trial, such that lower is better."""
    return tuple(each.loss(value) for each, value in zip(sweep.objectives, trial.values, strict=True))


def covers(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether the first are at least as good in all objectives."""
    return all(own <= other for own, other in zip(losses, others, strict=True))


def counts(trials: Sequence[FrozenTrial], sweep: Sweep) -> dict[str, int]:
    """Return the number of trials in each of Optuna's states, and of paused ones; those that have not begun are
    waiting."""
    found = {state.name: 0 for state in TrialState} | {"PAUSED": 0}
    for trial in trials:
        found[_state(trial, sweep)] += 1
    found["WAITING"] += max(0, (sweep.trials or 0) - len(trials))
    return found


def _state(trial: FrozenTrial, sweep: Sweep) -> str:
    return "PAUSED" if is_paused(trial, sweep.pruner) else trial.state.name


def promotable(study: Study, sweep: Sweep, is_over: bool) -> int:
    """Return how many paused trials the scheduler would promote if more workers came.

    Args:
        is_over: whether the budget is spent.
    """
    if not sweep.pruner.pauses:
        return 0
    scheduler = scheduler_of(sweep.pruner, sweep.direction)
    return scheduler.promotable(Snapshots(study, scheduler).take(sweep.trials, is_over))


def summarize(study: Study, sweep: Sweep) -> SweepSummary:
    trials = own_trials(study)
    order = ranked(trials, sweep)
    best = next(iter(order), None)
    ended = [trial for trial in trials if trial.state in _ENDED and trial.datetime_complete is not None]
    ended.sort(key=lambda trial: (trial.datetime_complete, trial.number))
    over = studies.why_over(study)
    return SweepSummary(
        study=sweep.study,
        metric=sweep.metric,
        direction=sweep.direction,
        metrics={each.metric: each.direction for each in sweep.objectives} if _has_front(sweep) else None,
        trials=counts(trials, sweep),
        best=None if best is None else replace(described(best, sweep), schedule=schedule_of(best, trials, sweep)),
        front=tuple(described(trial, sweep) for trial in front_of(trials, sweep)) if _has_front(sweep) else (),
        known=tuple(described(trial, sweep) for trial in trials if _is_known_point(trial, sweep)),
        given_back=sum(studies.was_given_back(trial, sweep) for trial in trials),
        paused=_paused(trials, sweep),
        promotable=promotable(study, sweep, is_over=over is not None),
        narrow=narrow_ranges(order, sweep) or None,
        furthest=None if best is not None else _furthest(trials, sweep),
        confirm=0 if sweep.confirm is None else sweep.confirm.top,
        over=over,
        seconds={"complete": _seconds(trials, TrialState.COMPLETE), "pruned": _seconds(trials, TrialState.PRUNED)},
        recent=tuple(described(trial, sweep) for trial in ended[-RECENT:]),
        updated=now(),
    )


def _has_front(sweep: Sweep) -> bool:
    return len(sweep.objectives) > 1


def _paused(trials: Iterable[FrozenTrial], sweep: Sweep) -> dict[str, int]:
    """Return the number of paused trials by the progress of their rung."""
    found = Counter(until_of(trial) for trial in trials if is_paused(trial, sweep.pruner))
    return {str(sweep.pruner.rungs[rung]): found[rung] for rung in sorted(found)}


def _furthest(trials: Iterable[FrozenTrial], sweep: Sweep) -> TrialSummary | None:
    """Return the best of the paused trials that have come furthest."""
    sign = -1 if sweep.direction == "maximize" else 1
    paused = [trial for trial in trials if is_paused(trial, sweep.pruner) and is_feasible(trial)]
    rank = {trial.number: (-until_of(trial), sign * _at_rung(trial, sweep), trial.number) for trial in paused}
    found = min(paused, key=lambda trial: rank[trial.number], default=None)
    return None if found is None else described(found, sweep)


def _at_rung(trial: FrozenTrial, sweep: Sweep) -> float:
    """Return the value of a paused trial at its rung."""
    return values_at(sweep.pruner.rungs, trial.intermediate_values)[until_of(trial)]


def write(folder: RunFolder, study: Study, sweep: Sweep) -> None:
    """Write the summary file; under a lock, so that it never replaces a newer summary."""
    with locked(folder.summary_lock):
        found = replace(summarize(study, sweep), unconfirmed=_unconfirmed(folder, study, sweep))
        # without indentation, for which the encoder is slow
        write_whole(folder.summary, json.dumps(found.to_json()), sync=False)


def _unconfirmed(folder: RunFolder, study: Study, sweep: Sweep) -> int:
    """Return how many of the trials that are to be confirmed the confirmation does not have yet."""
    if sweep.confirm is None:
        return 0
    own = confirmation_folder(folder)
    known = sweep_file.load(own.sweep).enqueue if is_confirmation(own) else ()
    return sum(point not in known for point in best_points(own_trials(study), sweep))


def best_points(trials: Sequence[FrozenTrial], sweep: Sweep) -> list[Values]:
    """Return the values of the best trials, as many as are confirmed, each once."""
    assert sweep.confirm is not None
    points: list[Values] = []
    for trial in ranked(trials, sweep):
        if len(points) == sweep.confirm.top:
            break
        if (values := parameters(trial, sweep)) not in points:
            points.append(values)
    return points


def narrow_ranges(order: Sequence[FrozenTrial], sweep: Sweep) -> dict[str, str]:
    """Return the parameters of which all of the best values are at one end of their range, and its name.

    Args:
        order: the trials as `ranked` returns them.
    """
    if not isinstance(sweep.space, Space) or len(order) < 2 * FEWEST_BEST:
        return {}
    best = order[: max(FEWEST_BEST, math.ceil(len(order) * BEST_SHARE))]
    found = {parameter.name: _end_of_best(parameter, best) for parameter in sweep.space.parameters}
    return {name: end for name, end in found.items() if end is not None}


def _end_of_best(parameter: Parameter, best: Sequence[FrozenTrial]) -> str | None:
    values = [trial.params[parameter.name] for trial in best if parameter.name in trial.params]
    places = [place for value in values if (place := share_of_range(parameter, value)) is not None]
    if len(places) < FEWEST_BEST:
        return None
    if max(places) <= EDGE:
        return "lower"
    return "upper" if min(places) >= 1 - EDGE else None


def _is_known_point(trial: FrozenTrial, sweep: Sweep) -> bool:
    """Return whether the trial's values are from the sweep file."""
    if COPY_OF in trial.system_attrs:
        return False
    has_value = trial.state.is_finished() and bool(trial.values or trial.intermediate_values)
    return sweep.sampler.name != "grid" and bool(trial.system_attrs.get(FIXED_PARAMS)) and has_value


def described(trial: FrozenTrial, sweep: Sweep) -> TrialSummary:
    """Return a trial as `summary.json` has it."""
    last = max(trial.intermediate_values, default=None)
    value = value_of(trial)
    if value is None and last is not None:
        value = trial.intermediate_values[last]
    return TrialSummary(
        number=trial.number,
        state=_state(trial, sweep),
        value=value if value is None or math.isfinite(value) else None,
        progress=last,
        params=parameters(trial, sweep),
        seconds=length(trial),
        reason=trial.system_attrs.get(claiming.REASON, "") or _violated(trial, sweep),
        values=_values(trial, sweep),
        infeasible=not is_feasible(trial),
    )


def _values(trial: FrozenTrial, sweep: Sweep) -> dict[str, float] | None:
    """Return the values of a complete trial with several objectives; None for others."""
    if not _has_front(sweep) or trial.state != TrialState.COMPLETE:
        return None
    return {each.metric: value for each, value in zip(sweep.objectives, trial.values, strict=True)}


def _violated(trial: FrozenTrial, sweep: Sweep) -> str:
    """Return which constraints a trial violates, for people."""
    found = trial.constraints
    told = [
        f"{each.metric} {each.bound + found[each.metric] * (1 if each.is_upper else -1):.6g}, not"
        f" {'<=' if each.is_upper else '>='} {each.bound:g}"
        for each in sweep.constraints
        if found.get(each.metric, 0) > 0
    ]
    return f"infeasible: {', '.join(told)}" if told else ""


def schedule_of(trial: FrozenTrial, trials: Sequence[FrozenTrial], sweep: Sweep) -> tuple[SchedulePart, ...]:
    """Return the values by which a trial was trained, one after the other, if it is a copy; else an empty tuple.

    Args:
        trials: all trials of the study.
    """
    numbered = {each.number: each for each in trials}
    last = max(trial.intermediate_values, default=0)
    parts = [SchedulePart(trial=trial.number, until=last, params=parameters(trial, sweep))]
    while (copied := copy_of(trial)) is not None and copied.source in numbered:
        trial, until = numbered[copied.source], copied.progress
        parts.insert(0, SchedulePart(trial=trial.number, until=until, params=parameters(trial, sweep)))
    return tuple(parts) if len(parts) > 1 else ()


def parameters(trial: FrozenTrial, sweep: Sweep) -> Values:
    """Return the trial's parameters as passed to the job."""
    return sweep.space.restored(trial.params) if isinstance(sweep.space, Space) else dict(trial.params)


def length(trial: FrozenTrial) -> float | None:
    """Return the seconds for which workers have had the trial; None if it has not ended."""
    if trial.datetime_start is None or trial.datetime_complete is None:
        return None
    before: float = trial.system_attrs.get(SECONDS, 0.0)
    if before and not claiming.claims(trial):
        # no worker had it when it ended: it was pruned while it was paused
        return before
    return before + (trial.datetime_complete - trial.datetime_start).total_seconds()


def _seconds(trials: Iterable[FrozenTrial], state: TrialState) -> tuple[int, float]:
    """Return how many trials have ended in this state, and their total seconds."""
    lengths = [length(trial) or 0.0 for trial in trials if trial.state == state]
    return len(lengths), sum(lengths)
