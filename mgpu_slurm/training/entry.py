"""The entry point of each rank, under SLURM and the local executor: `python -m mgpu_slurm.job rank RUN_FOLDER`.

It reads its rank from SLURM's variables, redirects its output to its log, and executes the command or calls the job
function. Under the local executor, it is called in a forked process that has already imported torch.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core import log_lines, retry, torch_versions
from mgpu_slurm.core.errors import MgpuError, RunMeasured, RunStopped, UserError
from mgpu_slurm.core.files import read_json, set_umask_for, write_json, write_whole
from mgpu_slurm.core.processes import RUN_VARIABLE, allow_many_files
from mgpu_slurm.job import node_process, output, socket_handoff
from mgpu_slurm.job.rank_process import exit_process, is_fork_of_node, without_collections
from mgpu_slurm.job.sampling import node_sampler
from mgpu_slurm.job.stacks import place_of
from mgpu_slurm.rank import crash, preflight
from mgpu_slurm.rank.command import run_command
from mgpu_slurm.rank.rank_info import Rank, RankInfo, from_slurm, limit_threads, use_own_gpus
from mgpu_slurm.rank.signals import (
    LEAD_SECONDS_VARIABLE,
    LEAD_SIGNAL_VARIABLE,
    PART_OF_LEAD,
    StopFlag,
    ignore_stop_signals,
    leave_from_here,
    note_stop,
    request_requeue,
)
from mgpu_slurm.request import config as configs
from mgpu_slurm.request import parallelism, profile_window
from mgpu_slurm.request.job_function import JobFunction
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.request.spec import (
    ATTEMPT_VARIABLE,
    FLIGHT_VARIABLE,
    GPU_SHARE_VARIABLE,
    PROCESS_VARIABLE,
    REQUEUE_EXIT_CODE,
    STUCK_AFTER_VARIABLE,
    Spec,
    read_spec,
)
from mgpu_slurm.run_folder.failures import STUCK
from mgpu_slurm.run_folder.layout import RUNS_VARIABLE, RunFolder
from mgpu_slurm.run_folder.record_types import Failure
from mgpu_slurm.run_folder.records import now
from mgpu_slurm.training.speed import compiler_cache, staging

if TYPE_CHECKING:
    import torch

    from mgpu_slurm.rank.watchdog import Watchdog
    from mgpu_slurm.training.run import Run

PROJECT_VARIABLE = "MGPU_PROJECT"

Work = Callable[[Rank], int]
"""The work of a rank; returns its exit code."""


def main(folder: RunFolder, work: Work) -> int:
    """Run this rank and return its exit code; a command of the local executor replaces the process instead."""
    allow_many_files()
    facts = from_slurm()
    attempt = int(os.environ[ATTEMPT_VARIABLE])
    spec = read_spec(folder)
    set_umask_for(spec.readable_by)
    # a run that is submitted from a trial is no process of its worker
    process = int(os.environ.pop(PROCESS_VARIABLE, "0"))
    if not process:
        os.environ.pop(GPU_SHARE_VARIABLE, None)
    output.send_to(folder.rank_log(attempt, process or facts.rank))
    # a crash of native code then leaves its stack in the log, for a command only with PYTHONFAULTHANDLER=1
    faulthandler.enable(2)
    _check_world(spec, facts)
    _export(spec, folder, facts)
    with compiler_cache_in_use() if spec.parallelism.compile else nullcontext() as cache:
        # another process has told those of its worker
        found = [] if process else preflight.warnings_at_start(spec, folder, facts)
        found = [*found, *([] if cache is None else [cache])]
        preflight.warn(found, folder, attempt, facts)
        # the first process of a worker is sampled with all below it
        place = (facts.node_name, facts.rank, facts.local_rank)
        with nullcontext() if process else node_sampler.sampled_by_rank(spec, folder, attempt, *place):
            code = work(Rank(spec, folder, facts, attempt, socket_handoff.take(facts.rank), process=process))
    output.flush()
    # an interpreter that ends restores the default of handled signals, which would kill it
    ignore_stop_signals(signal.SIGTERM)
    if code == REQUEUE_EXIT_CODE and not spec.nodes_are_simulated:
        request_requeue(folder, attempt)
        return 0
    return code


@contextmanager
def compiler_cache_in_use() -> Iterator[str | None]:
    """See `compiler_cache.in_use`; a forked rank has the compiler's settings of the process that it was forked from."""
    with compiler_cache.in_use() as warning:
        if "torch" in sys.modules:
            from mgpu_slurm.rank import torch_adapter

            torch_adapter.limit_compilers(int(os.environ[compiler_cache.THREADS_VARIABLE]))
        yield warning


