"""One attempt of a run: opens the rendezvous, starts the ranks, waits for them, and writes down how it ended.

Every executor goes through it: SLURM's batch step (see `batch`), and a process that the supervisor forks.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mgpu_slurm.core import failures, processes, records, retry
from mgpu_slurm.core.files import read_json, write_json
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.processes import RUN_VARIABLE
from mgpu_slurm.job import retry_policy, store_secret, store_server
from mgpu_slurm.job.gil_monitor import LockWatch
from mgpu_slurm.job.socket_handoff import SocketOffer
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE, REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec

StartRanks = Callable[[dict[str, str]], dict[int, str]]
"""Starts the ranks with these variables added; the names of the processes to wait for, by pid."""

GRACE_AFTER_FAILURE = 1.0
"""Seconds that the other ranks get to flush their logs once one has failed."""

GRACE_AFTER_REQUEUE = 10.0
"""Seconds at least that the others get once one has asked to be started again; one of a script's may still save."""

LOOK_EVERY = 1.0
"""Seconds between two looks for a rank that asks, behind a launcher, to be started again."""

WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP}
"""SIGTERM is for the ranks, who save and leave: this process stays until they have. SIGHUP: the parent is gone."""


@dataclass(frozen=True)
class Ending:
    """How an attempt's ranks ended."""

    code: int
    """Exit code of the first process that failed (128 + signal for a killed one), else 0."""
    who: str = ""
    """That process."""
    told_to_end: bool = False
    """Whether this process got a SIGTERM meanwhile: SLURM sends one to the batch step when it ends a job."""
    cut_short: bool = False
    """Whether those that were left were ended from here."""
    superseded: bool = False
    """Whether a later attempt has started meanwhile: SLURM gives a node up that it cannot reach, where all goes on."""


def describe_exit(ending: Ending) -> str:
    if ending.code > 128:
        with contextlib.suppress(ValueError):
            return f"{ending.who} was ended by {signal.Signals(ending.code - 128).name}"
    return f"{ending.who} ended with exit code {ending.code}"


