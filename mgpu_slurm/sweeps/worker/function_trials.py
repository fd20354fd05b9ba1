"""A trial that is a call of a job function, in the worker's process and process group."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from mgpu_slurm.core import retry
from mgpu_slurm.core.errors import ForgeryError, RunFailed, RunStopped, TrialPaused, TrialPruned
from mgpu_slurm.core.files import write_whole
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.metrics.report_socket import JudgeCallback, Verdict
from mgpu_slurm.metrics.reporter import odd_result, result_of
from mgpu_slurm.rank import crash, preflight
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.rank.signals import Stop, StopFlag
from mgpu_slurm.request import config as configs
from mgpu_slurm.request import target
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE
from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.client.messages import Assignment, Ending, Leave, WorkerFinished, undisturbed
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.search.space import nested
from mgpu_slurm.training import entry
from mgpu_slurm.training.run import Run

FAILED_EXIT_CODE = 1


class FunctionTrainer:
    """A trainer that calls the job function, with a new `Run` for each trial."""

    def __init__(
        self, rank: Rank, stop: StopFlag, device: torch.device, collectives: Collectives, client: StudyClient | None
    ) -> None:
        self._rank = rank
        self._stop = stop
        self._device = device
        self._collectives = collectives
        self._report = _report_to(client)
        self._watchdog = entry.watchdog_of(rank)
        self._job = target.job_function(rank.spec, rank.folder)

    def train(self, order: Assignment, folder: RunFolder) -> Ending:
        """Train a trial by calling the job function.

        Raises:
            RunStopped: the ranks have to be restarted.
            SweepFailed: the sweep cannot continue.
            ForgeryError: a stranger has written to the rendezvous, which is not the trial's fault.
        """
        facts = self._rank.facts
        before = newest_checkpoint(folder) if facts.rank == 0 else None
        run = Run(
            facts,
            folder.path,
            self._device,
            order.attempt,
            self._stop,
            self._collectives,
            self._report,
            self._watchdog,
            entry.layout_of(self._rank),
        )
        try:
            result = self._call(run, order, folder)
            return Ending(lambda own: own.complete(result, run.last_metrics, run.step, run.progress, run.has_trained))
        except TrialPruned as pruned:
            reason = pruned.reason
            return Ending(lambda own: own.prune(reason, run.progress))
        except TrialPaused:
            # the flag says that an attempt restarts
            self._stop.will_restart = False
            return Ending(lambda own: own.pause(run.progress))
        except RunStopped as stopped:
            is_late = stopped.exit_code == REQUEUE_EXIT_CODE
            return Ending(
                lambda own: own.give_back(is_late, has_saved=newest_checkpoint(folder) != before),
                Leave(stopped.exit_code, stopped.reason),
            )
        except (WorkerFinished, ForgeryError):
            raise
        except BaseException as error:
            return self._failed(order, error, run)
        finally:
            run.close()

    def _call(self, run: Run, order: Assignment, folder: RunFolder) -> dict[str, float]:
        spec = self._rank.spec
        values = configs.merge(spec.config, nested(order.values))
        config = self._job.fill(values, spec.original)
        if run.is_main:
            text = configs.dump_yaml(configs.to_plain(config))
            retry.for_the_disk(lambda: write_whole(folder.config, text, sync=False), folder.config)
        returned = self._job.call(run, config)
        run.finish()
        warning = odd_result(returned) if run.is_main else None
        preflight.warn([warning] if warning is not None else [], folder, run.attempt, self._rank.facts)
        return result_of(returned, run.last_metrics, run.has_trained)

    def _failed(self, order: Assignment, error: BaseException, run: Run) -> Ending:
        """Return the ending of a trial whose code raised an error, or raise RunStopped if the ranks must restart."""
        shown = crash.own_traceback(error)
        print(shown, end="", file=sys.stderr, flush=True)
        record = crash.record(error, shown, self._rank.facts)
        if self._rank.facts.world_size == 1 and not _has_broken_device(error):
            return Ending(lambda own: own.fail(f"{record.error}: {first_line(record.message)}"))
        # the others may be inside a collective, which this rank's next one would answer
        entry.record_failure(self._rank, replace(record, trial=order.number))
        # new ranks would not know that the time limit is near
        code = FAILED_EXIT_CODE if self._stop.due is Stop.NO else REQUEUE_EXIT_CODE
        if code == FAILED_EXIT_CODE:
            crash.leave_soon(code, run.await_save)
        raise RunStopped(code, "a trial has failed: the ranks restart") from None


def _report_to(client: StudyClient | None) -> JudgeCallback:
    """Return rank 0's callback for reports; an error of the study in it is not an error of the trial."""
    return _nobody if client is None else lambda *report: undisturbed(lambda: client.report(*report))


def _nobody(progress: int, metrics: dict[str, float]) -> Verdict:
    raise RunFailed("only rank 0 uses the study")


def _has_broken_device(error: BaseException) -> bool:
    """Return whether every later call on the GPU raises this error too."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
