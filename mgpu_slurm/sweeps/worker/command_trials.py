"""A trial that is a command: each rank of the worker starts it as a child process, and rank 0 receives its reports.

Every trial has a separate rendezvous, because a script's process group cannot outlive its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.core import processes, torch_versions
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import end_of, read_jsonl
from mgpu_slurm.core.processes import TRIAL_VARIABLE
from mgpu_slurm.job import store_server
from mgpu_slurm.metrics import report_socket
from mgpu_slurm.metrics.report_socket import CONTINUE, ReportServer, Verdict
from mgpu_slurm.rank.command import PATIENCE_FOR_SIGTERM, program_of, why_not_found
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.step_sync import Agreed, Call
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.rank.signals import Stop, StopFlag
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE, REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE
from mgpu_slurm.run_folder import failures
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Failure
from mgpu_slurm.sweeps.client.messages import Assignment, Ending, Leave, WorkerFinished, undisturbed
from mgpu_slurm.sweeps.client.study_client import StudyClient

LOOK_EVERY = 0.2
"""Seconds between two checks in which the ranks exchange the states of their children."""

GRACE = 5.0
"""Seconds for a child to end, after it was asked to or another rank's child failed."""


@dataclass
class _Heard:
    """What the script has reported to rank 0."""

    verdict: Verdict = CONTINUE
    """The answer to the last report."""
    pauses: bool = False
    """Whether any answer was to pause."""
    progress: int = 0
    error: WorkerFinished | None = None
    """Error of the study; it is raised on all ranks when the children have ended."""


@dataclass(frozen=True)
class _Exit:
    """How a rank's child ended."""

    rank: int
    code: int
    """Exit code; negative for a signal."""