def run_attempt(
    folder: RunFolder,
    spec: Spec,
    job_id: str,
    nodes: list[str],
    address: str,
    start_ranks: StartRanks,
    describe: Callable[[Ending], str] = describe_exit,
    ports: range | None = None,
    is_in_vain: Callable[[], bool] = lambda: False,
) -> Ending:
    """One attempt from its first event to its last. Expects `WATCHED` signals blocked in the calling thread.

    Args:
        address: what other nodes call this one; the loopback address where all ranks are on this machine.
        describe: tells a failure in words where no rank did.
        ports: on which the ranks reach this machine; None for any.
        is_in_vain: whether what starts the ranks waits for what will never be; asked every second.
    """
    records.note_unseen_end(folder, records.settle_event)
    attempt = records.attempts_started(folder) + 1
    # which of the job's starts it is, by which accounting tells of it
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    began_at = retry_policy.beginning_facts(folder)
    records.settle_event(folder, "started", attempt=attempt, job_id=job_id, nodes=nodes, restarts=restarts, **began_at)
    began = records.read_state(folder)["started"] or records.now()
    records.settle_state(folder, state="RUNNING", attempts=attempt, job_id=job_id, reason="", started=began, ended=None)
    # what the attempt before died of is over
    folder.failure.unlink(missing_ok=True)
    # several nodes have to reach the store; one node needs no other interface than loopback
    listener = store_server.bind("127.0.0.1" if address.startswith("127.") else "", ports)
    variables = store_server.exports(address, listener.getsockname()[1])
    variables |= {ATTEMPT_VARIABLE: str(attempt), RUN_VARIABLE: str(folder.path)}
    for left in folder.secrets():
        # of an attempt whose batch step was killed
        left.unlink(missing_ok=True)
    secret_file = folder.secret(attempt)
    retry.for_the_disk(lambda: store_secret.create(secret_file), secret_file)
    variables[store_secret.VARIABLE] = str(secret_file)
    offer = SocketOffer(listener) if _rank_0_serves(spec) else None
    oom_kills = processes.oom_kills()
    alive = start_ranks(variables | (offer.variables() if offer else {}))
    service = _Service(listener, offer, wanted=spec.resources.ranks > 1)
    wish = folder.requeue_wish(attempt)
    # what is left of the lead then is for the requeue
    grace = max(GRACE_AFTER_REQUEUE, (spec.lead or 0) / 2)
    locked = LockWatch(folder, attempt, 60 * spec.stuck_after)
    ending = _wait(alive, wish, grace, folder.cancel_wish, lambda: service.failed or is_in_vain() or locked.is_stuck())
    locked.conclude(nodes[0])
    service.end()
    secret_file.unlink(missing_ok=True)
    failure: dict[str, Any] = {}
    first = None
    if wish.exists():
        # of a sweep's ranks those that are left ask for it where one has died
        # or a rank has said why
        said = wish.read_text().partition("\n")[0] or None
        first = describe(ending) if ending.code not in (0, REQUEUE_EXIT_CODE) and not ending.cut_short else said
        ending = replace(ending, code=REQUEUE_EXIT_CODE)
    if ending.code == 0 and folder.terminated(attempt).exists():
        ending = replace(ending, code=TERMINATED_EXIT_CODE, who="a command")
    if ending.code not in (0, REQUEUE_EXIT_CODE):
        cause = service.failure or _first_cause(folder, attempt, ending, describe, spec.resources.ranks)
        failure = {"attempt": attempt, "exit_code": ending.code, **cause}
        if spec.nodes_are_simulated:
            # elsewhere ranks are on other machines too, and SLURM says it
            failure["oom_kills"] = processes.oom_kills() - oom_kills
    facts = {"exit_code": ending.code, "who": ending.who, "trial": failure.get("trial")}
    if first is not None:
        facts["message"] = first
    if failure:
        facts |= {"error": failure.get("error"), "message": failure["message"]}
    if records.attempts_started(folder) > attempt:
        # as on a node that was given up and lives; the next one has noted this one's end
        return replace(ending, superseded=True)
    records.settle_event(folder, "ended", attempt=attempt, job_id=job_id, **facts)
    if failure:
        retry.for_the_disk(lambda: write_json(folder.failure, failure), folder.failure)
    return ending


def goes_on_in_place(folder: RunFolder, spec: Spec, code: int) -> bool:
    """Whether the ranks of a sweep's worker are to start again where they are: they failed in a trial, or want to.

    It is so once: an attempt that comes to no trial starts no other one. Nor does one into whose rendezvous a stranger
    has written: who did so may do it again.

    Args:
        code: with which the newest attempt has ended.
    """
    if spec.kind == "run" or code in (REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE):
        return False
    try:
        folder.unfinished(records.attempts_started(folder)).unlink()
    except FileNotFoundError:
        return False
    return failures.cause_of(read_json(folder.failure) or {}) is not failures.FORGERY


def _rank_0_serves(spec: Spec) -> bool:
    """Whether the rendezvous is better left to rank 0, who imports torch anyway and joins at once.

    A script's ranks expect a store that is served; and a single rank of a job function joins only if it wants to.
    """
    return not spec.target.is_command and spec.resources.ranks > 1 and "torch" not in sys.modules


class _Service:
    """The store of an attempt, served from a thread: where torch still has to be imported, ranks must not wait for that
    to start, and this process must go on watching them. Where the thread fails, the ranks would wait for each other in
    vain."""

    def __init__(self, listener: socket.socket, offer: SocketOffer | None, wanted: bool) -> None:
        """
        Args:
            offer: lets rank 0 serve it.
            wanted: whether somebody will surely connect; torch is imported when somebody does otherwise.
        """
        self._listener = listener
        self._offer = offer
        self._wanted = wanted
        self._stores: list[Any] = []
        self.failure: dict[str, Any] = {}
        """For `failure.json`, if the thread has failed."""
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

    @property
    def failed(self) -> bool:
        return bool(self.failure)

    def end(self) -> None:
        self._stores.clear()

    def _serve(self) -> None:
        try:
            if self._offer is not None and self._offer.is_taken():
                return
            if not self._wanted:
                select.select([self._listener], [], [])
            self._stores.append(store_server.serve(self._listener))
        except BaseException as error:
            shown = traceback.format_exc()
            print(shown, end="", file=sys.stderr, flush=True)
            message = f"the batch step could not serve the rendezvous: {type(error).__name__}: {error}"
            self.failure = {"who": "the batch step", "message": message, "traceback": shown}


