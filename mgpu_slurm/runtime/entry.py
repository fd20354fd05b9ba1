"""What each rank runs, the same under SLURM and the local executor: `python -m mgpu_slurm.runtime.entry RUN_FOLDER`.

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
import traceback
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mgpu_slurm import config as configs
from mgpu_slurm.errors import MgpuError, RunStopped, UserError
from mgpu_slurm.paths import RUNS_VARIABLE, RunFolder, open_to, write_json
from mgpu_slurm.processes import RUN_VARIABLE, allow_many_files
from mgpu_slurm.records import now
from mgpu_slurm.runtime import listening, surroundings
from mgpu_slurm.runtime.devices import limit_threads
from mgpu_slurm.runtime.facts import RankFacts, from_slurm
from mgpu_slurm.runtime.stopping import LEAD_SIGNAL_VARIABLE, StopFlag, ignore_stop_signals
from mgpu_slurm.spec import ATTEMPT_VARIABLE, REQUEUE_EXIT_CODE, Spec, read_spec

if TYPE_CHECKING:
    from mgpu_slurm.runtime.run import Run

PROJECT_VARIABLE = "MGPU_PROJECT"


def main(folder: RunFolder) -> int:
    """Runs this rank and returns its exit code; a command of the local executor replaces the process instead."""
    allow_many_files()
    facts = from_slurm()
    attempt = int(os.environ[ATTEMPT_VARIABLE])
    spec = read_spec(folder)
    open_to(spec.readable_by)
    _send_output_to(folder.rank_log(attempt, facts.rank))
    _check_world(spec, facts)
    _export(spec, folder, facts)
    surroundings.warn(surroundings.warnings_at_start(spec, folder, facts), folder, attempt, facts)
    if spec.target.command is not None:
        os.chdir(folder.code / spec.workdir)
        code = _run_command(spec, spec.target.command)
    else:
        code = _guarded(spec, folder, facts, attempt, listening.take(facts.rank))
    # an interpreter that ends gives handled signals back their default, which is to kill it
    ignore_stop_signals()
    if code == REQUEUE_EXIT_CODE and spec.executor != "local":
        # srun takes it for a failure, ends the other ranks while they still save, and reports the code of those
        folder.requeue_wish(attempt).touch()
        return 0
    return code


def _send_output_to(log: Path) -> None:
    """From here on this rank writes to its own file; srun's --output cannot hold the number of the attempt."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _check_world(spec: Spec, facts: RankFacts) -> None:
    asked = spec.resources.ranks
    if asked != facts.world_size:
        raise UserError(f"the run asked for {asked} ranks, and {facts.world_size} were started")


def _export(spec: Spec, folder: RunFolder, facts: RankFacts) -> None:
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
    os.environ["PYTHONUNBUFFERED"] = "1"
    if spec.executor == "allocation":
        # the rendezvous is beside srun, maybe on a login node, whose name means nothing here; its address does
        os.environ["MASTER_ADDR"] = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", os.environ["MASTER_ADDR"])
    # simulated nodes share the cores of one machine
    neighbours = facts.world_size if spec.executor == "local" else facts.local_world_size
    limit_threads(neighbours)


def _run_command(spec: Spec, command: tuple[str, ...]) -> int:
    """Runs the command with the lead signal ignored: by default it would kill a script that knows nothing of it.

    Where the local executor waits for this process, the command replaces it. Under srun it is a child, so that its exit
    code can be read here first; it gets the signals of the step itself.
    """
    signal.signal(getattr(signal, f"SIG{spec.signal}"), signal.SIG_IGN)
    name = command[0]
    if name in ("python", "python3"):
        # the interpreter of the submission, not the one a node's PATH finds first; by its path, from which it
        # finds its environment
        name = spec.python
    # programs such as accelerate are found beside the interpreter, also where that environment is not on PATH
    program = shutil.which(name) or shutil.which(name, path=str(Path(spec.python).parent))
    if program is None:
        print(f"mgpu_slurm: command {name!r} {_why_not_found(name)}", file=sys.stderr, flush=True)
        os._exit(127)
    if spec.executor == "local":
        os.execv(program, [name, *command[1:]])
    # a handler, which a child does not inherit, as it would an ignored signal
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    code = subprocess.Popen([name, *command[1:]], executable=program).wait()
    return 128 - code if code < 0 else code


