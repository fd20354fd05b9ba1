"""A worker that trains several trials at the same time: one process for each, which share its cores and its GPUs.

Each of these processes is like a worker of one rank, and takes its own trials. One that dies does not disturb the
others: another one replaces it, which gives its trial back to the study.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from mgpu_slurm.core import log_lines, node_gpus, processes
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.job.attempt import Ending, describe_exit
from mgpu_slurm.job.gil_monitor import GilMonitor
from mgpu_slurm.rank.command import PASSED_ON
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.rank.signals import Stop, StopFlag, lead_signal
from mgpu_slurm.request.spec import (
    GPU_SHARE_VARIABLE,
    PROCESS_VARIABLE,
    REQUEUE_EXIT_CODE,
    TERMINATED_EXIT_CODE,
)
from mgpu_slurm.run_folder import failures, records
from mgpu_slurm.run_folder.record_types import Failure
from mgpu_slurm.slurm.commands import THREADS_VARIABLE
from mgpu_slurm.sweeps.client import left_trials
from mgpu_slurm.sweeps.study.recovery import Death
from mgpu_slurm.training.speed import compiler_cache

_MARK = "MGPU_PART_OF"
"""Set in every process below one of a worker's processes, so that none outlives it."""

LOOK_EVERY = 1.0
"""Seconds between two checks whether a process is stuck."""


def supervise(rank: Rank, count: int, stop: StopFlag) -> int:
    """Train trials in this many processes until all of them have ended; return the worker's exit code.

    Args:
        stop: has listened to signals until now.
    """
    return _Supervisor(rank, count).run(stop)


@dataclass
class _Process:
    number: int
    """As in `Rank`."""
    child: subprocess.Popen[bytes]
    monitor: GilMonitor
    descriptor: int = field(init=False)
    """Readable once it has ended."""

    def __post_init__(self) -> None:
        self.descriptor = os.pidfd_open(self.child.pid)


