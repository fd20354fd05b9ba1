"""The local executor's process per run: a small SLURM of its own that outlives the terminal.

It starts attempts, sends the signals of the time limit, ends what is cancelled, starts again what asks for it, and
leaves no process behind. For job functions it imports torch once and forks the ranks, which costs a third of what an
import on each rank costs.

It is started before the run folder exists, and takes lines on standard input: `ask QUESTION` is answered on standard
output (see `check`; one import of torch serves the check and the ranks), `go RUN_FOLDER` starts the run. If the input
ends without that, the submission was refused, and this process ends too.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from mgpu_slurm import processes, records, states
from mgpu_slurm.launch import check, dependencies, simulated
from mgpu_slurm.paths import RunFolder, open_to
from mgpu_slurm.runtime import batch, entry
from mgpu_slurm.runtime.devices import threads_per_rank
from mgpu_slurm.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec, read_spec


def main(ranks_of_function: int) -> None:
    """Serves the submission, then the run.

    Args:
        ranks_of_function: how many ranks will run a job function; 0 for a command, which needs no torch here.
    """
    # a cancel that comes before the first attempt waits for it
    signal.pthread_sigmask(signal.SIG_BLOCK, batch.WATCHED)
    answers = os.fdopen(os.dup(1), "w")
    # what a user's module prints on import belongs to no answer
    os.dup2(2, 1)
    if ranks_of_function:
        # libgomp reads it once, when torch is imported
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks_of_function)))
        importlib.import_module("torch.distributed")
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "ask":
            _answer_from_child(check.Question(**json.loads(rest)), answers)
            # the child holds the only end now: where the target takes it down, the submission reads the end of file
            answers.close()
            _preload_for(ranks_of_function)
        elif word == "go":
            answers.close()
            _preload_for(ranks_of_function)
            folder = RunFolder(Path(rest))
            spec = read_spec(folder)
            open_to(spec.readable_by)
            problem = "" if records.attempts_started(folder) else dependencies.wait(spec.after)
            if problem:
                records.update_state(folder, state=states.CANCELLED, reason=problem, ended=records.now())
                return
            Supervisor(folder, spec).run()
            return


def _preload_for(ranks: int) -> None:
    """What DistributedDataParallel would import on every rank when the first model is wrapped."""
    if ranks > 1:
        importlib.import_module("torch._dynamo")


def _answer_from_child(question: check.Question, answers: TextIO) -> None:
    """The user's module is imported in a child: what it does on import (threads, CUDA) stays out of the ranks."""
    parent = os.getpid()
    if os.fork() == 0:
        try:
            processes.die_with_parent(signal.SIGKILL, parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, batch.WATCHED)
            answers.write(json.dumps(asdict(check.ask(question))) + "\n")
            answers.close()
        finally:
            # also after an error: this process must not go on as a second supervisor
            os._exit(0)


