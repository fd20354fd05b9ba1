"""A worker's part in its study: it takes trials, tells what becomes of them, and leaves when there is nothing to do.

Rank 0 alone has one, and tells the other ranks.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from optuna.exceptions import TrialPruned
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import ClusterError, nearest
from mgpu_slurm.core.files import write_whole
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.registry import lookup
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec
from mgpu_slurm.slurm import commands, job_identity
from mgpu_slurm.sweeps import hparams, optuna_adapter
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.search import budget, space_function, sweep_file, sweep_options, trial_command
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_file import Sweep
from mgpu_slurm.sweeps.study import health, recovery, summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.file_locks import locked
from mgpu_slurm.sweeps.study.health import Place
from mgpu_slurm.sweeps.study.recovery import Death
from mgpu_slurm.sweeps.study.trial_queue import Worker
from mgpu_slurm.sweeps.worker.messages import Assignment, BrokenWorker, Leave, SweepFailed
from mgpu_slurm.sweeps.worker.trial import OwnTrial

LOOK_EVERY = 30.0
"""Seconds between two questions for workers that have died, of all workers together."""

HOURS_EVERY = 10.0
"""Seconds between two looks at what of a budget of hours is left."""

SUMMARY_SHARE = 0.02
"""Of a worker's time, what summaries may take while it goes from trial to trial."""

PAUSE = 1.0
"""Seconds for which a worker that waits for news of others says nothing to its ranks."""

LONGEST_WAIT = 600.0
"""Seconds for which a worker whose trials fail waits for news of others before it tries another one."""


NO_TRIAL: dict[str, Any] = {"trial": None, "reason": ""}
"""What the state of a worker says that leaves, or waits."""


