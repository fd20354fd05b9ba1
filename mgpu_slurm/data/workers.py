"""Worker processes of loaders: they ignore a stop of the run, and end when the rank that started them ends them.

Both come as SIGTERM: SLURM sends a stop to every process of a step, and multiprocessing terminates its children with
one. The sender distinguishes them, and only a thread that waits for a blocked signal learns the sender. The thread
reacts at once, whatever the worker is doing, except in C code that holds the GIL: such a worker ends once the GIL is
released, and its rank waits for that, unless the rank has failed.
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
from torch.utils.data import DataLoader, get_worker_info

from mgpu_slurm.data.sample_seeds import SeededReader
from mgpu_slurm.data.streams import Stream
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.signals import ignore_stop_signals, lead_signal

_PLACE_OF_PREEXEC_FN = 6
"""Index of `preexec_fn` among the positional arguments of `subprocess.Popen`."""


def data_loader(dataset: SeededReader | Stream, device: torch.device, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader whose workers ignore the run's signals, and end when their rank ends them.

    Args:
        dataset: its items are batches.
    """
    # torch's global generator, which seeds workers by default, is left to the job
    options.setdefault("generator", torch.Generator())
    # module-level functions, because they are pickled for spawned workers
    options["worker_init_fn"] = functools.partial(set_up, options.get("worker_init_fn"))
    options.setdefault("pin_memory", device.type == "cuda")
    return _DataLoader(dataset, batch_size=None, collate_fn=_as_it_is, **options)


class _DataLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        with being_started(self.multiprocessing_context):
            return super().__iter__()


def _as_it_is(batch: Any) -> Any:
    """Return a batch unchanged."""
    return batch


@contextmanager
def being_started(context: BaseContext | None) -> Iterator[None]:
    """Block the signals of the run while workers are started, so that none is killed by one before `set_up`.

    Of these signals, only SIGTERM still ends a fork server and the workers that it is starting.

    Args:
        context: start method of the workers; None for Python's default.
    """
    method = (context or multiprocessing).get_start_method()
    # a new program inherits blocked signals, but no handlers
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {lead_signal()})
    try:
        if method != "fork":
            # starting it leaves SIGTERM and SIGINT unblocked in this thread
            resource_tracker.ensure_running()
        if method == "forkserver":
            # its children inherit its signal mask, and those of the job must end on SIGTERM
            forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def set_up(user_init: Callable[[int], None] | None, worker: int) -> None:
    """Make this worker end only on a SIGTERM from its rank; then call the user's `worker_init_fn`."""
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {lead_signal(), signal.SIGINT})
    # even with a fork server, this is the process that created the worker, not the server
    rank = multiprocessing.parent_process()
    assert rank is not None
    assert rank.pid is not None
    # torch's handler would end a worker on both; library threads that were started earlier may still get a SIGTERM
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(rank.pid,), name="sigterm", daemon=True).start()
    os.register_at_fork(after_in_child=_end_on_sigterm)
    subprocess.Popen.__init__ = _forking(subprocess.Popen.__init__)  # type: ignore[method-assign]
    info: Any = get_worker_info()
    # that of the job, in place of what reads it
    torch_adapter.show_worker_dataset(info.dataset.dataset)
    if user_init is not None:
        user_init(worker)


def _do_nothing(*_: Any) -> None:
    pass


def _end_with(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    # as torch's handler does: the loader treats any other exit code as an error
    os._exit(0)


# -- processes started by a worker, which inherit blocked signals


def _end_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _forking(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Popen.__init__` to always pass a `preexec_fn`: without one, Popen does not run the hooks of a fork."""

    @functools.wraps(start)
    def start_by_fork(self: Any, *arguments: Any, **options: Any) -> None:
        if len(arguments) <= _PLACE_OF_PREEXEC_FN and options.get("preexec_fn") is None:
            options["preexec_fn"] = _do_nothing
        start(self, *arguments, **options)

    return start_by_fork