class Supervisor:
    """Runs one submission to its end. Signals: SIGTERM cancels."""

    def __init__(self, folder: RunFolder, spec: Spec) -> None:
        self._folder = folder
        self._spec = spec
        # a lock that another thread holds stays locked in a fork for ever; then ranks are started afresh
        self._ranks_can_be_forked = processes.thread_count() == 1
        self._gpus = simulated.visible_gpus() if spec.resources.gpus_per_node else []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cancelled = False
        self._timed_out = False

    def run(self) -> None:
        processes.adopt_orphans()
        restarts = 0
        while True:
            code = self._attempt(restarts) if not self._is_cancelled_already() else TERMINATED_EXIT_CODE
            processes.end_all(str(self._folder.path), keep=set())
            if code != REQUEUE_EXIT_CODE or self._cancelled or restarts >= self._spec.max_requeues:
                break
            restarts += 1
            records.record_event(self._folder, "requeued", job_id=str(os.getpid()))
            records.update_state(self._folder, state="REQUEUED", reason="asked to be started again")
        state, reason = self._conclusion(code)
        records.update_state(self._folder, state=state, reason=reason, ended=records.now())

    def _is_cancelled_already(self) -> bool:
        """Whether a cancel came while no attempt was there to hear of it."""
        self._cancelled = signal.SIGTERM in signal.sigpending()
        return self._cancelled

    def _conclusion(self, code: int) -> tuple[str, str]:
        if code == 0:
            return "COMPLETED", ""
        if self._cancelled:
            return "CANCELLED", "cancelled"
        if code == REQUEUE_EXIT_CODE:
            return "TIMEOUT", f"asked to be started again, and all of --max-requeues {self._spec.max_requeues} are used"
        if self._timed_out:
            return "TIMEOUT", f"did not end within the time limit of {self._spec.resources.time_limit} s"
        return "FAILED", records.failure_line(self._folder)

    def _attempt(self, restarts: int) -> int:
        """One attempt in a process of its own; its exit code."""
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(signal.SIGHUP, supervisor)
            code = 1
            try:
                code = self._batch_step(supervisor, restarts)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return self._watch(pid)

    def _batch_step(self, supervisor: int, restarts: int) -> int:
        variables = simulated.job_variables(self._spec, supervisor, restarts)
        ending = batch.run_attempt(
            self._folder,
            str(supervisor),
            simulated.node_names(self._spec),
            simulated.ADDRESS,
            lambda rendezvous: self._start_ranks(variables | rendezvous),
        )
        if os.getppid() != supervisor:
            # the supervisor was killed: nobody else is left to clean up and to say so
            processes.end_all(str(self._folder.path), keep=set())
            records.update_state(
                self._folder, state="FAILED", reason="its supervisor process was killed", ended=records.now()
            )
        return ending.code

    def _start_ranks(self, variables: dict[str, str]) -> dict[int, str]:
        os.environ.update(variables)
        started = {self._start_rank(rank): f"rank {rank}" for rank in range(self._spec.resources.ranks)}
        if signal.SIGTERM in signal.sigpending():
            # the supervisor looked for ranks to tell when these were not there yet
            batch.signal_groups(started, signal.SIGTERM)
        return started

    def _start_rank(self, rank: int) -> int:
        variables = simulated.rank_variables(self._spec, rank, self._gpus)
        parent = os.getpid()
        if not self._ranks_can_be_forked:
            command = [sys.executable, "-m", "mgpu_slurm.runtime.entry", str(self._folder.path)]
            process = subprocess.Popen(command, env=os.environ | variables, preexec_fn=batch.own_group)
            # a dropped Popen is collected by the next one, and its exit code with it
            self._processes.append(process)
            return process.pid
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                processes.die_with_parent(signal.SIGKILL, parent)
                batch.own_group()
                os.environ.update(variables)
                code = entry.run_rank(self._folder)
            except BaseException:
                # the way out below would swallow it
                traceback.print_exc()
            finally:
                entry.exit_process(code)
        return pid

    def _watch(self, pid: int) -> int:
        """Waits for the batch step, and does meanwhile what the clock and other shells ask for."""
        due = self._time_limit_signals()
        while True:
            timeout = max(0.0, due[0][0] - time.monotonic()) if due else 3600.0
            received = signal.sigtimedwait(batch.WATCHED, timeout)
            if received is None and due:
                self._send(due.popleft()[1], batch_step=pid)
            elif received is not None and received.si_signo == signal.SIGTERM and not self._cancelled:
                self._cancelled = True
                records.update_state(self._folder, reason="being cancelled")
                self._send(signal.SIGTERM, batch_step=pid)
                due = deque([(time.monotonic() + self._spec.kill_wait, signal.SIGKILL)])
            code = _collect(pid)
            if code is not None:
                return code

    def _time_limit_signals(self) -> deque[tuple[float, signal.Signals]]:
        """When to send what: the lead signal, SIGTERM at the limit, SIGKILL after the kill wait, as SLURM does."""
        limit = self._spec.resources.time_limit
        if limit is None:
            return deque()
        end = time.monotonic() + limit
        due = deque([(end, signal.SIGTERM), (end + self._spec.kill_wait, signal.SIGKILL)])
        if self._spec.lead is not None:
            due.appendleft((end - self._spec.lead, signal.Signals[f"SIG{self._spec.signal}"]))
        return due

    def _send(self, signum: signal.Signals, batch_step: int) -> None:
        """To every process of the job, as SLURM does; of the batch step only SIGTERM is wanted, and that first."""
        if signum == signal.SIGTERM and not self._cancelled:
            self._timed_out = True
        if signum == signal.SIGKILL:
            processes.end_all(str(self._folder.path), keep={batch_step})
            return
        if signum == signal.SIGTERM:
            os.kill(batch_step, signum)
        for pid in processes.descendants(os.getpid()):
            if pid != batch_step:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)


def _collect(pid: int) -> int | None:
    """The exit code of the batch step once it has ended; adopted orphans are reaped on the way."""
    with suppress(ChildProcessError):
        while True:
            done, status = os.waitpid(-1, os.WNOHANG)
            if not done:
                return None
            if done == pid:
                return os.waitstatus_to_exitcode(status)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