class Participant:
    """A worker's dealings with the study."""

    def __init__(self, folder: RunFolder, spec: Spec, attempt: int) -> None:
        """
        Args:
            folder: the worker's.
        """
        assert folder.task is not None
        self._folder = folder
        self._sweep_folder = folder.group
        self._spec = spec
        self._worker = Worker(folder.task, attempt)
        self._sweep_written = 0
        self.sweep: Sweep
        self._reread_sweep()
        self._study: Study = studies.load(self.sweep, folder.journal, self._worker)
        self._next_look = self._next_look_at_hours = time.monotonic()
        self._summary_written, self._summary_took, self._summary_is_due = -math.inf, 0.0, False
        self._own: OwnTrial | None = None
        self._begun = 0
        """Trials that were begun here."""
        self._place = Place(folder.task, self._since())
        self._may_be_broken = True
        """Whether its last trial failed, as far as is known."""
        self._waits_until: float | None = None
        self._has_waited = False
        self.ended = 0
        """Trials that have come to their end here."""

    def _reread_sweep(self) -> bool:
        """Also in the middle: there may be more trials, or another budget; whether the file is another one now."""
        # opened: a network file system may tell an old time of a file that is not
        with open(self._folder.sweep, "rb") as file:
            written = os.fstat(file.fileno()).st_mtime_ns
        if written == self._sweep_written:
            return False
        self._sweep_written = written
        self.sweep = sweep_file.load(self._folder.sweep)
        return True

    # -- between trials

    def next(self, stop: Stop) -> Assignment | Leave | None:
        """Takes a trial; None where it is too early to say, and the caller is to ask again.

        Args:
            stop: what this worker was asked for.
        """
        if stop is not Stop.NO:
            self._show(**NO_TRIAL)
            if stop is Stop.END:
                return Leave(TERMINATED_EXIT_CODE, "asked to end")
            return Leave(REQUEUE_EXIT_CODE, "the time limit is near")
        while True:
            self._reread_sweep()
            over = self._why_over()
            has_failed = over is not None and over["failed"]
            if over is None and self._waits_for_news():
                time.sleep(PAUSE)
                return None
            # what was begun comes to its end
            trial = None if has_failed else self._take(only_given_back=over is not None)
            if trial is None:
                if has_failed or self._leaves():
                    self._write_summary()
                    reason = "no trial is left to start" if over is None else over["reason"]
                    return Leave(int(has_failed), reason)
                continue
            assignment = self._begin(trial)
            if assignment is not None:
                self._write_summary(at_once=False)
                return assignment

    def _waits_for_news(self) -> bool:
        """Whether the next trial had better wait until others tell whether theirs do well."""
        if not self._may_be_broken:
            return False
        trials = summary.own_trials(self._study)
        self._leave_if_broken(trials)
        self._may_be_broken = health.is_suspect(trials, self._place) or health.is_in_doubt(trials, self._place)
        are_left = self.sweep.trials is None or summary.counts(trials, self.sweep)["WAITING"] > 0
        if not (self._may_be_broken and are_left and self._is_news_due(trials)):
            self._waits_until = None
            return False
        if self._waits_until is None:
            self._waits_until = time.monotonic() + LONGEST_WAIT
            self._show(trial=None, reason="its last trials failed: it waits for news of other workers'")
            self._note("the last trials failed here: waiting for what those of other workers come to")
        self._has_waited = True
        if time.monotonic() >= self._next_look:
            # who is waited for may be dead
            self._recover(every=LOOK_EVERY)
        return time.monotonic() < self._waits_until

    def _is_news_due(self, trials: Sequence[FrozenTrial]) -> bool:
        if health.is_in_doubt(trials, self._place):
            return self._is_at_work(but={self._worker.number})
        if health.is_news_due(trials):
            return True
        # or has its nodes, and has not come to its first trial yet
        return not health.goes_well(trials) and self._is_at_work(but=health.workers_with_trials(trials))

    def _is_at_work(self, but: set[int]) -> bool:
        """Whether a worker runs that is none of these, as far as files tell."""
        others = [member for member in lookup.members(self._sweep_folder) if member.task not in but]
        found = map(records.read_state, others)
        return any(state["state"] == states.RUNNING and state.get("leaving") != state["attempts"] for state in found)

    def _leaves(self) -> bool:
        """Says that this worker is as good as gone, unless there is more to do since it looked."""
        with locked(self._folder.sweep_lock):
            if self._reread_sweep():
                return False
            # and what it has come to, where its last trial's metrics have stood
            self._show(leaving=self._worker.attempt, metrics={"trials": float(self.ended)}, **NO_TRIAL)
            return True

    def _why_over(self) -> dict[str, Any] | None:
        known: dict[str, Any] | None = studies.notes(self._study).get(studies.OVER)
        if known is not None:
            return known
        reason = self._spent()
        if reason is None:
            return None
        with locked(self._folder.sweep_lock):
            if not self._reread_sweep():
                return self._end_sweep(reason, failed=False)
        # the budget may have been raised since
        return self._why_over()

    def _spent(self) -> str | None:
        if self.sweep.budget == sweep_options.Budget():
            return None
        reason = budget.spent(summary.own_trials(self._study), self.sweep)
        if reason is None and time.monotonic() >= self._next_look_at_hours:
            self._next_look_at_hours = time.monotonic() + HOURS_EVERY
            reason = budget.spent_time(self.sweep, self._sweep_folder, self._spec.resources.gpus)
        return reason

    def _end_sweep(self, reason: str, failed: bool) -> dict[str, Any]:
        over = {"reason": reason, "failed": failed}
        studies.note(self._study, studies.OVER, over)
        print(f"mgpu_slurm: the sweep is over: {reason}", flush=True)
        return over

    def _take(self, only_given_back: bool) -> Trial | None:
        def take() -> Trial | None:
            return studies.take(self._study, self.sweep, self._worker, self._folder.trials_lock, only_given_back)

        if time.monotonic() >= self._next_look:
            self._recover(every=LOOK_EVERY)
        trial = take()
        if trial is None:
            # nobody may be left to look again
            self._recover(every=0.0)
            trial = take()
        return trial

    def _recover(self, every: float) -> None:
        """
        Args:
            every: seconds; where another worker has looked in that time, this one does not.
        """
        self._next_look = time.monotonic() + LOOK_EVERY
        found = recovery.look(self._study, self._sweep_folder, self.sweep, self._note, every)
        if found:
            self._note(f"trials of dead workers: {', '.join(map(str, found))}")

    def _note(self, text: str) -> None:
        print(f"mgpu_slurm: {text}", flush=True)

    def _begin(self, trial: Trial) -> Assignment | None:
        """What the trial is; None where its own space will have none of it, and it has ended."""
        own = self._own = OwnTrial(self._study, self.sweep, self._sweep_folder, self._worker, trial)
        self._begun += 1
        self._waits_until = None
        own.record("started", worker=self._worker.number, job_id=records.read_state(self._folder)["job_id"])
        with studies.synced_once(self._study):
            values = self._chosen(trial)
        if values is None:
            return None
        own.record_parameters()
        with hparams.may_fail():
            hparams.write_start(own.folder, self.sweep, values, own.frozen().distributions)
        self._show(trial=own.number, progress=0, metrics={}, reason="")
        print(f"-- trial {own.number}{again(own.attempt)}: {as_words(values)}", flush=True)
        words = trial_command.words_of(self.sweep.command, self.sweep.fixed | values)
        if words:
            write_whole(own.folder.config, configs.dump_yaml(self.sweep.fixed | values), sync=False)
        return Assignment(own.number, own.attempt, values, words)

    def _chosen(self, trial: Trial) -> Values | None:
        if isinstance(self.sweep.space, Space):
            return self.sweep.space.suggest(trial)
        try:
            return self._choose(trial)
        except TrialPruned:
            # Optuna's word for a combination that makes no sense
            self.prune("its space will have none of it", 0)
        except Exception as error:
            self.fail(f"space: {type(error).__name__}: {first_line(str(error))}")
        return None

    @cached_property
    def _choose(self) -> Callable[[Trial], Values]:
        assert isinstance(self.sweep.space, str)
        return space_function.load(self.sweep.space, self._folder.code / self._spec.workdir)

    def dismiss(self) -> None:
        """Takes those workers out of SLURM's queue that would find nothing to do; the study is over."""
        if self._spec.executor != "slurm":
            return
        # before the look at what is left: who adds trials meanwhile submits jobs of their own
        jobs = [each.job_id for each in records.submissions(self._sweep_folder) if each.job_id is not None]
        counts = summary.counts(summary.own_trials(self._study), self.sweep)
        is_over = studies.notes(self._study).get(studies.OVER) is not None
        is_over = is_over or not (counts["WAITING"] or counts["RUNNING"])
        unstarted = [member for member in lookup.members(self._sweep_folder) if not records.attempts_started(member)]
        if not (is_over and unstarted and jobs):
            return
        try:
            others = {job_identity.whole(job.job_id) for job in job_identity.strangers(self._sweep_folder, jobs)}
            if own := [job_id for job_id in jobs if job_id not in others]:
                commands.run(commands.scancel_waiting_command(own))
        except ClusterError as error:
            # they come, and leave at once
            print(f"mgpu_slurm: workers that wait in the queue stay there: {error}", flush=True)
            return
        for member in unstarted:
            records.cancel_unstarted(member, "nothing was left to do")

    # -- in a trial

    def judge(self, progress: int, metrics: dict[str, float]) -> str | None:
        """Tells the study; why the trial is to end, or None where it goes on."""
        own = self._running()
        value = metrics.get(self.sweep.metric)
        shown: dict[str, Any] = {"progress": progress, "metrics": metrics}
        if own.last_value is None:
            shown["reason"] = f"the job has not reported {self._missing(metrics)} yet" if value is None else ""
        self._show(**shown)
        if self._summary_is_due:
            self._write_summary(at_once=False)
        # a report without the metric says nothing to the pruner; the job may report or return it later
        return None if value is None else own.judge(progress, value)

    def _missing(self, metrics: dict[str, float]) -> str:
        names = sorted(metrics)
        reported = f"; it reports {', '.join(names)}" if names else "; it reports nothing"
        hint = nearest(self.sweep.metric, names)
        return f"{self.sweep.metric!r}{hint if hint.startswith(' (did') else reported}"

    # -- the end of a trial

    def complete(
        self,
        result: dict[str, float],
        last_metrics: dict[str, float],
        step: int,
        progress: int,
        has_trained: bool = True,
    ) -> None:
        """End the trial with its value: the job has returned.

        Args:
            has_trained: False for an attempt that was restored at the end of its training, where the value counts that
                the trial reported before.
        """
        # a job function that returns one number returns the metric
        name = "value" if list(result) == ["value"] else self.sweep.metric
        value = reported = self._running().last_value
        if name in result and (has_trained or reported is None):
            value = result[name]
        if value is None:
            self.fail(f"the job neither reports nor returns the metric {self._missing(result | last_metrics)}")
            return
        if not math.isfinite(value):
            self.prune(f"{self.sweep.metric} is {value}", progress)
            return
        if name in result:
            result = result | {name: value}
        self._running().complete(result, value, step, progress)
        self._ended()

    def prune(self, reason: str, progress: int) -> None:
        """The trial was given up."""
        self._running().prune(reason, progress)
        self._ended()

    def fail(self, reason: str) -> None:
        """The job function has raised an error."""
        own = self._running()
        if self._is_doubtful(own.frozen(), reason):
            own.doubt(reason)
            self._may_be_broken = True
            self._ended(for_good=False)
        else:
            own.fail(reason)
            self._ended()
            self._check_health()

    def lose(self, reason: str) -> None:
        """What trains it was killed here, and may do better the next time."""
        has_failed = self._running().lose(reason)
        self._ended(for_good=has_failed)
        if has_failed:
            self._check_health()

    def give_back(self, is_late: bool, has_saved: bool) -> None:
        """The worker has to leave, and the trial goes on elsewhere.

        Args:
            is_late: the worker's time limit is near; else it is cancelled, or preempted.
            has_saved: the trial has a checkpoint that it did not have when it began here.
        """
        own = self._running()
        if is_late and self._begun == 1 and not self._has_waited and not has_saved:
            # it had all of the time that a worker has, and would not come further the next time
            has_failed = own.lose("a worker's whole time limit brought it to no checkpoint (run.restore)")
        else:
            has_failed = False
            own.give_back()
        self._ended(for_good=has_failed)
        self._show(**NO_TRIAL)
        self._write_summary()

    def has_reported(self) -> bool:
        """Whether the trial has told the study anything new since it began here."""
        return self._running().has_reported

    def _ended(self, for_good: bool = True) -> None:
        """What is shown of the worker stays as it is: the next trial, which begins at once, is there in its place."""
        self._own = None
        self.ended += for_good

    def _check_health(self) -> None:
        """After a trial that failed.

        Raises:
            SweepFailed: the others will fail too.
            BrokenWorker: those that this worker takes will.
        """
        self._may_be_broken = True
        trials = summary.own_trials(self._study)
        reason = health.common_failure(trials, self.sweep.trials)
        if reason is not None and not self._is_news_due(trials):
            self._end_sweep(reason, failed=True)
            self._write_summary()
            raise SweepFailed(reason)
        self._leave_if_broken(trials)

    def _is_doubtful(self, trial: FrozenTrial, reason: str) -> bool:
        """Return whether another worker should try a trial that has failed here."""
        trials = summary.own_trials(self._study)
        is_doubtful = health.is_doubtful(trials, self._place, trial, reason)
        return is_doubtful and self._is_at_work(but={self._worker.number})

    def _leave_if_broken(self, trials: Sequence[FrozenTrial]) -> None:
        """
        Raises:
            BrokenWorker: a trial that failed here does well elsewhere.
        """
        reason = health.broken_worker(trials, self._place)
        if reason is not None and self._is_at_work(but={self._worker.number}):
            key = f"{samplers.INNOCENT}{self._worker.number}"
            # it may have had other nodes before, which were broken too
            known = studies.notes(self._study).get(key, [])
            studies.note(self._study, key, sorted({*known, *health.innocent(trials, self._place)}))
            self._write_summary()
            raise BrokenWorker(reason)

    def _since(self) -> datetime:
        """Since when this worker has its nodes: ranks that are started again in their place stay where they are."""
        starts = [event for event in records.events(self._folder) if event["event"] == "started"]
        place = _place_of(starts[-1])
        here = itertools.takewhile(lambda event: _place_of(event) == place, reversed(starts))
        return datetime.fromisoformat([event["time"] for event in here][-1])

    # -- after a death

    def settle(self) -> None:
        """Sees to the trial that an earlier attempt of this worker has left."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            claims = studies.claims(trial)
            attempt = claims.pop(self._worker.number, self._worker.attempt)
            # where others name it too, somebody else may have been faster: `recover` asks whether those live
            if attempt < self._worker.attempt and not claims:
                self._settle(trial, attempt)

    def _settle(self, trial: FrozenTrial, attempt: int) -> None:
        death = recovery.of_attempt(self._folder, attempt) or Death("its worker died")
        has_failed = False
        with locked(self._folder.trials_lock):
            now = optuna_adapter.read_trial(self._study, trial)
            is_own = now.state == TrialState.RUNNING and studies.claims(now).get(self._worker.number) == attempt
            if is_own and death.is_trials_fault and self._is_doubtful(now, death.reason):
                studies.doubt(self._study, now, self._worker, death.reason)
            elif is_own:
                has_failed = recovery.release(self._study, self._sweep_folder, now, death, self.sweep)
        if has_failed:
            self._check_health()

    # -- what is written down

    def _running(self) -> OwnTrial:
        assert self._own is not None
        return self._own

    def _show(self, **changes: Any) -> None:
        # for people: a disk that is full now is no reason to end a trial
        with suppress(OSError):
            # one that was given up with its node does not speak for the attempt after it
            if records.read_state(self._folder)["attempts"] <= self._worker.attempt:
                records.update_state(self._folder, sync=False, **changes)

    def _write_summary(self, at_once: bool = True) -> None:
        """
        Args:
            at_once: else it waits for a report where the last one is so new that summaries would take too much time.
        """
        began = time.monotonic()
        self._summary_is_due = not at_once and began < self._summary_written + self._summary_took / SUMMARY_SHARE
        if self._summary_is_due:
            return
        # for people: a disk that is full now is no reason to end a trial
        with suppress(OSError):
            summary.write(self._sweep_folder, self._study, self.sweep)
        self._summary_written = time.monotonic()
        self._summary_took = self._summary_written - began


def _place_of(start: dict[str, Any]) -> tuple[str, list[str]]:
    return start["job_id"], start["nodes"]


def again(attempt: int) -> str:
    return f", attempt {attempt}" if attempt > 1 else ""


def as_words(values: Values) -> str:
    return "  ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )


@dataclass(frozen=True)
class Ending:
    """What has become of a trial on a rank."""

    tell: Callable[[Participant], None]
    """How rank 0 tells the study."""
    leave: Leave | None = None
    """Whether the worker leaves its nodes, too; the same on all ranks."""