def run_target(rank: Rank) -> int:
    """Run the command or the job function of the run."""
    if rank.spec.target.command is not None:
        os.chdir(rank.folder.code / rank.spec.workdir)
        return _run_command(rank, rank.spec.target.command)
    stop = StopFlag()
    return guarded(rank, stop, lambda: _train(rank, stop))


def _run_command(rank: Rank, command: tuple[str, ...]) -> int:
    try:
        with reporting_errors(rank), staged(rank.spec):
            return run_command(rank, command)
    except MgpuError as error:
        return crash.exit_code(error)


def _check_world(spec: Spec, facts: RankInfo) -> None:
    asked = spec.resources.ranks
    if asked != facts.world_size:
        raise UserError(f"the run requested {asked} ranks, but {facts.world_size} were started")


def _export(spec: Spec, folder: RunFolder, facts: RankInfo) -> None:
    # unset if a site exports nothing, and its SLURM got no answer from the user's login shell
    os.environ.setdefault("PATH", os.defpath)
    os.environ.update(facts.torchrun_variables())
    os.environ.update(spec.environment)
    # a single one may be a launcher of others
    if facts.local_world_size > 1:
        use_own_gpus(facts)
    os.environ[RUN_VARIABLE] = str(folder.path)
    # runs submitted from inside a run are stored next to it, not in its code, which is deleted with it
    if RUNS_VARIABLE not in spec.environment:
        os.environ[RUNS_VARIABLE] = str(folder.group.path.parent)
    os.environ[PROJECT_VARIABLE] = spec.project
    os.environ[LEAD_SIGNAL_VARIABLE] = spec.signal
    os.environ[LEAD_SECONDS_VARIABLE] = str(spec.lead or "")
    os.environ[STUCK_AFTER_VARIABLE] = str(spec.stuck_after)
    os.environ[parallelism.VARIABLE] = json.dumps(spec.parallelism.given)
    # this run may have been submitted from inside another one
    os.environ.pop(profile_window.VARIABLE, None)
    os.environ.pop(staging.VARIABLE, None)
    os.environ[staging.START_VARIABLE] = str(spec.original)
    if spec.profile is not None:
        os.environ[profile_window.VARIABLE] = spec.profile
    # torch's flight recorder, which is on by default for NCCL: shows what a stuck rank waits for
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    attempt = int(os.environ[ATTEMPT_VARIABLE])
    os.environ.setdefault(FLIGHT_VARIABLE, str(folder.flight_prefix(attempt)))
    os.environ["PYTHONUNBUFFERED"] = "1"
    if spec.executor == "allocation":
        # the rendezvous runs next to srun, maybe on a login node whose name does not resolve here; its address works
        os.environ["MASTER_ADDR"] = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", os.environ["MASTER_ADDR"])
    # simulated nodes share the cores of one machine
    neighbours = facts.world_size if spec.nodes_are_simulated else facts.local_world_size
    limit_threads(neighbours)


