"""The process of a rank: forked from one that has imported torch, and ended as an interpreter ends."""

from __future__ import annotations

import atexit
import gc
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn

from mgpu_slurm.core import processes
from mgpu_slurm.request.spec import Spec

VARIABLE = "MGPU_FORK_RANKS"
"""Set to 0, each rank is a process that srun starts."""

_BOUND = re.compile(
    "SLURM_GPUS_PER_TASK=.*|SLURM_TRES_PER_TASK=.*gres.*|SLURM_NTASKS_PER_GPU=.*|SLURM_GPU_BIND=.*|SLURMD?_TRES_BIND=.*"
    "|PMIX?_.*",
    re.DOTALL,
)
"""Variables of steps whose tasks have something that a process of another task cannot have: GPUs in a control group of
their own, or an open connection to SLURM's PMI."""


def is_fork_of_node(spec: Spec, local_ranks: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a rank under SLURM can be a fork of its node's process, and this saves time."""
    is_wanted = {**environ, **spec.environment}.get(VARIABLE) != "0"
    # memory that is bound to a rank's cores would be bound to those of the first one
    has_bound_memory = "none" not in environ.get("SLURM_MEM_BIND_TYPE", "none")
    # libgomp reads these once, together with the cores that a process may use
    has_bound_threads = any(name in environ for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"))
    is_bound = (
        has_bound_memory
        or has_bound_threads
        or any(_BOUND.fullmatch(f"{name}={value}") for name, value in environ.items())
    )
    return is_wanted and not is_bound and local_ranks > 1 and not spec.target.is_command


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage during the block: of the time of importing torch, collections are a quarter."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def can_be_forked() -> bool:
    """Return whether ranks can be forked from this process: a lock that another thread holds would stay locked forever.

    Some libraries end their threads before each fork, and start them again when they need them: NumPy's OpenBLAS, for
    example, which has a thread for each core once it is imported. So this forks once before it counts.
    """
    if processes.thread_count() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return processes.thread_count() == 1


def fork(enter: Callable[[], None], run: Callable[[], int]) -> int:
    """Fork a process that runs a rank; return its pid.

    Args:
        enter: called first in the new process.
        run: returns the exit code.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            enter()
            _forget_random_state()
            code = run()
        except BaseException:
            # `exit_process` below would swallow it
            traceback.print_exc()
        finally:
            exit_process(code)
    return pid


def _forget_random_state() -> None:
    """Seed NumPy's global generator anew, as in a new process: all forks would draw the same numbers.

    Python seeds its own generator after a fork, and torch's has the same seed in all processes anyway.
    """
    if (generator := sys.modules.get("numpy.random")) is not None:
        generator.seed()


def end_by(signum: int) -> NoReturn:
    """End this process by a signal, as another one that it waited for was ended."""
    # that one has left its own core file, if it was to leave one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    os._exit(128 + signum)


def exit_process(code: int) -> NoReturn:
    """End a rank as the interpreter would, but stop after the exit handlers.

    A forked rank must not return to the code of the process it was forked from. Also, if reverse DNS does not answer,
    C++ threads of torch that still look up a host name abort a process that destroys its static objects.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
