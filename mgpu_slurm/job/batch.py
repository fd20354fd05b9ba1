"""The batch step of a job: `python -m mgpu_slurm.job batch RUN_FOLDER --token TOKEN -- srun ...`.

The batch script execs it. It runs one attempt of the run, then retries, requeues or concludes it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mgpu_slurm.core import log_lines, records, states
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import open_to
from mgpu_slurm.core.hostlist import expand
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.processes import allow_many_files
from mgpu_slurm.job import output, retry_policy
from mgpu_slurm.job.attempt import WATCHED, Ending, StartRanks, goes_on_in_place, own_group, run_attempt
from mgpu_slurm.job.launch_watch import LaunchWatch
from mgpu_slurm.job.requeue import Job, can_start_without, start_again, start_again_in_time, starts
from mgpu_slurm.job.retry_policy import Retry
from mgpu_slurm.job.srun_log import LaunchLog
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec, read_spec
from mgpu_slurm.slurm import commands, job_lock, steps
from mgpu_slurm.slurm.outage import wait_out

LEAD_COMES_EARLY = 60
"""Maximum seconds by which SLURM sends the lead signal early."""

PATIENCE_FOR_SIGTERM = 1.0
"""Seconds to wait for SLURM's SIGTERM after the ranks have failed."""


def main(arguments: list[str]) -> int:
    output.outlive_a_full_disk()
    path, option, token, separator, *command = arguments
    assert (option, separator) == ("--token", "--"), arguments
    folder = RunFolder(Path(path))
    spec = read_spec(folder)
    open_to(spec.readable_by)
    folder.create_task()
    job = Job(_job_id(), token)
    holder = job_lock.take(folder, job.token, job.id)
    if holder != job.id:
        log_lines.say(f"run {folder.run} is the work of job {holder}: nothing is left for job {job.id}")
        return 0
    if folder.cancel_wish.exists():
        records.cancel_unstarted(folder, "cancelled")
        return TERMINATED_EXIT_CODE
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    allow_many_files()
    nodes = expand(os.environ["SLURM_JOB_NODELIST"])
    address = nodes[0] if len(nodes) > 1 else "127.0.0.1"
    while True:
        log = LaunchLog(folder.launch_log(job.id))
        watch = LaunchWatch(folder, job.id, log)
        ending = run_attempt(
            folder,
            spec,
            job.id,
            nodes,
            address,
            _by_launcher(command),
            watch.describe,
            is_in_vain=watch.is_in_vain,
        )
        code = _after(folder, spec, job, ending, log, nodes)
        if code is not None:
            return code


def _job_id() -> str:
    """Return the id that SLURM's commands use for this job, including array tasks."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


def _by_launcher(command: list[str]) -> StartRanks:
    """Return a function that starts the ranks with a launcher such as srun."""

    def start(variables: dict[str, str]) -> dict[int, str]:
        # kept: the next Popen reaps a dropped one, and its exit code is lost
        started.append(subprocess.Popen(command, env=os.environ | variables, preexec_fn=own_group))
        return {started[-1].pid: Path(command[0]).name}

    started: list[subprocess.Popen[bytes]] = []
    return start


def _after(folder: RunFolder, spec: Spec, job: Job, ending: Ending, log: LaunchLog, nodes: Sequence[str]) -> int | None:
    """Handle the end of an attempt; return the job's exit code, or None if another attempt is due."""
    if ending.superseded:
        # neither its end nor its requeue request counts for the run
        return ending.code
    in_place = goes_on_in_place(folder, spec, ending.code)
    # a job function that has returned is done. The exit code of a terminated command means nothing, and srun's own is
    # 0 if a node has failed
    if (ending.code or not folder.result.exists()) and _is_slurms_doing(ending, log):
        # cancelled, preempted or timed out: `status` asks SLURM which
        return ending.code
    retry = None if in_place else retry_policy.due(folder, spec, ending.code, starts(folder, job, "retried"))
    if retry is None and not in_place:
        return _conclude(folder, spec, job, ending, log)
    try:
        if retry is not None:
            return _try_again(folder, spec, job, retry, nodes)
        if ending.cut_short:
            # srun was killed, and ranks may still be running
            steps.end(job.id, folder.group.run)
        return None
    except ClusterError as problem:
        why = retry.why if retry is not None else records.failure_line(folder)
        reason = f"{why}; it did not start again: {problem}"
        records.settle_state(folder, state=states.FAILED, ended=records.now(), reason=reason)
        return ending.code


