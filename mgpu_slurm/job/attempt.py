"""One attempt of a run: opens the rendezvous, starts the ranks, waits for them, and records how it ended.

All executors use it: SLURM's batch step (see `batch`) and a process forked by the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mgpu_slurm.core import processes, retry, torch_versions
from mgpu_slurm.core.files import read_json, write_json
from mgpu_slurm.core.processes import RUN_VARIABLE
from mgpu_slurm.job import retry_policy, store_server
from mgpu_slurm.job.gil_monitor import GilMonitor
from mgpu_slurm.job.sampling.node_sampler import ChildRank, ChildSampling
from mgpu_slurm.job.socket_handoff import SocketOffer
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE, REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec
from mgpu_slurm.run_folder import failures, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Failure

GRACE_AFTER_FAILURE = 1.0
"""Seconds for the other ranks to flush their logs after one has failed."""

GRACE_AFTER_REQUEUE = 10.0
"""Minimum seconds for the other ranks after one has requested a requeue; a script's rank may still be saving."""

LOOK_EVERY = 1.0
"""Seconds between two checks for a requeue request from a rank behind a launcher."""

RECORDED_RESOURCES = ("nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task")
"""What the event of a start says of the request, which a later resumption may change."""

WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP}
"""SIGTERM is meant for the ranks, which save and exit; this process waits for them. SIGHUP: the parent is gone."""


@dataclass(frozen=True)
class Ending:
    """How an attempt's ranks ended."""

    code: int
    """Exit code of the first process that failed (128 + signal for a killed one), else 0."""
    who: str = ""
    """Name of that process."""
    told_to_end: bool = False
    """Whether this process received a SIGTERM: SLURM sends one to the batch step when it ends a job."""
    cut_short: bool = False
    """Whether this process ended the remaining ranks."""
    superseded: bool = False
    """Whether a later attempt has started: SLURM abandons a node that it cannot reach, where everything still runs."""


def describe_exit(ending: Ending) -> str:
    if ending.code > 128:
        with contextlib.suppress(ValueError):
            return f"{ending.who} was killed by {signal.Signals(ending.code - 128).name}"
    return f"{ending.who} ended with exit code {ending.code}"


class Launch(ABC):
    """The ranks of an attempt: the nodes on which they run, and how they start there."""

    job_id: str
    names: list[str]
    """Names of the nodes."""
    address: str
    """Address of this machine for the ranks; the loopback address if all of them are on it."""
    ports: range | None = None
    """Ports on which the ranks can reach this machine; None for any."""

    @abstractmethod
    def start(self, variables: dict[str, str]) -> dict[int, str]:
        """Start the ranks with these additional variables; return the names of the processes to wait for, by pid."""

    def describe(self, ending: Ending, followers: Collection[int]) -> str:
        """Describe a failure that no rank reported.

        Args:
            followers: ranks that failed because another one had ended.
        """
        return describe_exit(ending)

    def last_words(self) -> str:
        """Return the last line that was printed before ranks had their logs, other than the launcher's own; or ""."""
        return ""

    def children(self, started: Iterable[int]) -> Mapping[int, ChildRank]:
        """Return which of the processes that it has started are ranks, by pid; none if it has started a launcher."""
        return {}

    def is_in_vain(self) -> bool:
        """Return whether the launcher waits for something that will never happen; called every second."""
        return False


