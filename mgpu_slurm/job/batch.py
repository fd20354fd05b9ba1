"""The batch step of a job: `python -m mgpu_slurm.job batch RUN_FOLDER --token TOKEN -- srun ...`.

The batch script execs it. It runs one attempt of the run, then retries, requeues or concludes it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import set_umask_for
from mgpu_slurm.core.processes import allow_many_files
from mgpu_slurm.job import output, retry_policy
from mgpu_slurm.job.attempt import WATCHED, Ending, Launch, own_group, restarts_in_place, run_attempt
from mgpu_slurm.job.requeue import Job, can_start_without, chain_events, requeue_before_limit, restart
from mgpu_slurm.job.retry_policy import Retry
from mgpu_slurm.job.srun_watch import LaunchLog, LaunchWatch
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, read_spec
from mgpu_slurm.run_folder import notification, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import commands, sbatch, steps
from mgpu_slurm.slurm.commands import wait_out
from mgpu_slurm.trackers import outcome
from mgpu_slurm.trackers.tracker_start import TrackerProcess

LEAD_COMES_EARLY = 60
"""Maximum seconds by which SLURM sends the lead signal early."""

PATIENCE_AT_THE_END = 32.0
"""Seconds to wait for trackers, whose process ends after 30 s: SLURM kills it with the job."""

PATIENCE_WHEN_STOPPED = 5.0
"""The same for a job that SLURM ends or that restarts: the next attempt sends the rest."""

PATIENCE_FOR_SIGTERM = 1.0
"""Seconds to wait for SLURM's SIGTERM after the ranks have failed."""


def main(arguments: list[str]) -> int:
    output.tolerate_full_disk()
    path, option, token, separator, *command = arguments
    assert (option, separator) == ("--token", "--"), arguments
    folder = RunFolder(Path(path))
    spec = read_spec(folder)
    set_umask_for(spec.readable_by)
    folder.create_task()
    job = Job(folder, spec, _job_id(), token)
    holder = sbatch.claim(folder, job.token, job.id)
    if holder != job.id:
        log_lines.say(f"run {folder.run} belongs to job {holder}: job {job.id} has nothing to do")
        return 0
    if folder.cancel_request.exists():
        records.cancel_unstarted(folder, "cancelled")
        return TERMINATED_EXIT_CODE
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    allow_many_files()
    trackers = TrackerProcess(folder, spec)
    while True:
        log = LaunchLog(folder.launch_log(job.id))
        ending = run_attempt(folder, spec, _LaunchBySrun(job, command, log))
        code = _after(job, ending, log)
        if code is not None:
            _end_trackers(job, trackers)
            if not ending.superseded:
                notification.send(folder, spec.notify)
            return code


def _end_trackers(job: Job, trackers: TrackerProcess) -> None:
    """Wait until trackers have what is settled, and print how to send what they lack at the end of the run."""
    if states.is_alive(records.read_state(job.folder).state):
        trackers.end(PATIENCE_WHEN_STOPPED)
        return
    trackers.end(PATIENCE_AT_THE_END)
    for line in outcome.lines(job.folder, job.spec.sinks) if job.spec.kind == "run" else ():
        log_lines.say(line)


def _job_id() -> str:
    """Return the id that SLURM's commands use for this job, including array tasks."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


class _LaunchBySrun(Launch):
    """The ranks of an attempt in this job."""

    def __init__(self, job: Job, command: list[str], log: LaunchLog) -> None:
        self.job_id = job.id
        self.names = job.nodes
        self.address = self.names[0] if len(self.names) > 1 else "127.0.0.1"
        self._command = command
        self._log = log
        self._watch = LaunchWatch(job.folder, job.id, log)

    def start(self, variables: dict[str, str]) -> dict[int, str]:
        # kept: the next Popen reaps a dropped one, and its exit code is lost
        self._process = subprocess.Popen(self._command, env=os.environ | variables, preexec_fn=own_group)
        return {self._process.pid: Path(self._command[0]).name}

    def describe(self, ending: Ending, followers: Collection[int]) -> str:
        return self._watch.describe(ending, followers)

    def last_words(self) -> str:
        return self._log.last_words()

    def is_in_vain(self) -> bool:
        return self._watch.is_in_vain()


def _after(job: Job, ending: Ending, log: LaunchLog) -> int | None:
    """Handle the end of an attempt; return the job's exit code, or None if another attempt is due."""
    folder, spec = job.folder, job.spec
    if ending.superseded:
        # neither its end nor its requeue request counts for the run
        return ending.code
    in_place = restarts_in_place(folder, spec, ending.code)
    # a job function that has returned is done. The exit code of a terminated command means nothing, and srun's own is
    # 0 if a node has failed
    if (ending.code or not folder.result.exists()) and _was_stopped_by_slurm(ending, log):
        # cancelled, preempted or timed out: `status` asks SLURM which
        return ending.code
    retry = None if in_place else retry_policy.due(folder, spec, ending.code, chain_events(job, "retried"))
    if retry is None and not in_place:
        return _conclude(job, ending, log)
    try:
        if retry is not None:
            return _try_again(job, retry)
        if ending.cut_short:
            # srun was killed, and ranks may still be running
            steps.end(job.id, folder.group.run)
        return None
    except ClusterError as problem:
        why = retry.why if retry is not None else records.failure_line(folder)
        reason = f"{why}; it was not restarted: {problem}"
        records.settle_state(folder, state=states.FAILED, ended=records.now(), reason=reason)
        return ending.code