def _train(rank: Rank, stop: StopFlag) -> None:
    from mgpu_slurm.request import target

    with without_collections():
        importlib.import_module("torch")
    job = target.job_function(rank.spec, rank.folder)
    config = _config(rank, job)
    with (
        joined(rank) as device,
        closing(_new_run(rank, device, stop)) as run,
        reporting_errors(rank, run.await_save),
    ):
        try:
            result = job.call(run, config)
            run.finish()
        except RunMeasured as measured:
            log_lines.say(measured.reason)
            result = None
        except Exception as error:
            run.note_failure(error)
            raise
        if run.is_main:
            _write_result(rank, run, result)


def _new_run(rank: Rank, device: torch.device, stop: StopFlag) -> Run:
    from mgpu_slurm.training.run import Run

    make: Callable[..., Run] = Run
    if rank.spec.measurement is not None:
        from mgpu_slurm.training.speed.measured_run import MeasuredRun

        make = partial(MeasuredRun, rank.spec.measurement)
    watchdog, layout = watchdog_of(rank), layout_of(rank)
    return make(rank.facts, rank.folder.path, device, rank.attempt, stop, watchdog=watchdog, layout=layout)


def _config(rank: Rank, job: JobFunction) -> Any:
    """Return the job's config; if the submission did not complete it, check and write it here."""
    spec, folder = rank.spec, rank.folder
    config = job.fill(spec.config, spec.original)
    if spec.config_base is not None and rank.facts.rank == 0:
        text = configs.dump_yaml(configs.to_plain(config))
        retry.for_the_disk(lambda: write_whole(folder.config, text), folder.config)
    return config


def layout_of(rank: Rank) -> Layout:
    """Return how the ranks share models."""
    return rank.spec.parallelism.layout(rank.facts.world_size, rank.facts.local_world_size)


def watchdog_of(rank: Rank) -> Watchdog | None:
    """Return a watchdog that ends this rank if it makes no progress; None if that is disabled."""
    from mgpu_slurm.rank import watchdog

    return watchdog.watchdog(rank.spec.stuck_after, rank.facts, rank.folder, rank.attempt, rank.process)


@contextmanager
def joined(rank: Rank, device: torch.device | None = None) -> Iterator[torch.device]:
    """Join the process group of all ranks for the duration of the block, and yield this rank's device.

    Args:
        device: this rank's device; None to choose it by local rank.
    """
    from mgpu_slurm.rank import rank_info
    from mgpu_slurm.rank.communication import rendezvous

    facts = rank.facts
    missing = None
    if device is None:
        device = rank_info.choose_device(facts)
        missing = preflight.missing_gpus_warning(rank.spec.resources.gpus_per_node, rank_info.visible_gpus())
    shared = rendezvous.join(facts, device, listener=rank.listener) if facts.world_size > 1 else None
    preflight.warn([text for text in (missing, shared) if text is not None], rank.folder, rank.attempt, facts)
    try:
        # afterwards, as a node that takes longer to copy would be missing
        with staged(rank.spec):
            yield device
    finally:
        # an undestroyed group aborts at exit
        torch_versions.destroy_groups()


def staged(spec: Spec) -> AbstractContextManager[None]:
    """Return a context in which the run's data sets are on the disk of this node."""
    return staging.copies_of(spec.stage, spec.stage_to)


def _write_result(rank: Rank, run: Run, returned: Any) -> None:
    from mgpu_slurm.metrics.reporter import odd_result, result_of

    folder, warning = rank.folder, odd_result(returned)
    preflight.warn([warning] if warning is not None else [], folder, rank.attempt, rank.facts)
    result = result_of(returned, run.last_metrics, run.has_trained)
    record = {"run": folder.run, "result": result, "step": run.step, "progress": run.progress, "ended": now()}
    retry.for_the_disk(lambda: write_json(folder.result, record), folder.result)


