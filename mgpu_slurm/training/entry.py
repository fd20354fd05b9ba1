"""What each rank runs, the same under SLURM and the local executor: `python -m mgpu_slurm.job rank RUN_FOLDER`.

It finds its place from SLURM's variables, sends its output to its own log, and becomes the command or calls the job
function. Under the local executor it is called in a forked process that has torch already imported.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mgpu_slurm.core import retry
from mgpu_slurm.core.errors import MgpuError, RunStopped, UserError
from mgpu_slurm.core.files import open_to, write_json, write_whole
from mgpu_slurm.core.layout import RUNS_VARIABLE, RunFolder
from mgpu_slurm.core.processes import RUN_VARIABLE, adopt_orphans, allow_many_files
from mgpu_slurm.core.records import now
from mgpu_slurm.job import output, socket_handoff
from mgpu_slurm.job.stacks import place_of
from mgpu_slurm.rank import crash, preflight
from mgpu_slurm.rank.devices import limit_threads
from mgpu_slurm.rank.rank_info import RankInfo, from_slurm
from mgpu_slurm.rank.signals import (
    LEAD_SECONDS_VARIABLE,
    LEAD_SIGNAL_VARIABLE,
    PART_OF_LEAD,
    StopFlag,
    ignore_stop_signals,
    leave_from_here,
    wish_to_requeue,
)
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.job_function import JobFunction
from mgpu_slurm.request.spec import (
    ATTEMPT_VARIABLE,
    FLIGHT_VARIABLE,
    REQUEUE_EXIT_CODE,
    STUCK_AFTER_VARIABLE,
    Spec,
    read_spec,
)

if TYPE_CHECKING:
    import torch

    from mgpu_slurm.rank.watchdog import Watchdog
    from mgpu_slurm.training.run import Run

PROJECT_VARIABLE = "MGPU_PROJECT"


@dataclass(frozen=True)
class Rank:
    """What a rank knows of itself, once its output goes to its own log."""

    spec: Spec
    folder: RunFolder
    facts: RankInfo
    attempt: int
    listener: int | None
    """The bound socket on which this rank is to serve the rendezvous; see `job.socket_handoff`."""
    told: list[BaseException] = field(default_factory=list)
    """Errors that its log tells of."""


PATIENCE_FOR_SIGTERM = 1.0
"""Seconds."""

Work = Callable[[Rank], int]
"""What a rank does; its exit code."""


def main(folder: RunFolder, work: Work) -> int:
    """Runs this rank and returns its exit code; a command of the local executor replaces the process instead."""
    allow_many_files()
    facts = from_slurm()
    attempt = int(os.environ[ATTEMPT_VARIABLE])
    spec = read_spec(folder)
    open_to(spec.readable_by)
    output.send_to(folder.rank_log(attempt, facts.rank))
    _check_world(spec, facts)
    _export(spec, folder, facts)
    preflight.warn(preflight.warnings_at_start(spec, folder, facts), folder, attempt, facts)
    code = work(Rank(spec, folder, facts, attempt, socket_handoff.take(facts.rank)))
    output.flush()
    # an interpreter that ends gives handled signals back their default, which is to kill it
    ignore_stop_signals(signal.SIGTERM)
    if code == REQUEUE_EXIT_CODE and spec.executor != "local":
        wish_to_requeue(folder, attempt)
        return 0
    return code


def run_target(rank: Rank) -> int:
    """The command or the job function of the run."""
    if rank.spec.target.command is not None:
        os.chdir(rank.folder.code / rank.spec.workdir)
        return _run_command(rank, rank.spec.target.command)
    stop = StopFlag()
    return guarded(rank, stop, lambda: _train(rank, stop))


def _check_world(spec: Spec, facts: RankInfo) -> None:
    asked = spec.resources.ranks
    if asked != facts.world_size:
        raise UserError(f"the run asked for {asked} ranks, and {facts.world_size} were started")


def _export(spec: Spec, folder: RunFolder, facts: RankInfo) -> None:
    # a site that exports nothing, and whose SLURM got no answer of the user's login shell
    os.environ.setdefault("PATH", os.defpath)
    os.environ.update(facts.torchrun_variables())
    os.environ.update(spec.environment)
    os.environ[RUN_VARIABLE] = str(folder.path)
    # what is submitted from inside a run lies beside it, not in its code, which ends with it
    if RUNS_VARIABLE not in spec.environment:
        os.environ[RUNS_VARIABLE] = str(folder.group.path.parent)
    os.environ[PROJECT_VARIABLE] = spec.project
    os.environ[LEAD_SIGNAL_VARIABLE] = spec.signal
    os.environ[LEAD_SECONDS_VARIABLE] = str(spec.lead or "")
    os.environ[STUCK_AFTER_VARIABLE] = str(spec.stuck_after)
    # torch's flight recorder, which it has for NCCL by itself: tells what a rank that is stuck waits for
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    attempt = int(os.environ[ATTEMPT_VARIABLE])
    os.environ.setdefault(FLIGHT_VARIABLE, str(folder.flight_prefix(attempt)))
    os.environ["PYTHONUNBUFFERED"] = "1"
    if spec.executor == "allocation":
        # the rendezvous is beside srun, maybe on a login node, whose name means nothing here; its address does
        os.environ["MASTER_ADDR"] = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", os.environ["MASTER_ADDR"])
    # simulated nodes share the cores of one machine
    neighbours = facts.world_size if spec.executor == "local" else facts.local_world_size
    limit_threads(neighbours)


def _run_command(rank: Rank, command: tuple[str, ...]) -> int:
    """Runs the command with the lead signal ignored: by default it would kill a script that knows nothing of it.

    Where the local executor waits for this process, the command replaces it. Under srun it is a child, so that its exit
    code can be read here first; it gets the signals of the step itself.
    """
    spec = rank.spec
    signal.signal(getattr(signal, f"SIG{spec.signal}"), signal.SIG_IGN)
    program, words = program_of(spec, command)
    if program is None:
        print(f"mgpu_slurm: command {words[0]!r} {why_not_found(words[0])}", file=sys.stderr, flush=True)
        os._exit(127)
    if spec.executor == "local":
        os.execv(program, words)
    heard: list[int] = []
    # a handler, which a child does not inherit, as it would an ignored signal
    signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    adopt_orphans()
    child = subprocess.Popen(words, executable=program)
    code = _wait_for(child)
    if code == -signal.SIGTERM and _comes(heard):
        # a shell or launcher that it has ended; what that has started may still save
        with suppress(ChildProcessError):
            while True:
                os.wait()
        if spec.executor == "slurm":
            # for its code srun would end the other ranks, which may save too
            mark = rank.folder.terminated(rank.attempt)
            retry.for_the_disk(mark.touch, mark)
            return 0
    return 128 - code if code < 0 else code


def _comes(heard: Collection[int]) -> bool:
    """Return whether this process hears the signal too that has ended its child: SLURM tells one after the other."""
    give_up = time.monotonic() + PATIENCE_FOR_SIGTERM
    while not heard and time.monotonic() < give_up:
        time.sleep(0.02)
    return bool(heard)


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Collect the orphans of a command until it has ended itself; return its exit code, negative for a signal."""
    ended = 0
    while ended != child.pid:
        ended, status = os.wait()
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