def _try_again(folder: RunFolder, spec: Spec, job: Job, retry: Retry, nodes: Sequence[str]) -> int | None:
    """Retry in this job, or requeue the run if a node is to be avoided, the job is unusable or the time limit is near.

    Returns:
        The exit code of this job if it ends, or None to start another attempt in it.

    Raises:
        ClusterError: SLURM does not restart the run, or does not end what this attempt has left.
    """
    retry.write_down(folder, job_id=job.id, token=job.token)
    moves = set(retry.avoid) & set(nodes) and can_start_without(folder, spec, job, retry.avoid)
    if moves or retry.leaves_job or (spec.max_requeues and _is_limit_near(spec, job, retry.pause)):
        return start_again(folder, spec, job, retry.avoid)
    steps.end(job.id, folder.group.run)
    for _ in retry.wait():
        if folder.cancel_wish.exists():
            records.settle_state(folder, state=states.CANCELLED, reason="cancelled", ended=records.now())
            return TERMINATED_EXIT_CODE
        if signal.sigtimedwait({signal.SIGTERM}, 0) is not None:
            # SLURM knows the reason
            return TERMINATED_EXIT_CODE
    return None


def _is_limit_near(spec: Spec, job: Job, pause: float) -> bool:
    """Return whether SLURM has sent the lead signal by the end of the pause (seconds): new ranks would miss it."""
    left = None if spec.lead is None else wait_out(lambda: commands.seconds_left(job.id))
    return left is not None and left <= (spec.lead or 0) + pause


def _was_limit_near(spec: Spec, job: Job) -> bool:
    """Return whether the ranks may have left because of the time limit; False if SLURM does not report the time."""
    if spec.lead is None:
        return False
    try:
        left = commands.seconds_left(job.id)
    except ClusterError:
        return False
    return left is not None and left <= spec.lead + LEAD_COMES_EARLY


def _conclude(folder: RunFolder, spec: Spec, job: Job, ending: Ending, log: LaunchLog) -> int:
    """Requeue the run, or record how it has ended; return the job's exit code."""
    if ending.code == REQUEUE_EXIT_CODE:
        requeued = starts(folder, job, "requeued")
        facts = retry_policy.limit_facts(folder, spec, lambda: _was_limit_near(spec, job))
        state, reason = states.TIMEOUT, retry_policy.why_no_requeue(spec, requeued, facts)
        if not reason:
            try:
                return start_again_in_time(folder, spec, job, **facts)
            except ClusterError as problem:
                reason = f"SLURM did not restart it: {problem}; continue with `resume`"
    elif ending.code:
        state = states.OUT_OF_MEMORY if log.tells_of_too_little_memory() else states.FAILED
        reason = records.failure_line(folder)
    else:
        state, reason = states.COMPLETED, ""
    records.settle_state(folder, state=state, ended=records.now(), reason=reason)
    return ending.code


def _is_slurms_doing(ending: Ending, log: LaunchLog) -> bool:
    """Return whether SLURM ended the job; the ranks may receive its SIGTERM and exit shortly before this process."""
    if ending.told_to_end or (log.tells_of_an_abort() and not ending.cut_short):
        return True
    patience = 0.0 if ending.code in (0, REQUEUE_EXIT_CODE) else PATIENCE_FOR_SIGTERM
    return signal.sigtimedwait({signal.SIGTERM}, patience) is not None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    output.flush()
    # skips the interpreter's shutdown: a thread about to serve the store is inside torch, whose C++ code cannot be
    # unwound there and aborts the process. SLURM would report a completed run as FAILED.
    os._exit(code)
