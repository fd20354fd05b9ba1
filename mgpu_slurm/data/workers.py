"""Worker processes of loaders: a stop of the run leaves them at work, and the rank that started them ends them.

Both come as SIGTERM: SLURM sends a stop to every process of a step, and multiprocessing ends its children by one. The
sender tells them apart. Only a thread that waits for a blocked signal learns of it, and it hears at once, whatever the
worker is busy with, unless that is C code that keeps the interpreter's lock: such a worker ends once it gives it back,
and its rank waits for that, but not a rank that has failed.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mgpu_slurm.rank.signals import ignore_stop_signals, lead_signal

_PLACE_OF_PREEXEC_FN = 6
"""Among the positional arguments of `subprocess.Popen`."""


def data_loader(dataset: Dataset[Any], device: torch.device, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader whose workers ignore the run's signals, and end when their rank ends them."""
    # module-level functions, because workers that are spawned get them pickled
    options["worker_init_fn"] = functools.partial(set_up, options.get("worker_init_fn"))
    options.setdefault("pin_memory", device.type == "cuda")
    return _DataLoader(dataset, **options)


class _DataLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        with being_started(self.multiprocessing_context):
            return super().__iter__()


@contextmanager
def being_started(context: BaseContext | None) -> Iterator[None]:
    """Start workers with the signals of the run blocked, so that none dies of one before `set_up`.

    Only SIGTERM still ends a server of forks, and the workers that it is starting.

    Args:
        context: how they are started; None for Python's default.
    """
    method = (context or multiprocessing).get_start_method()
    # a new program inherits what is blocked, and no handlers
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {lead_signal()})
    try:
        if method != "fork":
            # the thread that starts it has SIGTERM and SIGINT unblocked afterwards
            resource_tracker.ensure_running()
        if method == "forkserver":
            # all its children inherit what it was started with, and those of the job are to end on SIGTERM
            forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def set_up(user_init: Callable[[int], None] | None, worker: int) -> None:
    """Have this worker end on a SIGTERM of its rank, and on no other; then call the user's own `worker_init_fn`."""
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {lead_signal(), signal.SIGINT})
    # also in a server of forks the process that made this one, and not the server
    rank = multiprocessing.parent_process()
    assert rank is not None
    assert rank.pid is not None
    # torch's own handler ends a worker on both; threads of libraries that were started before may still get a SIGTERM
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(rank.pid,), name="sigterm", daemon=True).start()
    os.register_at_fork(after_in_child=_end_on_sigterm)
    subprocess.Popen.__init__ = _forking(subprocess.Popen.__init__)  # type: ignore[method-assign]
    if user_init is not None:
        user_init(worker)


def _do_nothing(*_: Any) -> None:
    pass


def _end_with(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    # as torch's handler does: any other exit code is an error of the loader
    os._exit(0)


# -- what a worker starts itself, which inherits blocked signals


def _end_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _forking(start: Callable[..., None]) -> Callable[..., None]:
    """Return Popen's method, which starts a program without the hooks of a fork unless it has a function to call."""

    @functools.wraps(start)
    def start_by_fork(self: Any, *arguments: Any, **options: Any) -> None:
        if len(arguments) <= _PLACE_OF_PREEXEC_FN and options.get("preexec_fn") is None:
            options["preexec_fn"] = _do_nothing
        start(self, *arguments, **options)

    return start_by_fork
