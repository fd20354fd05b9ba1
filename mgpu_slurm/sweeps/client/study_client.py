"""A worker's client of the study: it takes trials, reports their results, and leaves when there is nothing to do.

Only rank 0 has a client, and it broadcasts the results to the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from optuna.exceptions import TrialPruned
from optuna.trial import FrozenTrial, Trial, TrialState

from mgpu_slurm.core.files import locked, write_whole
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.metrics.report_socket import CONTINUE, Verdict
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import hparams
from mgpu_slurm.sweeps.client import copies, paused_trials, sweep_end
from mgpu_slurm.sweeps.client.final_values import final_values, missing
from mgpu_slurm.sweeps.client.messages import Assignment, Leave
from mgpu_slurm.sweeps.client.open_study import OpenStudy
from mgpu_slurm.sweeps.client.trial import WorkerTrial
from mgpu_slurm.sweeps.client.worker_health import WorkerHealth
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy
from mgpu_slurm.sweeps.search import space_function, trial_command
from mgpu_slurm.sweeps.search.parameters import Values, words_of
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import outcomes
from mgpu_slurm.sweeps.study import trial_queue as studies

PAUSE = 1.0
"""Seconds between two messages to the ranks while the worker waits for results of other workers."""

NO_TRIAL: dict[str, Any] = {"trial": None, "reason": ""}
"""Fields of the state of a worker that leaves or waits."""


class StudyClient:
    """A worker's access to the study."""

    def __init__(self, folder: RunFolder, spec: Spec, attempt: int, process: int = 0) -> None:
        """
        Args:
            folder: the folder of the worker.
            process: that of a worker with several, from 1; 0 for others.
        """
        self._spec = spec
        self._open = OpenStudy(folder, attempt, process, spec.resources.gpus)
        self._polls = False
        """Whether nothing could be decided at the last call of `next`."""
        self._trial: WorkerTrial | None = None
        self._values: Values = {}
        """The values of that trial."""
        self._seed = 0
        """The seed with which it is trained now, if it has several."""
        self._begun = 0
        """Number of trials begun here."""

    @property
    def _shared(self) -> WorkerStudy:
        return self._open.shared

    @property
    def _health(self) -> WorkerHealth:
        return self._open.health

    @property
    def _has_waited(self) -> bool:
        """Whether it spent time without a trial."""
        return self._health.has_waited or self._open.has_waited

    @property
    def _sweep(self) -> Sweep:
        """The sweep file as last read."""
        return self._shared.sweep

    # -- between trials

    def next(self, stop: Stop) -> Assignment | Leave | None:
        """Take a trial; return None if it is too early to decide and the caller should ask again.

        Args:
            stop: the stop that was requested of this worker.
        """
        if stop is not Stop.NO:
            self.let_go(is_late=stop is not Stop.END)
            self._shared.show(**NO_TRIAL)
            if stop is Stop.END:
                return Leave(TERMINATED_EXIT_CODE, "asked to end")
            return Leave(REQUEUE_EXIT_CODE, "the time limit is near")
        if self._trial is not None and self._has_failed():
            self.let_go()
        if self._trial is not None and (order := self._next_seed()) is not None:
            return order
        while True:
            self._shared.reread_sweep()
            self._open.settle_deaths()
            over = self._open.end.why_over()
            has_failed = over is not None and over.failed
            waits = over is None and self._health.waits_for_news()
            # trials that were begun are finished
            trial = None if has_failed else self._take(is_over=over is not None, only_doubted=waits)
            if trial is None and waits:
                time.sleep(PAUSE)
                return None
            if trial is None:
                before, self._polls = self._polls, not has_failed and self._open.waits()
                if self._polls:
                    time.sleep(PAUSE)
                    return None
                if before:
                    # look once more for dead workers
                    continue
                over = over or self._open.end.when_all_tried()
                if has_failed or (not self._open.turn() and self._leaves()):
                    self._shared.write_summary()
                    reason = "no trial is left to start" if over is None else over.reason
                    return Leave(int(has_failed), reason)
                continue
            assignment = self._begin(trial)
            if assignment is not None:
                self._shared.write_summary(at_once=False)
                return assignment

    def _has_failed(self) -> bool:
        """Return whether the sweep has failed, so that not even other seeds of a trial are trained."""
        over = studies.why_over(self._shared.study)
        return over is not None and over.failed

    def _leaves(self) -> bool:
        """Announce that this worker leaves; return False instead if the sweep file has changed."""
        with locked(self._open.folder.sweep_lock):
            if self._shared.reread_sweep():
                return False
            # the number of its trials replaces the metrics of its last trial
            self._shared.show(leaving=self._shared.worker.attempt, metrics={"trials": float(self.ended)}, **NO_TRIAL)
            return True

    @property
    def ended(self) -> int:
        """Number of trials that have ended in this attempt of the worker."""
        return sum(self._shared.had(trial) for trial in self._shared.trials() if trial.state.is_finished())

    def _take(self, is_over: bool, only_doubted: bool) -> Trial | None:
        lock = self._open.folder.trials_lock
        if only_doubted:
            if not self._health.others_wait():
                return None
            return studies.take_doubted(self._shared.study, self._sweep, self._shared.worker, lock)

        def take() -> Trial | None:
            snapshots = self._shared.snapshots
            return studies.take(
                self._shared.study, self._sweep, self._shared.worker, lock, snapshots, is_over, self._set_aside
            )

        self._shared.recover()
        trial = take()
        if trial is None and not self._polls:
            # no other worker may be left to check again
            self._shared.recover(at_once=True)
            trial = take()
        return trial

    def _set_aside(self, replaced: FrozenTrial, source: FrozenTrial) -> int:
        of_trial, end = self._open.sweep_folder.of_trial, self._sweep.pruner.rungs[-1]
        progress = copies.set_aside(of_trial(source.number), of_trial(replaced.number), end)
        if replaced.state == TrialState.WAITING:
            paused_trials.replace_by_copy(self._shared, replaced, source.number)
        return progress

    def _begin(self, trial: Trial) -> Assignment | None:
        """Return the assignment of a trial; None if its space function rejected or failed it, which ends it."""
        own = self._trial = WorkerTrial(self._shared, trial)
        self._begun += 1
        self._open.trial_began()
        own.record("started", worker=self._shared.worker.number, job_id=records.read_state(self._open.folder).job_id)
        with studies.synced_once(self._shared.study):
            values = self._chosen(trial)
        if values is None:
            return None
        own.record_parameters()
        with hparams.may_fail():
            hparams.write_start(own.folder, self._sweep, values, own.frozen().distributions)
        self._shared.show(trial=own.number, progress=0, metrics={}, reason=self._which(own))
        again = f", attempt {own.attempt}" if own.attempt > 1 else ""
        print(f"-- trial {own.number}{again}: {words_of(values)}", flush=True)
        self._values = values
        return self._assigned(own.attempt) if own.seeds is None else self._next_seed()

    def _assigned(self, attempt: int, seed: int | None = None) -> Assignment:
        own = self._running()
        # the confirmation has other seeds than this one, and a command that takes a seed takes it always
        given = self._sweep.seed_values[0] if seed is None and self._sweep.sets_seeds else seed
        values = self._values | ({} if given is None else {"seed": given})
        words = trial_command.words_of(self._sweep.command, self._sweep.fixed | values)
        if words:
            folder = own.folder if seed is None else own.folder.of_seed(seed)
            write_whole(folder.config, configs.dump_yaml(self._sweep.fixed | values), sync=False)
        return Assignment(own.number, attempt, self._open.sweep_folder.run, values, words, seed)

    # -- several seeds

    def _next_seed(self) -> Assignment | None:
        """Return the next part of a trial with several seeds; None if it has ended here."""
        own = self._running()
        assert own.seeds is not None
        own.check_is_mine()
        while (seed := own.seeds.next(own.target)) is None:
            self._judge_means(own)
            if self._trial is None:
                return None
        self._seed = seed
        run = own.folder.of_seed(seed)
        own.metrics = dict(own.seeds.last[seed])
        run.path.mkdir(parents=True, exist_ok=True)
        attempt = records.attempts_started(run) + 1
        records.settle_event(run, "started", attempt=attempt, worker=self._shared.worker.number)
        print(f"-- trial {own.number}: seed {seed}, attempt {attempt}", flush=True)
        self._shared.show(reason=self._which(own))
        return self._assigned(attempt, seed)

    def _judge_means(self, own: WorkerTrial) -> None:
        """Report the means of all seeds, or complete the trial with them."""
        target = own.target
        verdict = own.report_means(target)
        if target is None:
            values = {each.metric: own.metrics[each.metric] for each in self._sweep.objectives}
            own.complete(values, own.metrics, 0, max(own.frozen().intermediate_values, default=0))
            self._ended()
        elif verdict.prune_reason is not None:
            self.prune(verdict.prune_reason, target)
        elif verdict.pauses:
            self._pause(target)

    def _which(self, own: WorkerTrial) -> str:
        """Return what `status` shows besides a trial's number."""
        told = [f"of {self._open.confirms}"] if self._open.confirms else []
        return ", ".join([*told, *([] if own.seeds is None else [f"seed {self._seed}"])])

    def _chosen(self, trial: Trial) -> Values | None:
        if isinstance(self._sweep.space, Space):
            return self._sweep.space.suggest(trial)
        try:
            return self._choose(trial)
        except TrialPruned:
            # a space function raises it for an invalid combination
            self.prune("rejected by the space function", 0)
        except Exception as error:
            self.fail(f"space: {type(error).__name__}: {first_line(str(error))}")
        return None

    @cached_property
    def _choose(self) -> Callable[[Trial], Values]:
        assert isinstance(self._sweep.space, str)
        return space_function.load(self._sweep.space, self._open.folder.code / self._spec.workdir)

    def dismiss(self) -> None:
        """Remove workers that would find nothing to do from SLURM's queue."""
        if self._spec.is_queued:
            sweep_end.dismiss_waiting(self._shared)

    # -- in a trial

    def report(self, progress: int, metrics: dict[str, float]) -> Verdict:
        """Report the trial's metrics to the study, and return what becomes of the trial."""
        own = self._running()
        own.metrics |= metrics
        value = metrics.get(self._sweep.metric)
        shown: dict[str, Any] = {"progress": progress, "metrics": metrics}
        if own.last_value is None:
            lacks = missing(self._sweep.metric, metrics)
            shown["reason"] = f"the job has not reported {lacks} yet" if value is None else self._which(own)
        self._shared.show(**shown)
        if self._shared.summary_is_due:
            self._shared.write_summary(at_once=False)
        # the scheduler ignores a report without the metric, which the job may report or return later
        if own.seeds is not None:
            return own.note_seed(self._seed, progress, metrics)
        return CONTINUE if value is None else own.report(progress, value)

    # -- the end of a trial

    def complete(
        self,
        result: dict[str, float],
        last_metrics: dict[str, float],
        step: int,
        progress: int,
        has_trained: bool = True,
    ) -> None:
        """End the trial with its values: the job has returned.

        Args:
            has_trained: False for an attempt that was restored at the end of its training; the values that the trial
                reported before then count.
        """
        own = self._running()
        final = final_values(own, self._sweep, result, last_metrics, has_trained)
        if final.fails:
            self.fail(final.fails)
            return
        if final.prunes:
            self.prune(final.prunes, progress)
            return
        if own.seeds is not None:
            own.check_is_mine()
            value = final.metrics[self._sweep.metric]
            own.seeds.complete(self._seed, outcomes.Complete(final.metrics, value, step, progress))
            own.has_saved_seed = True
            return
        own.complete(final.returned, final.metrics, step, progress)
        self._ended()

    def prune(self, reason: str, progress: int) -> None:
        """End the trial as pruned."""
        self._running().prune(reason, progress)
        self._ended()

    def pause(self, progress: int) -> None:
        """Let the trial wait at its rung, with its checkpoint, for its promotion; or train its next seed."""
        own = self._running()
        own.has_saved_seed = own.seeds is not None
        if own.seeds is None:
            self._pause(progress)

    def _pause(self, progress: int) -> None:
        self._running().pause(progress)
        self._ended()

    def fail(self, reason: str) -> None:
        """End the trial after an error in its code, or let another worker try it."""
        own = self._running()
        if self._health.is_doubtful(own.frozen(), reason):
            own.doubt(reason)
            self._health.doubted()
            self._ended()
        else:
            own.fail(reason)
            self._ended()
            self._health.check(reason)

    def lose(self, reason: str) -> None:
        """End this attempt, whose process was killed here; the trial may succeed in its next one."""
        has_failed = self._running().lose(reason)
        self._ended()
        if has_failed:
            self._health.check(reason)

    def give_back(self, is_late: bool, has_saved: bool) -> None:
        """Give the trial back because the worker has to leave; another worker resumes it.

        Args:
            is_late: whether the time limit of the worker is near; if not, it is cancelled or preempted.
            has_saved: whether the trial saved a checkpoint since it began here.
        """
        own = self._running()
        has_saved = has_saved or own.has_saved_seed
        if is_late and self._begun == 1 and not self._has_waited and not has_saved:
            # it had the whole time of a worker, and would get no further next time
            own.lose("no checkpoint within a worker's whole time limit (run.restore)")
        else:
            own.give_back()
        self._ended()
        self._shared.show(**NO_TRIAL)
        self._shared.write_summary()

    def let_go(self, is_late: bool = False) -> None:
        """Give back a trial that has other seeds to be trained; `is_late` as for `give_back`."""
        if self._trial is not None:
            self.give_back(is_late, has_saved=True)

    def has_reported(self) -> bool:
        """Return whether the trial reported anything new since it began here."""
        return self._running().has_reported

    def _ended(self) -> None:
        """Forget the trial. The state shown by `status` is left as it is: the next trial replaces it at once."""
        self._trial = None

    # -- after a death

    def settle(self) -> None:
        """Release what was left running; see `left_trials.settle`."""
        self._open.settle()

    def _running(self) -> WorkerTrial:
        assert self._trial is not None
        return self._trial