def run_attempt(folder: RunFolder, spec: Spec, launch: Launch) -> Ending:
    """Run one attempt, from its first event to its last. Expects `WATCHED` signals blocked in the calling thread."""
    records.note_unseen_end(folder, records.settle_event)
    attempt = records.attempts_started(folder) + 1
    # number of this start of the job, by which accounting identifies it
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    started = {"attempt": attempt, "job_id": launch.job_id, "nodes": launch.names, "restarts": restarts}
    asked = {name: getattr(spec.resources, name) for name in RECORDED_RESOURCES}
    records.settle_event(folder, "started", **started, asked=asked, **retry_policy.checkpoint_fact(folder))
    began = records.read_state(folder).started or records.now()
    first_started = next((event.time for event in records.events(folder) if event.event == "started"), began)
    # what an earlier attempt said of its progress
    fresh = {"total": None, "pace": None, "reported": None}
    records.settle_state(
        folder,
        state="RUNNING",
        attempts=attempt,
        job_id=launch.job_id,
        reason="",
        started=began,
        first_started=first_started,
        ended=None,
        **fresh,
    )
    # the previous attempt's failure is over
    folder.failure.unlink(missing_ok=True)
    # several nodes have to reach the store; one node only needs loopback
    listener = store_server.bind("127.0.0.1" if launch.address.startswith("127.") else "", launch.ports)
    variables = store_server.exports(launch.address, listener.getsockname()[1])
    variables |= {ATTEMPT_VARIABLE: str(attempt), RUN_VARIABLE: str(folder.path)}
    for left in folder.secrets():
        # left by an attempt whose batch step was killed
        left.unlink(missing_ok=True)
    secret_file = folder.secret(attempt)
    retry.for_the_disk(lambda: store_server.create_secret(secret_file), secret_file)
    variables[store_server.SECRET_VARIABLE] = str(secret_file)
    offer = SocketOffer(listener) if _rank_0_serves(spec) else None
    oom_kills = processes.oom_kills()
    alive = launch.start(variables | (offer.variables() if offer else {}))
    sampling = ChildSampling(folder, attempt, launch.children(alive))
    service = _Service(listener, offer, wanted=spec.resources.ranks > 1)
    request = folder.requeue_request(attempt)
    # the rest of the lead is for the requeue
    grace = max(GRACE_AFTER_REQUEUE, (spec.lead or 0) / 2)
    locked = GilMonitor(folder, attempt, 60 * spec.stuck_after)

    def is_hopeless() -> bool:
        return service.failed or launch.is_in_vain() or locked.is_stuck()

    ending = _wait(alive, request, grace, folder.cancel_request, is_hopeless, sampling.ended)
    sampling.close()
    locked.conclude(launch.names[0])
    service.end()
    secret_file.unlink(missing_ok=True)
    failure: Failure | None = None
    first = None
    if request.exists():
        # a sweep's remaining ranks request it if one has died, or a rank has given a reason
        said = request.read_text().partition("\n")[0] or None
        is_failure = ending.code not in (0, REQUEUE_EXIT_CODE) and not ending.cut_short
        first = launch.describe(ending, _followers(_recorded(folder, attempt))) if is_failure else said
        ending = replace(ending, code=REQUEUE_EXIT_CODE)
    if ending.code == 0 and folder.terminated(attempt).exists():
        ending = replace(ending, code=TERMINATED_EXIT_CODE, who="a command")
    if ending.code not in (0, REQUEUE_EXIT_CODE):
        cause = service.failure or _first_cause(folder, attempt, ending, launch, spec.resources.ranks)
        # on real nodes ranks are on other machines too, and SLURM reports it
        killed = processes.oom_kills() - oom_kills if spec.nodes_are_simulated else 0
        failure = replace(cause, attempt=attempt, exit_code=ending.code, oom_kills=killed)
    facts = {"exit_code": ending.code, "who": ending.who, "trial": failure and failure.trial}
    if first is not None:
        facts["message"] = first
    if failure is not None:
        facts |= {"error": failure.error, "message": failure.message}
    if records.attempts_started(folder) > attempt:
        # for example on an abandoned node that is still alive; the next attempt has recorded the end of this one
        return replace(ending, superseded=True)
    records.settle_event(folder, "ended", attempt=attempt, job_id=launch.job_id, **facts)
    if failure is not None:
        record = failure.to_json()
        retry.for_the_disk(lambda: write_json(folder.failure, record), folder.failure)
    return ending


def restarts_in_place(folder: RunFolder, spec: Spec, code: int) -> bool:
    """Return whether the ranks of a sweep's worker restart in place, because they failed in a trial or asked for it.

    The request holds once: an attempt that reaches no trial starts no further one. Neither does an attempt into whose
    rendezvous a stranger has written, who may do it again.

    Args:
        code: Exit code of the newest attempt.
    """
    if spec.kind == "run" or code in (REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE):
        return False
    mark = folder.unfinished(records.attempts_started(folder))
    # those of the processes of a worker, if it has several
    marks = [*mark.parent.glob(mark.name), *mark.parent.glob(f"{mark.stem}-*{mark.suffix}")]
    if not marks:
        return False
    for mark in marks:
        mark.unlink()
    return failures.cause_of(records.read_failure(folder) or Failure()) is not failures.FORGERY


def _rank_0_serves(spec: Spec) -> bool:
    """Return whether to offer the rendezvous to rank 0, which imports torch anyway and joins at once.

    A script's ranks expect a running store, and a single rank of a job function need not join at all. With a container,
    there may be no torch outside of it.
    """
    joins_at_once = not spec.target.is_command and spec.resources.ranks > 1
    return (joins_at_once or spec.container is not None) and "torch" not in sys.modules


class _Service:
    """The store of an attempt, served from a thread.

    While torch is being imported, the ranks can start and this process keeps watching them. If the thread fails, the
    ranks would wait for each other in vain.
    """

    def __init__(self, listener: socket.socket, offer: SocketOffer | None, wanted: bool) -> None:
        """
        Args:
            offer: Lets rank 0 serve it.
            wanted: Whether a rank is sure to connect; if not, torch is imported on the first connection.
        """
        self._listener = listener
        self._offer = offer
        self._wanted = wanted
        self._stores: list[Any] = []
        self.failure: Failure | None = None
        """Why the thread has failed; None if it has not."""
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def end(self) -> None:
        self._stores.clear()

    def _serve(self) -> None:
        try:
            if self._offer is not None and self._offer.is_taken():
                return
            if not self._wanted:
                select.select([self._listener], [], [])
            self._stores.append(torch_versions.serve_store(self._listener))
        except BaseException as error:
            shown = traceback.format_exc()
            print(shown, end="", file=sys.stderr, flush=True)
            message = f"the batch step could not serve the rendezvous: {type(error).__name__}: {error}"
            self.failure = Failure(who="the batch step", message=message, traceback=shown)