def _try_again(job: Job, retry: Retry) -> int | None:
    """Retry in this job, or requeue the run if a node is to be avoided, the job is unusable or the time limit is near.

    Returns:
        The exit code of this job if it ends, or None to start another attempt in it.

    Raises:
        ClusterError: SLURM does not restart the run, or does not end what this attempt has left.
    """
    folder = job.folder
    retry.write_down(folder, job_id=job.id, token=job.token)
    moves = set(retry.avoid) & set(job.nodes) and can_start_without(job, retry.avoid)
    if moves or retry.leaves_job or (job.spec.max_requeues and _is_limit_near(job, retry.pause)):
        return restart(job, retry.avoid)
    steps.end(job.id, folder.group.run)
    for _ in retry.wait():
        if folder.cancel_request.exists():
            records.settle_state(folder, state=states.CANCELLED, reason="cancelled", ended=records.now())
            return TERMINATED_EXIT_CODE
        if signal.sigtimedwait({signal.SIGTERM}, 0) is not None:
            # SLURM knows the reason
            return TERMINATED_EXIT_CODE
    return None


def _is_limit_near(job: Job, pause: float) -> bool:
    """Return whether SLURM has sent the lead signal by the end of the pause (seconds): new ranks would miss it."""
    lead = job.spec.lead
    left = None if lead is None else wait_out(lambda: commands.seconds_left(job.id))
    return left is not None and left <= (lead or 0) + pause


def _was_limit_near(job: Job) -> bool:
    """Return whether the ranks may have left because of the time limit; False if SLURM does not report the time."""
    if job.spec.lead is None:
        return False
    try:
        left = commands.seconds_left(job.id)
    except ClusterError:
        return False
    return left is not None and left <= job.spec.lead + LEAD_COMES_EARLY


def _conclude(job: Job, ending: Ending, log: LaunchLog) -> int:
    """Requeue the run, or record how it has ended; return the job's exit code."""
    folder, spec = job.folder, job.spec
    if ending.code == REQUEUE_EXIT_CODE:
        requeued = chain_events(job, "requeued")
        asked = retry_policy.requeue_event(folder, spec, lambda: _was_limit_near(job))
        state, reason = states.TIMEOUT, retry_policy.why_no_requeue(spec, requeued, asked)
        if not reason:
            try:
                return requeue_before_limit(job, asked)
            except ClusterError as problem:
                reason = f"SLURM did not restart it: {problem}; continue with `resume`"
    elif ending.code:
        state = states.OUT_OF_MEMORY if log.reports_out_of_memory() else states.FAILED
        reason = records.failure_line(folder)
    else:
        state, reason = states.COMPLETED, ""
    records.settle_state(folder, state=state, ended=records.now(), reason=reason)
    return ending.code


def _was_stopped_by_slurm(ending: Ending, log: LaunchLog) -> bool:
    """Return whether SLURM ended the job; the ranks may receive its SIGTERM and exit shortly before this process."""
    if ending.told_to_end or (log.reports_abort() and not ending.cut_short):
        return True
    patience = 0.0 if ending.code in (0, REQUEUE_EXIT_CODE) else PATIENCE_FOR_SIGTERM
    return signal.sigtimedwait({signal.SIGTERM}, patience) is not None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    output.flush()
    # skips the interpreter's shutdown: a thread about to serve the store is inside torch, whose C++ code cannot be
    # unwound there and aborts the process. SLURM would report a completed run as FAILED.
    os._exit(code)
