"""`attach()`: the same `Run` in a script that was started by a torchrun-style command, or by hand."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import sys
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import ForgeryError
from mgpu_slurm.core.processes import RUN_VARIABLE, TRIAL_VARIABLE
from mgpu_slurm.metrics import report_socket
from mgpu_slurm.rank import crash, preflight, rank_info
from mgpu_slurm.rank.communication import rendezvous
from mgpu_slurm.rank.communication.signed_store import signed
from mgpu_slurm.rank.rank_info import from_environment
from mgpu_slurm.rank.signals import (
    LEAD_SECONDS_VARIABLE,
    PART_OF_LEAD,
    StopFlag,
    ignore_stop_signals,
    leave_from_here,
    request_requeue,
)
from mgpu_slurm.rank.torch_adapter import default_store
from mgpu_slurm.rank.watchdog import Watchdog, watchdog
from mgpu_slurm.request import parallelism
from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE, REQUEUE_EXIT_CODE, STUCK_AFTER_VARIABLE
from mgpu_slurm.run_folder import layout
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run

if TYPE_CHECKING:
    from mgpu_slurm.rank.rank_info import RankInfo

_attached: list[Run] = []


def attach() -> Run:
    """Return this process's run; the same object at each call.

    In a submitted command, it is the submitted run; in a sweep, it is a trial, and `report` does not return if the
    trial is pruned. Under a plain torchrun or srun, or without either, it is a new run in
    `runs/<script>-attached-<time>` of the working directory. If the script has created a process group, it is used and
    left intact; otherwise one is created, and destroyed at the end of the process.

    A rank that fails should raise an error: its process then ends soon, even if it has other threads.
    `sys.exit("message")` calls no hook, so Python first waits for all non-daemon threads.
    """
    if not _attached:
        _attached.append(_make())
    return _attached[0]


def _make() -> Run:
    facts = from_environment()
    device = rank_info.choose_device(facts)
    stop = StopFlag()
    stop.listen()
    # called last: an interpreter that ends restores the default of handled signals, which would kill it
    atexit.register(ignore_stop_signals, signal.SIGTERM)
    lead = os.environ.get(LEAD_SECONDS_VARIABLE) if _is_the_run() else None
    stop.watch_signals(PART_OF_LEAD * float(lead) if lead else None, _leave_at_last)
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
    submitted = _submitted()
    if submitted is not None:
        atexit.register(_request_requeue, stop, submitted, attempt)
    shared = None
    if facts.world_size > 1 and not dist.is_initialized():
        shared = rendezvous.join(facts, device)
        atexit.register(torch_versions.destroy_groups)
    address = os.environ.get(report_socket.VARIABLE)
    judge = None if address is None else report_socket.ReportClient(address)
    options = Parallelism(**json.loads(os.environ.get(parallelism.VARIABLE, "{}")))
    run = Run(
        facts,
        _folder(facts),
        device,
        attempt,
        stop,
        judge=judge,
        watchdog=_watchdog_of(facts, attempt),
        layout=options.layout(facts.world_size, facts.local_world_size),
    )
    preflight.warn([shared] if shared is not None else [], RunFolder(run.folder), attempt, facts)
    if _is_the_run() or facts.world_size > 1:
        _leave_soon_after_an_error(run)
    # the interpreter sets `last_value` after an uncaught error; the others may then be waiting for this rank
    atexit.register(lambda: run.close(waits=not hasattr(sys, "last_value")))
    return run


def _leave_soon_after_an_error(run: Run) -> None:
    """Limit how long this process takes to end after an uncaught error: the other ranks may wait for it, while it waits
    for one of its threads or for them."""
    show = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        show(kind, error, frames)
        sys.stdout.flush()
        run.note_failure(error)
        if not (sys.flags.inspect or sys.flags.interactive):
            crash.leave_soon(crash.exit_code(error), run.await_save)

    sys.excepthook = shown


def _watchdog_of(facts: RankInfo, attempt: int) -> Watchdog | None:
    # the end of a trial is recorded by its worker
    folder = RunFolder(Path(os.environ[RUN_VARIABLE])) if _is_the_run() else None
    return watchdog(float(os.environ.get(STUCK_AFTER_VARIABLE, "0")), facts, folder, attempt)


def _is_the_run() -> bool:
    """Return whether this process is the submitted run, not a trial or a script started by hand."""
    return RUN_VARIABLE in os.environ and TRIAL_VARIABLE not in os.environ


def _request_requeue(stop: StopFlag, folder: RunFolder, attempt: int) -> None:
    """Request the restart in a file: a shell or launcher around this script may exit with another code."""
    if stop.will_restart:
        request_requeue(folder, attempt)


def _leave_at_last() -> None:
    """Leave and requeue if there is a checkpoint: this process has reached no boundary before the time limit."""
    folder = RunFolder(Path(os.environ[RUN_VARIABLE]))
    if checkpoints.has_checkpoint(folder):
        attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        leave_from_here(REQUEUE_EXIT_CODE, lambda: request_requeue(folder, attempt))


def _folder(facts: RankInfo) -> Path:
    submitted = _submitted()
    if submitted is not None:
        return submitted.path
    script = Path(sys.argv[0]).stem or "python"
    name = f"{script}-attached-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    if facts.world_size > 1:
        name = _name_from_rank0(name, facts)
    folder = layout.runs_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _submitted() -> RunFolder | None:
    """Return the folder of the trial or run that this script is; None if it was started by hand."""
    for variable in (TRIAL_VARIABLE, RUN_VARIABLE):
        if variable in os.environ:
            return RunFolder(Path(os.environ[variable]))
    return None


def _name_from_rank0(name: str, facts: RankInfo) -> str:
    """Return rank 0's name of the new run."""
    store = signed(default_store(), facts.rank)
    if facts.rank == 0:
        store.set("mgpu_slurm folder", name)
    told = str(store.get("mgpu_slurm folder"), "utf-8")
    if not layout.RUN_NAME.fullmatch(told):
        raise ForgeryError(f"rank 0 sent {told!r} as the name of the new run, which is not a valid name")
    return told
