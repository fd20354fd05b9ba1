"""The batch step of an attempt: opens the rendezvous, starts the ranks, waits, and writes down how it ended.

Under SLURM the batch script runs it: `python -m mgpu_slurm.runtime.batch RUN_FOLDER --token TOKEN -- srun ...`. The
local executor forks it, and gives it ranks to fork instead of a command to run.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mgpu_slurm import claims, records
from mgpu_slurm.errors import ClusterError
from mgpu_slurm.hostlist import expand
from mgpu_slurm.paths import RunFolder, open_to, read_json, write_json
from mgpu_slurm.processes import RUN_VARIABLE, allow_many_files
from mgpu_slurm.runtime import rendezvous
from mgpu_slurm.runtime.listening import Offer
from mgpu_slurm.runtime.requeueing import Job, requeues, start_again
from mgpu_slurm.spec import ATTEMPT_VARIABLE, REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, Spec, read_spec

StartRanks = Callable[[dict[str, str]], dict[int, str]]
"""Starts the ranks with these variables added; the names of the processes to wait for, by pid."""

GRACE_AFTER_FAILURE = 1.0
"""Seconds that the other ranks get to flush their logs once one has failed."""

PATIENCE_FOR_SIGTERM = 1.0
"""Seconds."""

_TASK_FAILURE = re.compile(
    r"^srun: error: (?P<nodes>\S+): task(?P<several>s?) (?P<ranks>\S+): (?P<how>.+)$", re.MULTILINE
)

_ABORT = "srun: Job step aborted: "

_COMPLAINT = re.compile(r"^srun: (?:error|fatal): .+$", re.MULTILINE)

GRACE_AFTER_REQUEUE = 10.0
"""All ranks leave together then, each after its part of the save."""

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
) -> Ending:
    """One attempt from its first event to its last. Expects `WATCHED` signals blocked in the calling thread.

    Args:
        address: what other nodes call this one; the loopback address where all ranks are on this machine.
        describe: tells a failure in words where no rank did.
        ports: on which the ranks reach this machine; None for any.
    """
    attempt = records.attempts_started(folder) + 1
    records.record_event(folder, "started", attempt=attempt, job_id=job_id, nodes=nodes)
    records.update_state(folder, state="RUNNING", attempts=attempt, job_id=job_id, reason="", **_started(folder))
    # what the attempt before died of is over
    folder.failure.unlink(missing_ok=True)
    # several nodes have to reach the store; one node needs no other interface than loopback
    listener = rendezvous.bind("127.0.0.1" if address.startswith("127.") else "", ports)
    variables = rendezvous.exports(address, listener.getsockname()[1])
    variables |= {ATTEMPT_VARIABLE: str(attempt), RUN_VARIABLE: str(folder.path)}
    # a script's ranks connect to a store that is served; those of a job function can serve it themselves
    offer = None if spec.target.is_command or "torch" in sys.modules else Offer(listener)
    alive = start_ranks(variables | (offer.variables() if offer else {}))
    store = _serve_in_background(listener, offer, wanted=spec.resources.ranks > 1)
    ending = _wait(alive)
    store.clear()
    if folder.requeue_wish(attempt).exists():
        ending = replace(ending, code=REQUEUE_EXIT_CODE)
    records.record_event(folder, "ended", attempt=attempt, job_id=job_id, exit_code=ending.code, who=ending.who)
    if records.attempts_started(folder) > attempt:
        return replace(ending, superseded=True)
    if ending.code not in (0, REQUEUE_EXIT_CODE):
        _write_failure(folder, attempt, ending, describe(ending))
    return ending


def _started(folder: RunFolder) -> dict[str, Any]:
    return {"started": records.read_state(folder)["started"] or records.now()}


def _serve_in_background(listener: socket.socket, offer: Offer | None, wanted: bool) -> list[Any]:
    """Serves the store from a thread: where torch still has to be imported, ranks must not wait for that to start,
    and this process must go on watching them.

    Args:
        offer: lets rank 0 serve it.
        wanted: whether somebody will surely connect; torch is imported when somebody does otherwise.
    """
    holder: list[Any] = []

    def serve() -> None:
        if offer is not None and offer.is_taken():
            return
        if not wanted:
            select.select([listener], [], [])
        holder.append(rendezvous.serve(listener))

    threading.Thread(target=serve, daemon=True).start()
    return holder


def _wait(alive: dict[int, str]) -> Ending:
    """Until no process is left; the first failure ends the others."""
    ending = Ending(0)
    told_to_end = False
    deadline: float | None = None
    while alive:
        timeout = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        received = signal.sigtimedwait(WATCHED, timeout)
        if received is None and deadline is not None:
            signal_groups(alive, signal.SIGKILL)
            deadline = None
        elif received is not None and received.si_signo == signal.SIGHUP:
            signal_groups(alive, signal.SIGKILL)
        elif received is not None and received.si_signo == signal.SIGTERM:
            told_to_end = True
        for who, code in _ended(alive):
            if code and not ending.code:
                ending = Ending(code, who)
                # who is told to end saves first, and has until SIGKILL comes from whoever told it
                if not told_to_end:
                    deadline = time.monotonic() + (
                        GRACE_AFTER_REQUEUE if code == REQUEUE_EXIT_CODE else GRACE_AFTER_FAILURE
                    )
    return replace(ending, told_to_end=told_to_end)


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


def _write_failure(folder: RunFolder, attempt: int, ending: Ending, description: str) -> None:
    """`failure.json`: the first cause among what the ranks recorded, else how the first process ended."""
    found = [read_json(path) for path in sorted(folder.logs.glob(f"{attempt}-*.failure.json"))]
    # of several that failed together the first; under SLURM the process that ended is srun
    named = re.match(r"ranks? (\d+)", description)
    who = f"rank {named[1]}" if named else ending.who
    # what a rank saw of another one's end is no cause, unless it was the first to end
    causes = [record for record in found if record and (not record["consequence"] or f"rank {record['rank']}" == who)]
    causes.sort(key=lambda record: (record["consequence"], record["time"]))
    first = causes[0] if causes else {"message": description}
    if "error" not in first and "exit code" in description:
        first["message"] += _last_line(folder, attempt, who)
    write_json(folder.failure, {"attempt": attempt, "exit_code": ending.code, "who": who, **first})


def _last_line(folder: RunFolder, attempt: int, who: str) -> str:
    """What a rank said last: of a script that raised, its error."""
    rank = who.removeprefix("rank ")
    log = folder.rank_log(attempt, int(rank)) if rank.isdigit() else None
    lines = log.read_text(errors="replace").split("\n") if log is not None and log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:200]}" if said else ""


class LaunchLog:
    """What srun adds to its log from now on; earlier starts of a job wrote to the same one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def describe(self, ending: Ending) -> str:
        """Tells a failure by its first cause, as far as srun saw it."""
        return first_failure(self._added()) or describe_exit(ending)

    def begins_with_sigterm(self) -> bool:
        """Whether the first task that failed had been told to end; the others are, once one has failed."""
        match = _TASK_FAILURE.search(self._added())
        return match is not None and match["how"] in ("Terminated", f"Exited with exit code {TERMINATED_EXIT_CODE}")

    def tells_of_an_abort(self) -> bool:
        """Whether SLURM ended the ranks, as it does with the job, and not because one of them failed."""
        return _ABORT in self._added()

    def _added(self) -> str:
        added = self._path.read_bytes()[self._position :] if self._path.exists() else b""
        return added.decode(errors="replace")