def _wait(
    alive: dict[int, str],
    request: Path,
    grace_after_requeue: float,
    cancel_request: Path,
    is_hopeless: Callable[[], bool],
    note_end: Callable[[int, resource.struct_rusage], None],
) -> Ending:
    """Wait until all processes have ended. The first that fails or requests a requeue ends the others after a grace.

    Args:
        request: Requeue request of a rank behind a launcher: an exit code would end the others at once.
        grace_after_requeue: Seconds for the others after such a request.
        cancel_request: Exists if the ranks have been told to end, perhaps before this process has.
        is_hopeless: Returns whether no rank can end or save by itself any more; called every second.
        note_end: Called with the pid of each process that has ended, and what it used.
    """
    ending = Ending(0)
    deadline: float | None = None
    while alive:
        timeout = LOOK_EVERY if deadline is None else max(0.0, deadline - time.monotonic())
        received = signal.sigtimedwait(WATCHED, timeout)
        if received is None and deadline is not None:
            # a launcher lives as long as any rank, and on SIGTERM it ends all of them at once
            signal_groups(alive, signal.SIGKILL if ending.code else signal.SIGTERM)
            ending, deadline = replace(ending, cut_short=True), None
        elif received is None and is_hopeless():
            signal_groups(alive, signal.SIGKILL)
            ending = replace(ending, cut_short=True)
        elif received is not None and received.si_signo == signal.SIGHUP:
            signal_groups(alive, signal.SIGKILL)
        elif received is not None and received.si_signo == signal.SIGTERM:
            ending = replace(ending, told_to_end=True)
        for who, code in _ended(alive, note_end):
            if code and not ending.code:
                ending = replace(ending, code=code, who=who)
        # ranks that are told to end save first; the sender of the SIGTERM sends SIGKILL when their time is up
        is_told = ending.told_to_end or ending.cut_short
        comes_back = not is_told and (ending.code == REQUEUE_EXIT_CODE or request.exists())
        if deadline is None and not is_told and (ending.code or comes_back) and not cancel_request.exists():
            deadline = time.monotonic() + (grace_after_requeue if comes_back else GRACE_AFTER_FAILURE)
    return ending


def signal_groups(alive: dict[int, str], signum: int) -> None:
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signum)


def _ended(alive: dict[int, str], note_end: Callable[[int, resource.struct_rusage], None]) -> list[tuple[str, int]]:
    """Remove from `alive` the processes that have ended since the last call; return them with shell-style exit codes.

    Those killed by a signal come first: the others may have failed because of them.
    """
    found = []
    for pid in list(alive):
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            note_end(pid, used)
            code = os.waitstatus_to_exitcode(status)
            found.append((alive.pop(pid), 128 - code if code < 0 else code))
    return sorted(found, key=lambda ended: -ended[1])


def _recorded(folder: RunFolder, attempt: int) -> list[Failure]:
    """Return what ranks have recorded of their ends."""
    paths = sorted(folder.logs.glob(f"{attempt}-*.failure.json"))
    return [Failure.from_json(each) for path in paths if (each := read_json(path))]


def _followers(found: Sequence[Failure]) -> set[int]:
    """Return the ranks that failed because another one had ended."""
    return {each.rank for each in found if each.consequence and each.rank is not None}


def _first_cause(folder: RunFolder, attempt: int, ending: Ending, launch: Launch, ranks: int) -> Failure:
    """Return the content of `failure.json`: the first cause that ranks recorded, else how the first process ended."""
    found = _recorded(folder, attempt)
    description = launch.describe(ending, _followers(found))
    # the first of several that failed together; under SLURM the process that ended is srun
    named = re.match(r"ranks? (\d+)", description)
    who = f"rank {named[1]}" if named else ending.who
    # a consequence of another rank's end is not a cause, unless this rank ended first
    known = [each for each in found if not each.consequence or f"rank {each.rank}" == who]
    known.sort(key=lambda each: (each.consequence, each.time))
    stopped = _reason_to_stop(folder, attempt) if ending.code == TERMINATED_EXIT_CODE else ""
    first = failures.first_stuck(found, ranks) or (known[0] if known else Failure(message=stopped or description))
    failure = replace(first, attempt=attempt, who=first.who or who)
    if failure.error is None and "exit code" in description:
        # the error of a script that raised one, or of what should have started a rank
        words = records.said_last(folder, failure) or launch.last_words()
        said = [line.strip() for line in words.splitlines() if line.strip()]
        if said:
            failure = replace(failure, message=f"{failure.message}: {said[-1][:200]}")
    return failure


def _reason_to_stop(folder: RunFolder, attempt: int) -> str:
    """Return what rank 0 wrote when it stopped because of a SIGTERM; empty if it did not, as when it was killed."""
    try:
        return folder.terminated(attempt).read_text().strip()
    except FileNotFoundError:
        return ""


def own_group() -> None:
    """Give a new child its own session, which can be signalled as a group, and unblock its signals."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