class CommandTrainer:
    """A trainer that starts the trial's command on every rank."""

    def __init__(self, rank: Rank, stop: StopFlag, collectives: Collectives, client: StudyClient | None) -> None:
        self._rank = rank
        self._stop = stop
        self._collectives = collectives
        self._client = client
        is_here = rank.spec.nodes_are_simulated or rank.spec.resources.nodes == 1
        self._address: str = "127.0.0.1" if is_here else collectives.broadcast_from_rank0(lambda: rank.facts.node_name)
        """Address of rank 0's node."""
        self._witness = processes.SignalWitness()

    def train(self, order: Assignment, folder: RunFolder) -> Ending:
        heard = _Heard()
        with closing(ReportServer(lambda progress, metrics: self._report(heard, progress, metrics))) as server:
            # this process serves the store until the children have ended
            port, store = self._rendezvous()
            child = self._start(order, folder, server, port)
            exited, stop = self._wait(child, folder, server)
            if stop is Stop.NO and exited.code in (TERMINATED_EXIT_CODE, -signal.SIGTERM):
                stop = self._late_word()
            del store
        has_paused = self._collectives.broadcast_from_rank0(lambda: heard.pauses and _has_paused(folder, order))
        if has_paused and stop is Stop.NO:
            return Ending(lambda own: own.pause(heard.progress))
        return _ending(folder, heard, exited, stop)

    def _report(self, heard: _Heard, progress: int, metrics: dict[str, float]) -> Verdict:
        assert self._client is not None
        heard.progress = progress
        try:
            client = self._client
            heard.verdict = undisturbed(lambda: client.report(progress, metrics))
        except WorkerFinished as error:
            heard.error, heard.verdict = error, Verdict(str(error))
        heard.pauses = heard.pauses or heard.verdict.pauses
        return heard.verdict

    def _rendezvous(self) -> tuple[int, Any]:
        """Start a store on rank 0; return its port, and on rank 0 also the store."""
        made = []

        def make() -> int:
            # like the run's own store: on the loopback interface, or on one that the job's other nodes can reach
            listener = store_server.bind("127.0.0.1" if self._address.startswith("127.") else "")
            port: int = listener.getsockname()[1]
            made.append(torch_versions.serve_store(listener))
            return port

        return self._collectives.broadcast_from_rank0(make), made

    def _start(self, order: Assignment, folder: RunFolder, server: ReportServer, port: int) -> subprocess.Popen[bytes]:
        spec = self._rank.spec
        program, words = program_of(spec, order.words)
        if program is None:
            raise UserError(f"command {words[0]!r} {why_not_found(words[0])}")
        variables = store_server.exports(self._address, port) | {
            ATTEMPT_VARIABLE: str(order.attempt),
            TRIAL_VARIABLE: str(folder.path),
            report_socket.VARIABLE: server.name,
        }
        parent = os.getpid()

        def enter() -> None:
            processes.die_with_parent(signal.SIGKILL, parent)
            # by default the signal would kill a script that does not handle it
            lead = signal.Signals[f"SIG{spec.signal}"]
            signal.signal(lead, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {lead})

        return subprocess.Popen(words, executable=program, env=os.environ | variables, preexec_fn=enter)

    def _wait(self, child: subprocess.Popen[bytes], folder: RunFolder, server: ReportServer) -> tuple[_Exit, Stop]:
        """Wait until the children of all ranks have ended; return how they ended, and the stop requested meanwhile."""
        descriptor = os.pidfd_open(child.pid)
        deadline: float | None = None
        ended_by_sigterm: float | None = None
        passed = self._pass_early_stop_on(child)
        # the children receive the signal too, and end in their own time
        self._stop.is_at_boundary = True
        try:
            server.watch(descriptor)
            while True:
                server.serve(LOOK_EVERY)
                passed = self._pass_stop_on(child, passed)
                code = child.poll()
                if code == -signal.SIGTERM:
                    # this process may receive the signal of a stop a little later than its child
                    ended_by_sigterm = ended_by_sigterm or time.monotonic()
                    is_new = time.monotonic() < ended_by_sigterm + PATIENCE_FOR_SIGTERM
                    if (is_new or deadline is not None or self._stop.due is not Stop.NO) and _left(folder):
                        # a stop may end a shell or launcher whose children are still saving
                        code = None
                stop = self._collectives.sync(Call.TRIAL, Agreed(stop=self._stop.due, failed=bool(code)))
                if not self._collectives.total([float(code is None)])[0]:
                    return self._first_failure(child), stop.stop
                if deadline is None and (stop.failed or stop.stop is Stop.LEAVE):
                    if stop.stop is Stop.LEAVE:
                        processes.tell(signal.SIGTERM, [child.pid])
                    deadline = time.monotonic() + GRACE
                elif deadline is not None and time.monotonic() > deadline:
                    _kill(child, folder)
        finally:
            os.close(descriptor)

    def _pass_stop_on(self, child: subprocess.Popen[bytes], passed: Stop) -> Stop:
        """Send the command the signal of a stop that SLURM has sent only to this process; return the stop."""
        asked = self._stop.asked
        if asked not in (Stop.NO, passed) and child.poll() is None:
            first, *others = self._signals_of(asked)
            if not any(map(self._witness.has, (first, *others))):
                processes.tell(first, [child.pid])
        return asked

    def _pass_early_stop_on(self, child: subprocess.Popen[bytes]) -> Stop:
        """Send the command the signal of a stop that came before it was started; return the stop."""
        asked = self._stop.asked
        if asked is not Stop.NO:
            processes.tell(self._signals_of(asked)[0], [child.pid])
        return asked

    def _signals_of(self, asked: Stop) -> tuple[signal.Signals, ...]:
        """Return the signals that request a stop, first the one to pass on."""
        if asked is Stop.END:
            return signal.SIGTERM, signal.SIGINT
        return (signal.Signals[f"SIG{self._rank.spec.signal}"],)

    def _late_word(self) -> Stop:
        """Return the stop requested of this worker; a SIGTERM that ended the children may still have to arrive here."""
        give_up = time.monotonic() + PATIENCE_FOR_SIGTERM
        while True:
            is_over = time.monotonic() > give_up
            agreed = self._collectives.sync(Call.TRIAL, Agreed(stop=self._stop.due, failed=is_over))
            if agreed.stop is not Stop.NO or agreed.failed:
                return agreed.stop
            time.sleep(0.05)

    def _first_failure(self, child: subprocess.Popen[bytes]) -> _Exit:
        _, (codes,) = self._collectives.with_values(Call.TRIAL, Agreed(), [float(child.returncode)])
        exits = [_Exit(rank, int(code)) for rank, code in enumerate(codes)]
        # children that were killed because another one failed come last
        failed = sorted((each for each in exits if each.code), key=lambda each: each.code == -signal.SIGKILL)
        return failed[0] if failed else exits[0]