def first_failure(launch_log: str) -> str | None:
    """Which task failed first and how, as srun says, whose exit code only tells the highest of all tasks; or why it
    could not start them."""
    match = _TASK_FAILURE.search(launch_log)
    if match is None:
        complaint = _COMPLAINT.search(launch_log)
        return None if complaint is None else complaint[0]
    who = f"rank{match['several']} {match['ranks']} on {match['nodes']}"
    exited = re.fullmatch(r"Exited with exit code (\d+)", match["how"])
    return f"{who}: {match['how']}" if exited is None else describe_exit(Ending(int(exited[1]), who))


def run_command(command: list[str]) -> StartRanks:
    """Starts the ranks by a launcher such as srun."""

    def start(variables: dict[str, str]) -> dict[int, str]:
        # kept: a dropped Popen is collected by the next one, and its exit code with it
        started.append(subprocess.Popen(command, env=os.environ | variables, preexec_fn=own_group))
        return {started[-1].pid: Path(command[0]).name}

    started: list[subprocess.Popen[bytes]] = []
    return start


def own_group() -> None:
    """In a new child: a session of its own, which signals can name as one, and no signal blocked."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def main(arguments: list[str]) -> int:
    path, option, token, separator, *command = arguments
    assert (option, separator) == ("--token", "--"), arguments
    folder = RunFolder(Path(path))
    spec = read_spec(folder)
    open_to(spec.readable_by)
    folder.create_task()
    job = Job(job_id(), token)
    holder = claims.take(folder, job.token, job.id)
    if holder != job.id:
        print(f"mgpu_slurm: run {folder.run} is the work of job {holder}: nothing is left for job {job.id}")
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    allow_many_files()
    nodes = expand(os.environ["SLURM_JOB_NODELIST"])
    address = nodes[0] if len(nodes) > 1 else "127.0.0.1"
    log = LaunchLog(folder.launch_log(job.id))
    ending = run_attempt(folder, spec, job.id, nodes, address, run_command(command), log.describe)
    if not ending.told_to_end and log.tells_of_an_abort():
        ending = replace(ending, told_to_end=True)
    return _conclude(folder, spec, job, ending)


def job_id() -> str:
    """The id by which SLURM's commands know this job, array tasks included."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


def _conclude(folder: RunFolder, spec: Spec, job: Job, ending: Ending) -> int:
    if ending.superseded:
        # neither its end nor its wish to be started again is the run's
        return ending.code
    # a job function that has returned is done; with what code a command ends when it is told to tells nothing
    if (ending.code or spec.target.is_command) and _is_slurms_doing(ending):
        # cancelled, preempted or timed out: SLURM knows which, and says so to `status`
        return ending.code
    if ending.code == REQUEUE_EXIT_CODE and requeues(folder, job) < spec.max_requeues:
        try:
            return start_again(folder, spec, job)
        except ClusterError as problem:
            state, reason = "TIMEOUT", f"SLURM did not start it again: {problem}; `resume` goes on"
    elif ending.code == REQUEUE_EXIT_CODE:
        state = "TIMEOUT"
        reason = f"asked to be started again, and all of --max-requeues {spec.max_requeues} are used"
    elif ending.code:
        state, reason = "FAILED", records.failure_line(folder)
    else:
        state, reason = "COMPLETED", ""
    records.update_state(folder, state=state, ended=records.now(), reason=reason)
    return ending.code


def _is_slurms_doing(ending: Ending) -> bool:
    """Whether SLURM ended the job; the ranks may hear of it, and be gone, a moment before this process does."""
    patience = 0.0 if ending.code in (0, REQUEUE_EXIT_CODE) else PATIENCE_FOR_SIGTERM
    return ending.told_to_end or bool(signal.sigtimedwait({signal.SIGTERM}, patience))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
