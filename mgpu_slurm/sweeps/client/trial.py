"""The trial that a worker trains: its reports to the study, and its end, in its folder and in the study."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from mgpu_slurm.core import log_lines, retry
from mgpu_slurm.core.files import locked, read_json, read_jsonl, write_json, write_whole
from mgpu_slurm.metrics.report_socket import CONTINUE, PAUSE, SAVE, Verdict
from mgpu_slurm.metrics.sinks import EventFiles, MetricsFile
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.sweeps import front_marks, hparams, optuna_adapter
from mgpu_slurm.sweeps.client import copies, paused_trials
from mgpu_slurm.sweeps.client.messages import Superseded
from mgpu_slurm.sweeps.client.seed_runs import SeedRuns
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy
from mgpu_slurm.sweeps.scheduling.judged_values import CHANGES, is_feasible, is_feasible_at, violations_of
from mgpu_slurm.sweeps.scheduling.scheduler import Clone, Decision
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import outcomes, recovery
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.health import SEED_REPORTED
from mgpu_slurm.sweeps.study.recovery import Death
from mgpu_slurm.sweeps.study.snapshots import SECONDS, copy_of, until_of


class WorkerTrial:
    """A trial of this worker, from its beginning to its end on this worker."""

    def __init__(self, shared: WorkerStudy, trial: Trial) -> None:
        self.number = trial.number
        self.folder = shared.sweep_folder.of_trial(trial.number)
        self.has_reported = False
        """Whether it has reported anything new to the study here."""
        self._shared = shared
        self._study = shared.study
        # as it was when the trial began, even if the file has changed since
        self._sweep = shared.sweep
        self._sweep_folder = shared.sweep_folder
        self._worker = shared.worker
        self._trial = trial
        self._began = time.monotonic()
        self._has_parameters = False
        """Whether all parameters are chosen, so that a sampler can learn from a failure."""
        frozen = self.frozen()
        _keep_apart(self.folder, frozen)
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        copies.adopt(self.folder, frozen)
        self.attempt = records.attempts_started(self.folder) + 1
        before = frozen.intermediate_values
        self._reported = set(before)
        """Progress values for which the study has a value."""
        self._until = until_of(frozen)
        """Index of the rung to which it may run, if trials may pause."""
        self._pauses = False
        """Whether it is to pause at the next place where it can be saved."""
        self._last_progress: int | None = None
        """Progress of the last report here."""
        self.last_value: float | None = before[max(before)] if before else None
        """Last value of the metric; None before the first report."""
        self.metrics = self._known_metrics(frozen)
        """Last value of each metric that was reported, also by earlier attempts."""
        several = self._sweep.seeds > 1
        self.seeds = SeedRuns(self.folder, self._sweep.seed_values, self._sweep.metric) if several else None
        """Its runs, if it is trained with several seeds."""
        self.has_saved_seed = False
        """Whether a seed has reached its rung or its end here."""
        self._judged = 0
        """The last rung at which it was judged here, by its progress."""

    def _known_metrics(self, frozen: FrozenTrial) -> dict[str, float]:
        copied = copy_of(frozen)
        if copied is None:
            return hparams.reported_by(self.folder)[0]
        # it continues from the checkpoint of another one
        source = self._sweep_folder.of_trial(copied.source)
        return hparams.reported_by(source, copied.progress)[0] | hparams.reported_by(self.folder)[0]

    def frozen(self) -> FrozenTrial:
        """Return the trial's current state in the study."""
        return optuna_adapter.read_trial(self._study, self._trial)

    def record(self, event: str, **facts: Any) -> None:
        """Add an event to the trial's history."""
        records.settle_event(self.folder, event, attempt=self.attempt, **facts)

    def record_parameters(self) -> None:
        """Write the parameters to the folder, to identify it, before anything in it depends on them."""
        self._has_parameters = True
        if not self.folder.parameters.exists():
            params = self.frozen().params
            path = self.folder.parameters
            retry.for_the_disk(lambda: write_json(path, params), path)

    @property
    def target(self) -> int | None:
        """The progress to which all its seeds are trained before it is judged; None for the end."""
        assert self.seeds is not None
        rungs = self._shared.scheduler.rungs[:-1]
        target = next((rung for rung in rungs if rung > self._passed), None)
        if self._shared.scheduler.pauses:
            target = rungs[self._until] if self._until < len(rungs) else None
        # runs that were shorter than the rung are complete
        is_short = self.seeds.has_ended and target is not None and not self.seeds.have_reached(target)
        return None if is_short else target

    @property
    def _passed(self) -> int:
        """The last rung at which it was judged, by its progress."""
        assert self.seeds is not None
        last = max(self._reported, default=0)
        later = next((rung for rung in self._shared.scheduler.rungs if rung > last), None)
        if last == self._judged or (later is not None and self.seeds.have_reached(later)):
            return last
        # an earlier attempt may have ended after its report and before the decision
        return max((each for each in self._reported if each < last), default=0)

    def report_means(self, target: int | None) -> Verdict:
        """Report the means of all seeds at the rungs up to the target, and return what becomes of the trial."""
        assert self.seeds is not None
        self.check_is_mine()
        self._keep_first_config()
        verdict = CONTINUE
        for rung in self._shared.scheduler.rungs:
            if rung == target or (rung < (target or math.inf) and self.seeds.have_reached(rung)):
                self.metrics = self.seeds.means(rung)
                value = self.metrics[self._sweep.metric]
                if rung not in self._reported:
                    self._show_means(rung)
                if rung == target:
                    self._judged = rung
                    verdict = self.report(rung, value)
                elif math.isfinite(value):
                    self._store(rung, value)
        self.metrics = self.seeds.means(target)
        return verdict

    def _keep_first_config(self) -> None:
        first = self.folder.of_seed(self._sweep.seed_values[0]).config
        if first.exists() and not self.folder.config.exists():
            write_whole(self.folder.config, first.read_text(), sync=False)

    def _show_means(self, rung: int) -> None:
        """Add the means of all seeds at a rung to the trial's curves."""
        first = self.folder.of_seed(self._sweep.seed_values[0])
        step = next((each.get("step", rung) for each in read_jsonl(first.metrics) if each["progress"] >= rung), rung)
        with hparams.may_fail():
            report = Report(rung, step, records.now(), self.attempt, self.metrics, {})
            # a new event file, which continues the curve
            for sink in (MetricsFile(self.folder), EventFiles(self.folder, report.shown_step)):
                sink.report(report)
                sink.close(step)

    def report(self, progress: int, value: float) -> Verdict:
        """Report to the study, and return what becomes of the trial."""
        self.last_value = value
        if not math.isfinite(value):
            return Verdict(f"{self._sweep.metric} is {value}")
        self.check_is_mine()
        self._store(progress, value)
        return self._judge() if self._is_due(progress) else PAUSE if self._pauses else CONTINUE

    def _store(self, progress: int, value: float) -> None:
        if progress not in self._reported:
            # a trial that resumes from a checkpoint repeats the reports after it
            self._note_violations(self.metrics, progress)
            optuna_adapter.report(self._study, self._trial, progress, value)
            self._reported.add(progress)
            self.has_reported = True

    def note_seed(self, seed: int, progress: int, metrics: Mapping[str, float]) -> Verdict:
        """Note a report of the run with one of several seeds; return what becomes of it: it pauses at the target."""
        assert self.seeds is not None
        self.check_is_mine()
        if self.seeds.note(seed, progress, metrics):
            self.has_reported = True
        value = metrics.get(self._sweep.metric)
        if value is None:
            return CONTINUE
        if not math.isfinite(value):
            return Verdict(f"{self._sweep.metric} is {value}")
        frozen = self.frozen()
        if SEED_REPORTED not in frozen.system_attrs:
            optuna_adapter.set_trial_attribute(self._study, frozen, SEED_REPORTED, True)
        return PAUSE if (target := self.target) is not None and progress >= target else CONTINUE

    def _note_violations(self, metrics: Mapping[str, float], progress: int | None = None) -> None:
        """Store which constraints are violated, before the values at which they are.

        Args:
            progress: that of a report; None at the end of the trial.
        """
        if not self._sweep.constraints:
            return
        known = self.frozen()
        for key, violation in violations_of(self._sweep.constraints, metrics).items():
            if known.system_attrs.get(key) != violation:
                optuna_adapter.set_trial_attribute(self._study, known, key, violation)
        now = self.frozen()
        if progress is not None and is_feasible(now) != is_feasible_at(now, progress):
            changes = [*now.system_attrs.get(CHANGES, []), progress]
            optuna_adapter.set_trial_attribute(self._study, now, CHANGES, changes)

    def unknown_constraints(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the metrics of constraints that neither these metrics nor earlier attempts contain."""
        known = {*metrics, *self.frozen().constraints}
        return [each.metric for each in self._sweep.constraints if each.metric not in known]

    def _is_due(self, progress: int) -> bool:
        """Return whether the scheduler decides after this report."""
        scheduler = self._shared.scheduler
        if scheduler.pauses:
            # also if the trial has come further than its rung, because there was no place where it could be saved
            return not self._pauses and self._until < len(scheduler.rungs) and progress >= scheduler.rungs[self._until]
        before = self._last_progress
        if before is None:
            # an earlier attempt may have ended after its report and before the decision
            before = max((each for each in self._reported if each < progress), default=0)
        self._last_progress = progress
        return scheduler.is_due(before, progress)

    def _judge(self) -> Verdict:
        """Ask the scheduler, and do what it decides."""
        shared, scheduler = self._shared, self._shared.scheduler
        with locked(self._sweep_folder.trials_lock) if scheduler.pauses else nullcontext():
            self.check_is_mine()
            snapshot = shared.snapshot()
            number = studies.own_number(self._study, self.frozen())
            if scheduler.pauses and not snapshot.entries[number].has_arrived:
                return CONTINUE
            decision = scheduler.decide(snapshot, number)
            if scheduler.pauses and decision is Decision.CONTINUE:
                studies.grant(self._study, self.frozen())
                self._until += 1
            if decision is Decision.COMPLETE:
                # nothing is left to decide
                self._until = len(scheduler.rungs)
            if isinstance(decision, Clone):
                source = shared.snapshots.trial(decision.source).number
                studies.replace_by_copy(self._study, self.frozen(), source)
                return Verdict(f"{paused_trials.REPLACED} {source}")
        if decision is Decision.PRUNE:
            return Verdict(paused_trials.WORSE)
        self._pauses = decision is Decision.PAUSE
        if self._pauses:
            return PAUSE
        # others may be copied from its checkpoint
        return SAVE if scheduler.copies and decision is Decision.CONTINUE else CONTINUE

    def check_is_mine(self) -> None:
        """Raise Superseded if this worker was taken for dead, as on a node that SLURM gave up, and lost its trial."""
        if not self._worker.has(self.frozen()):
            raise Superseded(f"trial {self.number} has been given to another worker")

    # -- its end here; all raise Superseded if it is not this worker's any more

    def complete(self, result: dict[str, float], metrics: Mapping[str, float], step: int, progress: int) -> None:
        """End the trial with its values.

        Args:
            result: what the job returned.
            metrics: the last value of each metric.
        """
        values = {each.metric: metrics[each.metric] for each in self._sweep.objectives}
        with locked(self._sweep_folder.trials_lock):
            self.check_is_mine()
            self._note_violations(metrics)
            outcomes.write(self.folder, outcomes.Complete(result, values[self._sweep.metric], step, progress))
            self._study.tell(self._trial, list(values.values()))
        with hparams.may_fail():
            hparams.write_end(self.folder, self._sweep, "done", values)
            if len(values) > 1:
                front_marks.mark(self._sweep_folder, self._study, self._sweep)
        told = "  ".join(f"{name} {value:.6g}" for name, value in values.items())
        self._end(told if is_feasible(self.frozen()) else f"{told} (infeasible)")

    def prune(self, reason: str, progress: int) -> None:
        with locked(self._sweep_folder.trials_lock):
            self.check_is_mine()
            outcomes.write(self.folder, outcomes.Pruned(reason, progress))
            if reason != paused_trials.WORSE:
                is_own_fault = self._has_parameters and not paused_trials.is_schedulers(reason)
                claiming.blame(self._study, self.frozen(), reason, is_own_fault)
            self._study.tell(self._trial, state=TrialState.PRUNED)
        with hparams.may_fail():
            hparams.write_end(self.folder, self._sweep, "pruned")
        if self._shared.scheduler.pauses and paused_trials.is_schedulers(reason):
            paused_trials.delete_checkpoints(self.folder)
        self._end(f"pruned at progress {progress}: {reason}")

    def fail(self, reason: str) -> None:
        with locked(self._sweep_folder.trials_lock):
            self.check_is_mine()
            recovery.fail(self._study, self.folder, self.frozen(), Death(reason, self._has_parameters), self._sweep)
        self._end(f"failed: {reason}")

    def doubt(self, reason: str) -> None:
        """Give the trial back for another worker to try, as this one's node may be broken."""
        with locked(self._sweep_folder.trials_lock):
            self.check_is_mine()
            claiming.doubt(self._study, self.frozen(), self._worker, reason)
        self._end(f"failed: {reason}: given back, as this node may be broken")

    def lose(self, reason: str) -> bool:
        """Queue the trial again, or fail it if it has lost too many workers; return whether it has failed."""
        with locked(self._sweep_folder.trials_lock):
            self.check_is_mine()
            has_failed = recovery.release(self._study, self._sweep_folder, self.frozen(), Death(reason), self._sweep)
        self._end(reason)
        return has_failed

    def pause(self, progress: int) -> None:
        """Let the trial wait at its rung, and prune paused trials that will never be promoted."""
        paused_trials.keep_newest_checkpoint(self.folder)
        size = paused_trials.size_of_checkpoints(self.folder)
        with locked(self._sweep_folder.trials_lock):
            self.check_is_mine()
            claiming.pause(self._study, self.frozen(), size)
            pruned = paused_trials.prune_hopeless(self._shared)
        self._end(f"paused at progress {progress}")
        # other workers need not wait for that
        for folder in pruned:
            paused_trials.clear(folder, self._sweep)

    def give_back(self) -> None:
        """Queue the trial again, to be resumed by another worker."""
        with locked(self._sweep_folder.trials_lock):
            self.check_is_mine()
            claiming.give_back(self._study, self.frozen())
        self._end("given back: another worker continues it")

    def _end(self, how: str) -> None:
        self.record("ended", how=how)
        print(f"-- trial {self.number}: {how}  ({time.monotonic() - self._began:.1f} s)", flush=True)


def _keep_apart(folder: RunFolder, trial: FrozenTrial) -> None:
    """Move away the folder of another trial with the same number: this one must not resume from its checkpoints.

    A study that was restored from an older copy reuses numbers. A trial that begins for the first time has no folder
    yet; one that was given back has the folder in which its parameters are recorded.
    """
    if SECONDS in trial.system_attrs:
        recorded = read_json(folder.parameters)
        if recorded is None or recorded == trial.params:
            return
    elif not records.attempts_started(folder):
        return
    folder.set_aside.mkdir(exist_ok=True)
    name = folder.path.name
    places = (folder.set_aside / f"{name}-{count}" for count in itertools.count(1))
    place = next(place for place in places if not place.exists())
    folder.path.rename(place)
    log_lines.warn(f"{folder.run} was another trial with other parameters: moved to {place}")