def _has_paused(folder: RunFolder, order: Assignment) -> bool:
    """Return whether the script has left its loop after a checkpoint; launchers may replace its exit code."""
    return folder.requeue_request(order.attempt).exists()


def _ending(folder: RunFolder, heard: _Heard, exited: _Exit, stop: Stop) -> Ending:
    if stop is Stop.END:
        leave = Leave(TERMINATED_EXIT_CODE, "asked to end")
        return Ending(lambda own: own.give_back(is_late=False, has_saved=False), leave)
    if exited.code == REQUEUE_EXIT_CODE or stop is Stop.LEAVE:
        # only its reports show whether a script has saved anything
        leave = Leave(REQUEUE_EXIT_CODE, "the time limit is near")
        return Ending(lambda own: own.give_back(is_late=True, has_saved=own.has_reported()), leave)
    return Ending(lambda own: _tell(own, folder, heard, exited))


def _tell(own: StudyClient, folder: RunFolder, heard: _Heard, exited: _Exit) -> None:
    """Report the end of the trial to the study; called on rank 0 only."""
    if heard.error is not None:
        raise heard.error
    if heard.verdict.prune_reason is not None:
        own.prune(heard.verdict.prune_reason, heard.progress)
    elif exited.code < 0 or exited.code == TERMINATED_EXIT_CODE:
        signum = -exited.code if exited.code < 0 else signal.SIGTERM
        own.lose(f"its command was killed by {signal.Signals(signum).name}")
    elif exited.code:
        lines = _lines(folder, exited.rank)
        reason = f"its command ended with exit code {exited.code}" + "".join(f": {line[:200]}" for line in lines[-1:])
        if failures.cause_of(Failure(message=reason), "\n".join(lines)) is failures.FORGERY:
            own.lose(reason)
        else:
            own.fail(reason)
    else:
        reported = _reported(folder)
        has_trained = heard.progress > 0
        own.complete(_printed(folder) or reported, reported, 0, heard.progress, has_trained)


def _reported(folder: RunFolder) -> dict[str, float]:
    """Return the metrics of the script's last report."""
    metrics: dict[str, float] = {}
    for record in read_jsonl(folder.metrics):
        metrics = record["metrics"]
    return metrics


def _printed(folder: RunFolder) -> dict[str, float]:
    """Return the numbers of the JSON object in rank 0's last line; empty if there is none."""
    with suppress(ValueError, IndexError):
        found = json.loads(_lines(folder, rank=0)[-1])
        if isinstance(found, dict):
            return {str(name): float(value) for name, value in found.items() if isinstance(value, (int, float))}
    return {}


def _lines(folder: RunFolder, rank: int) -> list[str]:
    """Return the last lines that a rank of the newest attempt printed, without empty ones."""
    logs = sorted(folder.logs.glob(f"*-{rank}.log"), key=lambda path: int(path.name.partition("-")[0]))
    text = end_of(logs[-1]) if logs else ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _kill(child: subprocess.Popen[bytes], folder: RunFolder) -> None:
    """Kill a trial's command and all processes that it has started."""
    for pid in {*processes.descendants(child.pid), *_left(folder)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.kill()


def _left(folder: RunFolder) -> list[int]:
    return processes.with_variable(TRIAL_VARIABLE, str(folder.path))