def _why_not_found(name: str) -> str:
    if "/" not in name:
        return f"is not on PATH of {os.uname().nodename}"
    return "may not be executed: chmod +x, or name its interpreter" if os.path.exists(name) else "is not there"


def _guarded(spec: Spec, folder: RunFolder, facts: RankFacts, attempt: int, listener: int | None) -> int:
    """Calls the job function; what goes wrong is printed and recorded, so that the first cause can be found later."""
    stop = StopFlag()
    stop.listen()
    try:
        _train(spec, folder, facts, attempt, stop, listener)
        return 0
    except RunStopped as stopped:
        return stopped.exit_code
    except BaseException as error:
        shown = _traceback(error)
        print(shown, end="", file=sys.stderr, flush=True)
        code = _exit_code(error)
        if code:
            write_json(folder.rank_failure(attempt, facts.rank), _failure(error, shown, facts))
        return code


def _exit_code(error: BaseException) -> int:
    """As the interpreter would end: `sys.exit()` is a success, `sys.exit("words")` is none."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _train(spec: Spec, folder: RunFolder, facts: RankFacts, attempt: int, stop: StopFlag, listener: int | None) -> None:
    import torch.distributed as dist

    from mgpu_slurm.runtime import devices, rendezvous
    from mgpu_slurm.runtime.run import Run

    function, config = _function_and_config(spec, folder)
    device = devices.choose(facts)
    missing = surroundings.missing_gpus_warning(spec.resources.gpus_per_node, devices.visible_gpus())
    shared = rendezvous.join(facts, device, listener=listener) if facts.world_size > 1 else None
    surroundings.warn([text for text in (missing, shared) if text is not None], folder, attempt, facts)
    try:
        with closing(Run(facts, folder.path, device, attempt, stop)) as run:
            result = function(run, config)
            run.finish()
            if run.is_main:
                _write_result(folder, run, result)
    finally:
        # an undestroyed group aborts at exit
        if dist.is_initialized():
            dist.destroy_process_group()


def _function_and_config(spec: Spec, folder: RunFolder) -> tuple[Any, Any]:
    from mgpu_slurm import target

    workdir = folder.code / spec.workdir
    target.stand_in(workdir)
    sys.argv = [spec.target.label]
    if spec.target.function is not None:
        function = target.load(spec.target.function, workdir)
        cls = target.config_class(function)
        config = spec.config if cls is None else configs.fill(cls, spec.config, f"config of {spec.target.label}")
        return function, config
    import cloudpickle  # type: ignore[import-untyped]

    with open(folder.function, "rb") as file:
        function, config = cloudpickle.load(file)
    return function, config


def _write_result(folder: RunFolder, run: Run, returned: Any) -> None:
    from mgpu_slurm.runtime.metrics import as_numbers

    if returned is None:
        result = run.last_metrics
    elif isinstance(returned, dict):
        result = as_numbers(returned)
    else:
        result = as_numbers({"value": returned})
    record = {"run": folder.run, "result": result, "step": run.step, "progress": run.progress, "ended": now()}
    write_json(folder.result, record)


def _traceback(error: BaseException) -> str:
    """The traceback from the user's function on: the frames of this module tell nobody anything."""
    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename == __file__:
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


def _failure(error: BaseException, shown: str, facts: RankFacts) -> dict[str, Any]:
    return {
        "rank": facts.rank,
        "node": facts.node_name,
        "time": now(),
        "error": type(error).__name__,
        "message": str(error),
        "traceback": shown,
        # a lost connection is what the other ranks see when one fails: never the first cause
        "consequence": _is_lost_connection(error),
    }


def _is_lost_connection(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        words in text
        for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "gloo")
    )


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


def run_rank(folder: RunFolder) -> int:
    """`main`, with an error before the rank has its log shown where the launcher writes."""
    try:
        return main(folder)
    except MgpuError as error:
        print(f"mgpu_slurm: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    exit_process(run_rank(RunFolder(Path(sys.argv[1]))))