def start(folder: RunFolder, work: Work | None = None) -> int:
    """Run the rank of this process, which srun has started; return its exit code."""

    def run() -> int:
        return run_rank(folder, work or run_target)

    try:
        spec, facts = read_spec(folder), from_slurm()
    except (MgpuError, OSError):
        # `run_rank` reports it
        return run()
    if spec.nodes_are_simulated or not is_fork_of_node(spec, facts.local_world_size):
        return run()
    stop_signals = frozenset({signal.SIGTERM, signal.SIGINT, signal.Signals[f"SIG{spec.signal}"]})
    prepare = partial(_import_torch, spec, facts)
    return node_process.run(node_process.Task(facts.local_rank, facts.local_world_size, prepare, run, stop_signals))


def _import_torch(spec: Spec, facts: RankInfo) -> None:
    """Import what all ranks of a node need, with the variables that it reads then."""
    os.environ.update(spec.environment)
    limit_threads(facts.local_world_size)
    import_for_ranks()


def import_for_ranks() -> None:
    """Import torch in the process from which ranks are forked."""
    with without_collections():
        importlib.import_module("torch.distributed")
        from mgpu_slurm.rank import torch_adapter

        # otherwise DistributedDataParallel imports it on every rank when the first model is wrapped
        torch_adapter.import_compiler()
    # a collection in a rank would look through 300,000 objects of these modules, and so copy their memory
    gc.freeze()


def run_rank(folder: RunFolder, work: Work = run_target) -> int:
    """Call `main`; print an error that occurs before the rank has its log to the launcher's standard error."""
    try:
        return main(folder, work)
    except MgpuError as error:
        log_lines.say(str(error), file=sys.stderr)
        return error.exit_code


# -- calling user code: an error is printed and recorded first, and the rank then ends in limited time


def guarded(rank: Rank, stop: StopFlag, action: Callable[[], None]) -> int:
    """Call user code, and return the exit code. An error is printed and recorded, so that the first cause is known."""
    stop.listen()
    leave_after = None if rank.spec.lead is None else PART_OF_LEAD * rank.spec.lead
    stop.watch_signals(leave_after, lambda: _leave_at_last(rank))
    try:
        with reporting_errors(rank):
            action()
        return 0
    except RunStopped as stopped:
        return stopped.exit_code
    except BaseException as error:
        return crash.exit_code(error)


@contextmanager
def reporting_errors(rank: Rank, saved: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Print and record an error of the block before it propagates, and limit the time until this rank ends: it may be
    in the middle of a collective, and its cleanup could wait for the other ranks forever.

    Args:
        saved: waits, for a limited time, for what this rank is still saving.
    """
    try:
        yield
    except RunStopped as stopped:
        if rank.facts.rank == 0:
            note_stop(rank.folder, rank.attempt, stopped)
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
    # later errors during cleanup are not the cause
    if code and not rank.told:
        record_failure(rank, crash.record(error, shown, rank.facts))
        crash.leave_soon(code, saved)
    rank.told.append(error)


def record_failure(rank: Rank, record: Failure) -> None:
    """Record why this rank failed; the log contains it too."""
    file = rank.folder.rank_failure(rank.attempt, rank.number_in_logs)
    with suppress(OSError):
        # keep the record of a stuck rank: its lost connection is only a consequence
        if not (record.consequence and (read_json(file) or {}).get("error") == STUCK):
            write_json(file, record.to_json())


def _leave_at_last(rank: Rank) -> None:
    """End a rank that has reached no boundary, so that the run is requeued from its newest checkpoint. Record where the
    rank is blocked."""
    from mgpu_slurm.checkpoints import folder as checkpoints

    if rank.spec.kind == "run" and not checkpoints.has_checkpoint(rank.folder):
        # it would start from scratch, again and again
        return
    code = REQUEUE_EXIT_CODE if rank.spec.nodes_are_simulated else 0
    place = place_of(threading.main_thread())
    said = f"rank {rank.facts.rank} on {rank.facts.node_name} left before the time limit; it could not save at {place}"
    leave_from_here(code, lambda: request_requeue(rank.folder, rank.attempt, said))


if __name__ == "__main__":
    exit_process(start(RunFolder(Path(sys.argv[1]))))