def _wait(
    alive: dict[int, str],
    wish: Path,
    grace_after_requeue: float,
    cancel_wish: Path,
    is_hopeless: Callable[[], bool],
) -> Ending:
    """Until no process is left; the first that fails, or asks to be started again, ends the others after a while.

    Args:
        wish: what a rank behind a launcher leaves that asks so: an exit code would end the others at once.
        grace_after_requeue: seconds that the others get then.
        cancel_wish: there where the ranks are told to end, maybe before this process is.
        is_hopeless: whether there is no rank that could end, or save, by itself; asked every second.
    """
    ending = Ending(0)
    deadline: float | None = None
    while alive:
        timeout = LOOK_EVERY if deadline is None else max(0.0, deadline - time.monotonic())
        received = signal.sigtimedwait(WATCHED, timeout)
        if received is None and deadline is not None:
            # a launcher is alive as long as any rank is, and takes SIGTERM for an order to end them all at once
            signal_groups(alive, signal.SIGKILL if ending.code else signal.SIGTERM)
            ending, deadline = replace(ending, cut_short=True), None
        elif received is None and is_hopeless():
            signal_groups(alive, signal.SIGKILL)
            ending = replace(ending, cut_short=True)
        elif received is not None and received.si_signo == signal.SIGHUP:
            signal_groups(alive, signal.SIGKILL)
        elif received is not None and received.si_signo == signal.SIGTERM:
            ending = replace(ending, told_to_end=True)
        for who, code in _ended(alive):
            if code and not ending.code:
                ending = replace(ending, code=code, who=who)
        # who is told to end saves first, and has until SIGKILL comes from whoever told it
        is_told = ending.told_to_end or ending.cut_short
        comes_back = not is_told and (ending.code == REQUEUE_EXIT_CODE or wish.exists())
        if deadline is None and not is_told and (ending.code or comes_back) and not cancel_wish.exists():
            deadline = time.monotonic() + (grace_after_requeue if comes_back else GRACE_AFTER_FAILURE)
    return ending


def signal_groups(alive: dict[int, str], signum: int) -> None:
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signum)


def _ended(alive: dict[int, str]) -> list[tuple[str, int]]:
    """The processes that have ended since the last call, taken out of `alive`, with shell-style exit codes.

    Those that a signal ended come first: the others may have failed because of them.
    """
    found = []
    for pid in list(alive):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            found.append((alive.pop(pid), 128 - code if code < 0 else code))
    return sorted(found, key=lambda ended: -ended[1])


def _first_cause(
    folder: RunFolder, attempt: int, ending: Ending, describe: Callable[[Ending], str], ranks: int
) -> dict[str, Any]:
    """For `failure.json`: the first cause among what the ranks recorded, else how the first process ended."""
    description = describe(ending)
    found = [each for path in sorted(folder.logs.glob(f"{attempt}-*.failure.json")) if (each := read_json(path))]
    # of several that failed together the first; under SLURM the process that ended is srun
    named = re.match(r"ranks? (\d+)", description)
    who = f"rank {named[1]}" if named else ending.who
    # what a rank saw of another one's end is no cause, unless it was the first to end
    known = [record for record in found if not record["consequence"] or f"rank {record['rank']}" == who]
    known.sort(key=lambda record: (record["consequence"], record["time"]))
    first = failures.first_stuck(found, ranks) or (known[0] if known else {"message": description})
    failure = {"attempt": attempt, "who": who, **first}
    if "error" not in failure and "exit code" in description:
        # of a script that raised, its error
        said = [line.strip() for line in records.said_last(folder, failure).splitlines() if line.strip()]
        failure["message"] += f": {said[-1][:200]}" if said else ""
    return failure


def own_group() -> None:
    """In a new child: a session of its own, which signals can name as one, and no signal blocked."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