def program_of(spec: Spec, command: Sequence[str]) -> tuple[str | None, list[str]]:
    """The program that a command names, None where there is none, and the words to start it with."""
    name, *arguments = command
    if name in ("python", "python3"):
        # the interpreter of the submission, not the one a node's PATH finds first; by its path, from which it
        # finds its environment
        name = spec.python
    # programs such as accelerate are found beside the interpreter, also where that environment is not on PATH
    return shutil.which(name) or shutil.which(name, path=str(Path(spec.python).parent)), [name, *arguments]


def why_not_found(name: str) -> str:
    if "/" not in name:
        return f"is not on PATH of {os.uname().nodename}"
    return "may not be executed: chmod +x, or name its interpreter" if os.path.exists(name) else "is not there"


def guarded(rank: Rank, stop: StopFlag, action: Callable[[], None]) -> int:
    """Calls user code; what goes wrong is printed and recorded, so that the first cause can be found later."""
    stop.listen()
    leave_after = None if rank.spec.lead is None else PART_OF_LEAD * rank.spec.lead
    stop.see_to_it(leave_after, lambda: _leave_at_last(rank))
    try:
        with telling_first(rank):
            action()
        return 0
    except RunStopped as stopped:
        return stopped.exit_code
    except BaseException as error:
        return crash.exit_code(error)


