"""The process per run of the local executor and of an allocation: a small SLURM that outlives the terminal.

It starts attempts, sends the signals of the time limit, ends cancelled runs, restarts runs that ask for it, and leaves
no process behind. For job functions it imports torch once: in an allocation to serve the rendezvous; on this machine to
fork the simulated ranks, which costs a third of importing torch in each.

It is started before the run folder exists. The line `go RUN_FOLDER` on standard input starts the run. If the input ends
without that line, the submission was refused, and this process ends too.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path

from mgpu_slurm.core import log_lines, processes
from mgpu_slurm.core.errors import ClusterError, MgpuError
from mgpu_slurm.core.files import set_umask_for
from mgpu_slurm.executors.base import HELD_JOB_VARIABLE
from mgpu_slurm.executors.selection import EXECUTORS
from mgpu_slurm.job import attempt, output, retry_policy
from mgpu_slurm.job.rank_process import without_collections
from mgpu_slurm.local_cluster.nodes import HeldNodes, Limit, Nodes, SimulatedNodes
from mgpu_slurm.rank.rank_info import limit_threads
from mgpu_slurm.registry import dependencies
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec, read_spec
from mgpu_slurm.run_folder import notification, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event
from mgpu_slurm.trackers.tracker_start import TrackerProcess
from mgpu_slurm.training import entry

TRY_AGAIN_AFTER = 1.0
"""Seconds until a signal is resent that could not reach the ranks, for example while srun is still starting them."""

Due = deque[tuple[float, signal.Signals]]
"""Signals to send, with their times on the monotonic clock."""


def main(executor: str, ranks_of_function: int) -> None:
    """Wait for the submission, then supervise the run.

    Args:
        ranks_of_function: Number of ranks that will run a job function; 0 for a command, which needs no torch here.
    """
    # a cancel before the first attempt stays pending until then
    signal.pthread_sigmask(signal.SIG_BLOCK, attempt.WATCHED)
    output.tolerate_full_disk()
    forked_ranks = ranks_of_function if EXECUTORS[executor].is_this_machine else 0
    if forked_ranks:
        # libgomp reads it once, when torch is imported
        limit_threads(forked_ranks)
    if ranks_of_function:
        with without_collections():
            importlib.import_module("torch.distributed")
    word, _, rest = sys.stdin.readline().rstrip("\n").partition(" ")
    # an empty input means that the submission was refused
    if word != "go":
        return
    if forked_ranks > 1:
        entry.import_for_ranks()
    folder = RunFolder(Path(rest))
    spec = read_spec(folder)
    set_umask_for(spec.readable_by)
    problem = dependencies.wait(folder, spec.after)
    if problem:
        records.cancel_unstarted(folder, problem)
        return
    # before this process adopts orphans: it is to end by itself
    trackers = TrackerProcess(folder, spec)
    Supervisor(folder, spec, _nodes(folder, spec)).run()
    # a hanging tracker does not keep the next run of a group waiting
    trackers.end(patience=0)


def _nodes(folder: RunFolder, spec: Spec) -> Nodes:
    if spec.nodes_are_simulated:
        return SimulatedNodes(folder, spec)
    return HeldNodes(folder, spec, os.environ[HELD_JOB_VARIABLE])


class Supervisor:
    """Runs one submission to its end. SIGTERM cancels it."""

    def __init__(self, folder: RunFolder, spec: Spec, nodes: Nodes) -> None:
        self._folder = folder
        self._spec = spec
        self._nodes = nodes
        self._limit: Limit | None = None
        self._limit_ends: float | None = None
        """End of the limit on the monotonic clock; ranks that restart in place only get the time that is left."""
        self._cancelled = False
        self._timed_out = False
        self._retried: list[Event] = []

    def run(self) -> None:
        processes.adopt_orphans()
        try:
            state, reason = self._run_attempts()
        except MgpuError as error:
            state, reason = self._nodes.lost() or (states.FAILED, str(error))
        records.settle_state(self._folder, state=state, reason=reason, ended=records.now())
        notification.send(self._folder, self._spec.notify)

    def _run_attempts(self) -> tuple[str, str]:
        """Run attempts until none is due; return the final state and its reason."""
        requeued: list[Event] = []
        while True:
            code = TERMINATED_EXIT_CODE if self._is_cancelled_already() else self._attempt(len(requeued))
            if self._restarts_in_place(code) or self._tries_again(code):
                continue
            if code != REQUEUE_EXIT_CODE or self._cancelled:
                return self._conclusion(code)
            asked = retry_policy.requeue_event(self._folder, self._spec, self._is_limit_near)
            self._limit_ends = None
            problem = retry_policy.why_no_requeue(self._spec, requeued, asked) or self._nodes.used_up(self._spec.lead)
            if problem:
                return states.TIMEOUT, problem
            requeued.append(asked)
            facts = retry_policy.facts_of(asked)
            records.settle_event(self._folder, "requeued", job_id=self._nodes.job_id, **facts)
            records.settle_state(self._folder, state=states.REQUEUED, reason="asked for a restart")

    def _restarts_in_place(self, code: int) -> bool:
        is_wanted = attempt.restarts_in_place(self._folder, self._spec, code)
        return is_wanted and not (self._cancelled or self._timed_out or self._nodes.lost())

    def _tries_again(self, code: int) -> bool:
        """Return whether another attempt is due after a failure that it may avoid; waits for its pause first."""
        nodes = self._nodes
        if self._cancelled or self._timed_out or nodes.was_stopped_from_outside() or nodes.aborted() or nodes.lost():
            return False
        retry = retry_policy.due(self._folder, self._spec, code, self._retried)
        if retry is None or nodes.used_up(self._spec.lead):
            return False
        nodes.clear()
        self._retried.append(retry.write_down(self._folder, job_id=nodes.job_id))
        nodes.avoid(retry.avoid)
        for _ in retry.wait():
            if self._is_cancelled_already():
                break
        if self._is_limit_near():
            # new ranks would miss the signal: as after a requeue, the next attempt gets the full time limit
            self._limit_ends = None
        return True

    def _is_limit_near(self) -> bool:
        """Return whether the lead signal has already been sent."""
        return self._limit_ends is not None and self._limit_ends - time.monotonic() <= (self._spec.lead or 0)

    def _is_cancelled_already(self) -> bool:
        """Return whether a cancel arrived while no attempt was running."""
        self._cancelled = signal.SIGTERM in signal.sigpending() or self._folder.cancel_request.exists()
        return self._cancelled

    def _conclusion(self, code: int) -> tuple[str, str]:
        if code == 0 and not self._nodes.aborted():
            return states.COMPLETED, ""
        lost = self._nodes.lost()
        if lost is not None:
            return lost
        if self._timed_out and not self._cancelled:
            assert self._limit is not None
            return states.TIMEOUT, f"did not end {self._limit.words}"
        if self._cancelled or (code == TERMINATED_EXIT_CODE and self._nodes.was_stopped_from_outside()):
            return states.CANCELLED, "cancelled"
        state = states.OUT_OF_MEMORY if self._nodes.ran_out_of_memory() else states.FAILED
        return state, records.failure_line(self._folder)

    def _attempt(self, restarts: int) -> int:
        """Run one attempt in a separate process; return its exit code."""
        self._limit = self._nodes.prepare(restarts)
        if self._limit is not None:
            self._limit_ends = self._limit_ends or time.monotonic() + self._limit.seconds
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(signal.SIGHUP, supervisor)
            code = 1
            try:
                code = self._batch_step(supervisor)
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(OSError):
                    output.flush()
                os._exit(code)
        code = self._watch(pid)
        if code:
            with suppress(ClusterError):
                self._nodes.end_all(keep=set())
        # processes started by ranks may outlive a successful attempt too
        processes.end_all(str(self._folder.path), keep=set())
        return code

    def _batch_step(self, supervisor: int) -> int:
        ending = attempt.run_attempt(self._folder, self._spec, self._nodes)
        if os.getppid() != supervisor:
            # the supervisor was killed: no other process is left to clean up and record it
            self._end_all_at_last()
            records.settle_state(
                self._folder, state=states.FAILED, reason="its supervisor process was killed", ended=records.now()
            )
        return ending.code

    def _end_all_at_last(self) -> None:
        """End all ranks, retrying until SLURM answers: nobody waits for this."""
        while True:
            with suppress(ClusterError):
                self._nodes.end_all(keep=set())
                return
            time.sleep(TRY_AGAIN_AFTER)

    def _watch(self, pid: int) -> int:
        """Wait for the batch step; meanwhile, send signals that are due and handle cancels. Return its exit code."""
        due = self._time_limit_signals()
        code = None
        while True:
            until_due = max(0.0, due[0][0] - time.monotonic()) if due else self._nodes.look_every
            received = signal.sigtimedwait(attempt.WATCHED, min(until_due, self._nodes.look_every))
            told = received is not None and received.si_signo == signal.SIGTERM
            if (told or self._folder.cancel_request.exists()) and not self._cancelled:
                self._cancelled = True
                now = time.monotonic()
                due = deque([(now, signal.SIGTERM), (now + self._spec.kill_wait, signal.SIGKILL)])
                # only shown to people
                with suppress(OSError):
                    records.update_state(self._folder, reason="being cancelled")
            elif due and due[0][0] <= time.monotonic():
                due = self._send_first(due, batch_step=pid)
            ended = _collect(pid)
            code = ended if code is None else code
            if code is not None and not self._is_left_alone(code):
                return code

    def _is_left_alone(self, code: int) -> bool:
        """Return whether a signal ended only the launcher of a training, such as a shell, while the training saves."""
        was_told = code == TERMINATED_EXIT_CODE and (self._cancelled or self._timed_out)
        return was_told and bool(processes.descendants(os.getpid()))

    def _time_limit_signals(self) -> Due:
        """Return the signals of the time limit, as SLURM sends them: the lead signal, SIGTERM at the limit, SIGKILL
        after the kill wait."""
        if self._limit is None or self._limit_ends is None:
            return deque()
        end = self._limit_ends
        due = deque([(end, signal.SIGTERM), (end + self._spec.kill_wait, signal.SIGKILL)])
        if self._spec.lead is not None:
            # a resumed run may have less time left than its lead
            lead = self._spec.lead if self._spec.lead < self._limit.seconds else max(1, self._limit.seconds // 5)
            due.appendleft((end - lead, signal.Signals[f"SIG{self._spec.signal}"]))
        return due

    def _send_first(self, due: Due, batch_step: int) -> Due:
        """Send the first of these signals; return those still to send, possibly including the same one again."""
        (when, signum), *later = due
        try:
            told = self._send(signum, batch_step)
        except ClusterError as error:
            log_lines.say(f"{signum.name} did not reach the ranks: {error}", file=sys.stderr)
            # postpones all: ranks that receive a SIGTERM late have the same time to save
            delay = time.monotonic() + TRY_AGAIN_AFTER - when
            return deque((at + delay, each) for at, each in due)
        again = time.monotonic() + TRY_AGAIN_AFTER
        is_needed = not told and not (later and later[0][0] < again)
        return deque([(again, signum), *later] if is_needed else later)

    def _send(self, signum: signal.Signals, batch_step: int) -> bool:
        """Signal every process of the job, as SLURM does; return False if there were no ranks yet.

        The batch step only gets SIGTERM, before the others.
        """
        if signum == signal.SIGTERM and not self._cancelled:
            self._timed_out = True
        if signum == signal.SIGKILL:
            self._nodes.end_all(keep={batch_step})
            return True
        if signum == signal.SIGTERM:
            with suppress(ProcessLookupError):
                os.kill(batch_step, signum)
        return self._nodes.tell(signum, batch_step)


def _collect(pid: int) -> int | None:
    """Reap ended children, adopted orphans included; return the batch step's exit code if it has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                return os.waitstatus_to_exitcode(ended[1])
    return None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    output.flush()
    # an interpreter with torch takes a second or two to exit; an ended run should have no processes
    os._exit(0)