class _Supervisor:
    def __init__(self, rank: Rank, count: int) -> None:
        self._rank = rank
        self._folder = rank.folder
        self._count = count
        self._alive: list[_Process] = []
        self._heard: int | None = None
        """The signal by which this worker has been told to stop."""
        self._codes: list[int] = []
        """Exit codes of the processes that have ended for good."""
        self._oom_kills = processes.oom_kills()
        # signals to this process may not have reached those below it
        self._witness = processes.SignalWitness()

    def run(self, stop: StopFlag) -> int:
        for signum in {lead_signal(), *PASSED_ON}:
            signal.signal(signum, self._pass_on)
        if stop.asked is not Stop.NO:
            return TERMINATED_EXIT_CODE if stop.asked is Stop.END else REQUEUE_EXIT_CODE
        with suppress(OSError):
            # those of an earlier attempt
            records.update_state(self._folder, sync=False, processes=None)
        for number in range(1, self._count + 1):
            self._start(number)
        while self._alive:
            ready, _, _ = select.select([each.descriptor for each in self._alive], [], [], LOOK_EVERY)
            for each in list(self._alive):
                if each.descriptor in ready:
                    self._ended(each)
                elif each.monitor.is_stuck():
                    each.child.kill()
        failed = [code for code in self._codes if code not in (0, REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE)]
        return max(failed, default=max(self._codes))

    def _start(self, number: int) -> None:
        parent = os.getpid()
        cores = share_of_cores((number - 1) % self._count, self._count, sorted(os.sched_getaffinity(0)))

        def enter() -> None:
            processes.die_with_parent(signal.SIGKILL, parent)
            os.sched_setaffinity(0, cores)
            # until it can handle them
            signal.pthread_sigmask(signal.SIG_BLOCK, {lead_signal(), signal.SIGTERM, signal.SIGINT})

        words = [sys.executable, "-m", "mgpu_slurm.job", "worker", str(self._folder.path)]
        environ = variables(number, self._count, len(cores), self._rank.spec.resources.gpus_per_node, os.environ)
        child = subprocess.Popen(words, env=environ | {_MARK: self._mark_of(number)}, preexec_fn=enter)
        monitor = GilMonitor(self._folder, self._rank.attempt, 60 * self._rank.spec.stuck_after, number)
        self._alive.append(_Process(number, child, monitor))
        if self._heard is not None:
            # while it was being started
            processes.tell(self._heard, [child.pid])

    def _mark_of(self, number: int) -> str:
        return f"{self._folder.path}:{self._rank.attempt}:{number}"

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self._heard = signum
        if not self._witness.has(signum):
            processes.tell(signum, [each.child.pid for each in self._alive])

    def _ended(self, process: _Process) -> None:
        code = process.child.wait()
        code = 128 - code if code < 0 else code
        os.close(process.descriptor)
        process.monitor.conclude(self._rank.facts.node_name)
        self._alive.remove(process)
        self._kill_left(process.number)
        failure = self._failure(process.number)
        death = _death(failure, describe_exit(Ending(code, "its process")), self._is_out_of_memory())
        mark = self._folder.unfinished(self._rank.attempt, process.number)
        is_told = self._heard is not None or code in (REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE)
        if code and not is_told:
            left_trials.note_death(self._folder, self._rank.attempt, process.number, death)
        if is_told or not mark.exists() or failures.cause_of(failure) is failures.FORGERY:
            self._codes.append(code)
            return
        # the mark holds once: a process that reaches no trial is not replaced
        mark.unlink()
        if code:
            log_lines.say(f"process {process.number}: {death.reason}: another one replaces it")
        try:
            # with a number of its own, by which it claims trials and draws values, and with the same cores and GPU
            self._start(process.number + self._count)
        except (OSError, subprocess.SubprocessError) as error:
            # the others continue
            log_lines.say(f"no process can be started: {error}")
            self._codes.append(code or 1)
            return
        # what the trial's code has done is no cause of a later failure of the worker
        self._folder.rank_failure(self._rank.attempt, process.number).unlink(missing_ok=True)

    def _kill_left(self, number: int) -> None:
        """Kill what a process has started and left behind: its trial is trained again, in the same folder."""
        for pid in processes.with_variable(_MARK, self._mark_of(number)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_out_of_memory(self) -> bool:
        before, self._oom_kills = self._oom_kills, processes.oom_kills()
        return self._oom_kills > before

    def _failure(self, number: int) -> Failure:
        return Failure.from_json(read_json(self._folder.rank_failure(self._rank.attempt, number)) or {})


def _death(failure: Failure, exited: str, out_of_memory: bool) -> Death:
    if failure.trial is not None:
        return Death(f"{failure.error}: {first_line(failure.message)}", is_trials_fault=True)
    memory = " (the node ran out of memory, which trials_per_worker does not divide)" if out_of_memory else ""
    return Death(f"{first_line(failure.message) or exited}{memory}")


# -- what each process has of the worker


def share_of_cores(index: int, count: int, cores: Sequence[int]) -> list[int]:
    """Return the cores of one of `count` processes: neighbours, which share caches; if there are fewer cores than
    processes, these share them in turn."""
    if len(cores) < count:
        return [cores[index % len(cores)]]
    return list(cores[index * len(cores) // count : (index + 1) * len(cores) // count])


def variables(number: int, count: int, cores: int, gpus: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of a worker.

    Args:
        number: that of the process, from 1.
        cores: number of its cores.
        gpus: GPUs of the worker; None or 0 if none were requested.
    """
    own = dict(environ) | {PROCESS_VARIABLE: str(number)}
    threads = own.get("OMP_NUM_THREADS", "")
    # it was for all cores of the worker
    own["OMP_NUM_THREADS"] = own[THREADS_VARIABLE] = str(
        max(1, min(cores, int(threads) // count)) if threads.isdigit() else cores
    )
    if own.get(compiler_cache.THREADS_VARIABLE) == threads:
        # it followed from that one
        del own[compiler_cache.THREADS_VARIABLE]
    if "SLURM_CPUS_PER_TASK" in own:
        own["SLURM_CPUS_PER_TASK"] = str(cores)
    if gpus:
        visible = node_gpus.visible(environ) or node_gpus.VisibleGpus(node_gpus.counted_from_zero(gpus))
        own |= visible.chosen([(number - 1) % len(visible)])
    own[GPU_SHARE_VARIABLE] = f"{1 / math.ceil(count / max(1, gpus or 1)):.4g}"
    return own