@contextmanager
def telling_first(rank: Rank, saved: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Print and record an error of the block before anything else is done about it, and bound what follows: this rank
    may be in the middle of an exchange with others, and what it leaves may wait for them for ever.

    Args:
        saved: waits for what this rank is still saving, for a limited time.
    """
    try:
        yield
    except RunStopped:
        raise
    except BaseException as error:
        if error not in rank.told:
            _tell(rank, error, saved)
        raise


def _tell(rank: Rank, error: BaseException, saved: Callable[[], None]) -> None:
    shown = crash.own_traceback(error)
    sys.stdout.flush()
    print(shown, end="", file=sys.stderr, flush=True)
    code = crash.exit_code(error)
    # what else goes wrong on the way out is no cause
    if code and not rank.told:
        record_failure(rank, crash.record(error, shown, rank.facts))
        crash.leave_soon(code, saved)
    rank.told.append(error)


def record_failure(rank: Rank, record: dict[str, Any]) -> None:
    """Write down why this rank fails; its log has it too."""
    with suppress(OSError):
        write_json(rank.folder.rank_failure(rank.attempt, rank.facts.rank), record)


def _leave_at_last(rank: Rank) -> None:
    """Ends a rank that has reached no boundary, so that the run is started again from its newest checkpoint; where it
    is blocked stands in its log."""
    from mgpu_slurm.checkpoints import folder as checkpoints

    if rank.spec.kind == "run" and not checkpoints.any_whole(rank.folder):
        # it would start at nothing, again and again
        return
    code = REQUEUE_EXIT_CODE if rank.spec.executor == "local" else 0
    place = place_of(threading.main_thread())
    said = f"rank {rank.facts.rank} on {rank.facts.node_name} left before the time limit; it could not save at {place}"
    leave_from_here(code, lambda: wish_to_requeue(rank.folder, rank.attempt, said))


def _train(rank: Rank, stop: StopFlag) -> None:
    from mgpu_slurm.training.run import Run

    job = job_function(rank.spec, rank.folder)
    config = _config(rank, job)
    with joined(rank) as device:
        made = Run(rank.facts, rank.folder.path, device, rank.attempt, stop, watchdog=watchdog_of(rank))
        with closing(made) as run, telling_first(rank, run.await_save):
            result = job.call(run, config)
            run.finish()
            if run.is_main:
                _write_result(rank, run, result)


def _config(rank: Rank, job: JobFunction) -> Any:
    """Return the job's config; one that the submission did not complete is checked and written down here."""
    spec, folder = rank.spec, rank.folder
    config = job.fill(spec.config, spec.original)
    if spec.config_base is not None and rank.facts.rank == 0:
        text = configs.dump_yaml(configs.to_plain(config))
        retry.for_the_disk(lambda: write_whole(folder.config, text), folder.config)
    return config


def watchdog_of(rank: Rank) -> Watchdog | None:
    """Ends this rank where it comes no further; None where nobody wants that."""
    from mgpu_slurm.rank import watchdog

    return watchdog.watchdog(rank.spec.stuck_after, rank.facts, rank.folder, rank.attempt)


@contextmanager
def joined(rank: Rank, device: torch.device | None = None) -> Iterator[torch.device]:
    """Is in the process group of all ranks meanwhile.

    Args:
        device: on which this rank computes; None for the one that is its share.
    """
    import torch.distributed as dist

    from mgpu_slurm.rank import devices, rendezvous

    facts = rank.facts
    missing = None
    if device is None:
        device = devices.choose(facts)
        missing = preflight.missing_gpus_warning(rank.spec.resources.gpus_per_node, devices.visible_gpus())
    shared = rendezvous.join(facts, device, listener=rank.listener) if facts.world_size > 1 else None
    preflight.warn([text for text in (missing, shared) if text is not None], rank.folder, rank.attempt, facts)
    try:
        yield device
    finally:
        # an undestroyed group aborts at exit
        if dist.is_initialized():
            dist.destroy_process_group()


def job_function(spec: Spec, folder: RunFolder) -> JobFunction:
    """Return the run's job function, from the run's own code."""
    from mgpu_slurm.request import target

    if spec.target.function is None:
        return _unpickled(spec, folder)
    return target.load(spec.target.function, _stand_in(spec, folder))


def _stand_in(spec: Spec, folder: RunFolder) -> Path:
    """Makes this process one of the run's code; where it stands in it."""
    from mgpu_slurm.request import target

    workdir = folder.code / spec.workdir
    target.stand_in(workdir)
    sys.argv = [spec.target.label]
    return workdir


def _unpickled(spec: Spec, folder: RunFolder) -> JobFunction:
    """
    Raises:
        UserError: it is somebody else's, and whoever wrote a pickle decides what code runs when it is loaded.
    """
    _stand_in(spec, folder)
    import cloudpickle  # type: ignore[import-untyped]

    with open(folder.function, "rb") as file:
        # compared with this rank's own log: a file server may give all files of a user to somebody else
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (os.geteuid(), os.fstat(1).st_uid):
            raise UserError(f"{str(folder.function)!r} belongs to user {owner}: submit the function yourself")
        *loaded, types_of_fields = cloudpickle.load(file)
    configs.settle_classes(types_of_fields)
    if len(loaded) == 1:
        job: JobFunction = loaded[0]
        return job
    # v0.1 kept the function and one config, which was the same for all runs of a group
    function, config = loaded
    return JobFunction(spec.target.label, function, None if isinstance(config, dict) else type(config))


def _write_result(rank: Rank, run: Run, returned: Any) -> None:
    from mgpu_slurm.metrics.reporter import odd_result, result_of

    folder, warning = rank.folder, odd_result(returned)
    preflight.warn([warning] if warning is not None else [], folder, rank.attempt, rank.facts)
    result = result_of(returned, run.last_metrics, run.has_trained)
    record = {"run": folder.run, "result": result, "step": run.step, "progress": run.progress, "ended": now()}
    retry.for_the_disk(lambda: write_json(folder.result, record), folder.result)


def exit_process(code: int) -> NoReturn:
    """Ends a rank as the interpreter would, but for what follows its exit handlers.

    A forked rank must not go back to the code of the process it was forked from. And C++ threads of torch that still
    look up a host name, where reverse DNS does not answer, abort a process that destroys its static objects.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_rank(folder: RunFolder, work: Work = run_target) -> int:
    """`main`, with an error before the rank has its log shown where the launcher writes."""
    try:
        return main(folder, work)
    except MgpuError as error:
        print(f"mgpu_slurm: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    exit_process(run_rank(RunFolder(Path(sys.argv[1]))))
