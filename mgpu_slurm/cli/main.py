"""The command line: each command parses, calls one function and prints.

What a command needs is imported inside it, so that `--help` and `status` start at once.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.registry import current_state, lookup

if TYPE_CHECKING:
    from mgpu_slurm.api import Group, Handle

PROGRAM = "mgpu-slurm"
INTERRUPTED = 130
STILL_ALIVE = 124
"""That of timeout(1)."""

_RESOURCE_FLAGS = [
    click.option("--nodes", type=int, metavar="N", help="Nodes."),
    click.option("--ntasks-per-node", type=int, metavar="N", help="Ranks on each node."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs on each node, 0 for none."),
    click.option("--cpus-per-task", type=int, metavar="N", help="Cores of each rank."),
    click.option("--mem", metavar="SIZE", help="Memory of each node, as sbatch takes it: 64G."),
    click.option("--time", metavar="TIME", help="Time limit, as sbatch takes it: minutes, M:S, H:M:S, D-H."),
    click.option("--partition", metavar="NAME"),
    click.option("--account", metavar="NAME"),
    click.option("--qos", metavar="NAME"),
    click.option("--constraint", metavar="FEATURES"),
    click.option("--exclude", metavar="NODES"),
    click.option("--nodelist", metavar="NODES"),
    click.option("--reservation", metavar="NAME"),
    click.option(
        "--sbatch", "extra", multiple=True, metavar="KEY=VALUE", help="Any other option of sbatch; may be repeated."
    ),
]
"""What `submit` and `resume` take, in sbatch's words."""


def resource_flags(command: Any) -> Any:
    for flag in reversed(_RESOURCE_FLAGS):
        command = flag(command)
    return command


def again_flags(of_new_runs: bool) -> Callable[[Any], Any]:
    """What makes a run start again by itself."""

    def default(words: str) -> str:
        return f"  [default: {words if of_new_runs else 'as before'}]"

    flags = [
        click.option(
            "--signal",
            metavar="SIGNAL[@SECONDS]",
            help="What is sent how long before the time limit." + default("USR2@120, or a fifth of a short limit"),
        ),
        click.option(
            "--max-requeues",
            type=int,
            metavar="N",
            help="How often the run may start again at its time limit." + default("20"),
        ),
        click.option(
            "--retries",
            type=int,
            metavar="N",
            help="How often in a row it starts again that has failed, of anything."
            + default("3 where the cluster failed"),
        ),
        click.option(
            "--stuck-after",
            type=float,
            metavar="MINUTES",
            help="Without progress, after which it starts again; 0 for never." + default("30"),
        ),
    ]
    return lambda command: functools.reduce(lambda inner, flag: flag(inner), reversed(flags), command)


json_flag = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value, and nothing else, on standard output."
)
code_flag = click.option(
    "--code",
    type=click.Choice(["same", "new"]),
    default="same",
    show_default=True,
    help="Of what exists: its own code, or the project's as it is now.",
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the program and exits: 0 done, 1 the run failed, 2 the call or a file was wrong, 3 the cluster refused, 124
    waited for too long, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    words, command = _split_command(words)
    debug = "--debug" in words
    try:
        cli.main(args=words, prog_name=PROGRAM, standalone_mode=False, obj=command)
    except click.exceptions.Exit as stopped:
        sys.exit(stopped.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        mend = f": see `{context.command_path} --help`" if context else ""
        if isinstance(error, click.NoSuchOption) and words[0] == "submit":
            mend = f" (the job's own values go without dashes, name=value; a command goes behind --){mend}"
        _fail(error.format_message().rstrip(".") + mend, UserError.exit_code)
    except MgpuError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # the reader, such as `head`, has seen enough
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if debug:
            raise
        _fail(f"{error}: mend that and try again", MgpuError.exit_code)
    sys.exit(0)


def _split_command(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """What stands behind the first `--` is the command to run, untouched."""
    if "--" not in words:
        return words, ()
    place = words.index("--")
    return words[:place], tuple(words[place + 1 :])


def _fail(message: str, code: int) -> NoReturn:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mgpu-slurm", prog_name=PROGRAM)
@click.option("--debug", is_flag=True, help="Show a traceback with errors.")
def cli(debug: bool) -> None:
    """Multi-node, multi-GPU training as SLURM batch jobs, and the same on a laptop."""


@cli.command()
@click.argument("words", nargs=-1, metavar="[TARGET] [key=value ...] | -- COMMAND ...")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="YAML file with values for the job's config."
)
@resource_flags
@click.option(
    "--executor",
    default="auto",
    metavar="NAME",
    help="auto, slurm, allocation (the one that is held) or local; auto is slurm where there is an sbatch, else local."
    "  [default: auto]",
)
@click.option("--cluster", metavar="NAME", help="One of the clusters in mgpu.yaml.")
@click.option("--name", metavar="NAME", help="First part of the run's name.  [default: the target's]")
@again_flags(of_new_runs=True)
@click.option("--seeds", metavar="N[%M]", help="N runs, one per seed, as one job array; at most M at a time.")
@click.option("--after", multiple=True, metavar="RUN", help="Start once RUN has completed; may be repeated.")
@click.option("--after-any", multiple=True, metavar="RUN", help="Start once RUN has ended, however; may be repeated.")
@click.option("--follow/--no-follow", default=None, help="Show rank 0's log until the end.  [default: not on slurm]")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and start nothing.")
@click.option("--check", is_flag=True, help="With --dry-run: import the job, and ask SLURM when it would start.")
@json_flag
@click.option("--debug", is_flag=True, hidden=True)
@click.pass_obj
def submit(
    command: tuple[str, ...],
    /,
    words: tuple[str, ...],
    config_file: Path | None,
    extra: tuple[str, ...],
    follow: bool | None,
    dry_run: bool,
    check: bool,
    as_json: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Run a job function or a command on nodes and GPUs.

    TARGET is package.module, package.module:function or path/to/file.py:function; `train` where no function is named.
    Without it: `job:` of mgpu.yaml, else jobs/digits.py where there is one. key=value sets the job's config (nested:
    model.width=32). A command, such as a script for torchrun, stands behind --.

    Where nothing else is said it is one node with all of its GPUs, and one rank per GPU.

    \b
      mgpu-slurm submit --nodes 2
      mgpu-slurm submit train.py:train --nodes 2 --gpus-per-node 4 --time 4:00:00 lr=0.1
      mgpu-slurm submit --nodes 2 -- python train.py --lr 0.1
    """
    from mgpu_slurm.submission import submit as submitting

    if check and not dry_run:
        raise UserError("--check: it goes with --dry-run, and asks when the run would start")
    request = _request(command, words, config_file, extra, dry_run, options | {"check": check})
    if dry_run:
        _show_rehearsal(submitting.rehearse(request, _note), check, as_json)
        return
    submission = submitting.submit(request, _note)
    plan = submission.plan
    if as_json:
        facts = {
            "run": plan.spec.run,
            "folder": str(plan.folder.path),
            "job_id": submission.job_id,
            "executor": plan.spec.executor,
        }
        _print_json(facts)
        if not follow:
            return
    else:
        _print_lines(plan.lines())
    if plan.spec.executor != "slurm" if follow is None else follow:
        _follow_to_the_end(plan.spec.run, quiet=as_json)
    else:
        _print_lines([f"job       {submission.job_id}", _how_to_follow(plan.spec.run)])


def _how_to_follow(name: str) -> str:
    return f"follow it with: {program()} logs {name} --follow"


def _request(
    command: tuple[str, ...],
    words: tuple[str, ...],
    config_file: Path | None,
    extra: tuple[str, ...],
    dry_run: bool,
    options: dict[str, Any],
) -> Any:
    from mgpu_slurm.request import config as configs
    from mgpu_slurm.request.spec import RESOURCE_FLAGS
    from mgpu_slurm.submission.plan import Request

    targets = [word for word in words if "=" not in word]
    if len(targets) > 1:
        raise UserError(f"two targets, {targets[0]!r} and {targets[1]!r}: give one; a command goes behind --")
    values = configs.read_yaml(config_file) if config_file is not None else {}
    values = configs.merge(values, configs.parse_overrides([word for word in words if "=" in word]))
    flags = _resources({name: options.pop(name) for name in RESOURCE_FLAGS}, extra)
    target = targets[0] if targets else None
    return Request(target=target, command=command, values=values, flags=flags, dry_run=dry_run, **options)


def _resources(flags: dict[str, Any], extra: tuple[str, ...]) -> dict[str, Any]:
    """By sbatch's long names."""
    from mgpu_slurm.request.spec import sbatch_pairs

    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return named | ({"sbatch": sbatch_pairs(extra)} if extra else {})


def _show_rehearsal(plan: Any, check: bool, as_json: bool) -> None:
    from mgpu_slurm.executors import slurm_queue
    from mgpu_slurm.request import config as configs

    script = plan.script if plan.spec.executor == "slurm" else None
    if as_json:
        facts = {"spec": configs.to_plain(plan.spec), "folder": str(plan.folder.path), "script": script}
        if check:
            facts["check"] = configs.to_plain(slurm_queue.check(plan.spec, plan.folder))
        _print_json(facts)
        return
    _print_lines([*plan.lines(), "nothing was started (--dry-run)"])
    if script is not None:
        print(f"\n{script}", end="", flush=True)
    if check:
        start = slurm_queue.check(plan.spec, plan.folder)
        found = f"nothing to check: on {plan.spec.executor} it would start at once" if start is None else start.sentence
        print(f"\n{found}")


def _follow_to_the_end(name: str, quiet: bool = False, after_attempt: int = 0, without: Iterable[int] = ()) -> None:
    """Shows the run until it ends, then how it ended; the exit code tells the same."""
    from mgpu_slurm import api

    found = api.find(name)
    _follow(found, quiet=quiet, after_attempt=after_attempt, without=without)
    if found.state != "COMPLETED":
        sys.exit(1)


def _follow(
    found: Handle | Group, rank: int = 0, quiet: bool = False, after_attempt: int = 0, without: Iterable[int] = ()
) -> None:
    from mgpu_slurm import api
    from mgpu_slurm.reports.follow import follow, follow_group

    is_group = isinstance(found, api.Group)
    try:
        for text in follow_group(found.files, without) if is_group else follow(found.files, rank, after_attempt):
            if not quiet:
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(
            f"\nno longer following; the run goes on. Cancel it with: {program()} cancel {found.name}",
            file=sys.stderr,
        )
        sys.exit(INTERRUPTED)
    if not quiet:
        _print_ending(found, shown_rank=rank)


def _print_ending(found: Handle | Group, shown_rank: int | None = None) -> None:
    from mgpu_slurm import api
    from mgpu_slurm.reports import status as statuses
    from mgpu_slurm.reports import sweep_status
    from mgpu_slurm.reports.run_summary import curves_lines, ending_lines

    if isinstance(found, api.Study):
        _print_lines(sweep_status.ending_lines(found.files, found.all_facts))
    elif isinstance(found, api.Group):
        _print_lines([statuses.table(found.all_facts, {found.name}, _terminal()), *curves_lines(found.files)])
    else:
        _print_lines(ending_lines(found.folder, found.facts, shown_rank))


@cli.command()
@click.argument("names", nargs=-1, metavar="[RUN ...]")
@click.option("--watch", is_flag=True, help="Show it again and again, until all have ended.")
@json_flag
def status(names: tuple[str, ...], watch: bool, as_json: bool) -> None:
    """Show how runs stand, newest first.

    A line a run, a group or a sweep; those that are named with all that there is to say.
    """
    from mgpu_slurm.reports import status as statuses

    asked = [lookup.find(name) for name in names]
    if watch:
        if as_json:
            raise UserError("--watch: it is for people; programs call `status --json` again, or `wait`")
        statuses.show(asked, _note)
        return
    found = current_state.current(asked, _note) if names else lookup.all_states(_note)
    if as_json:
        _print_json([statuses.facts(state) for state in statuses.as_one(found, asked)])
    else:
        _print_lines(statuses.lines(found, asked, _terminal()))


@cli.command()
@click.argument("name", metavar="RUN")
@click.option("--rank", type=int, default=0, show_default=True, help="Whose log.")
@click.option("--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--launch", is_flag=True, help="The log of the batch script or supervisor instead.")
def logs(name: str, rank: int, follow: bool, launch: bool) -> None:
    """Print what a rank has printed, over all attempts.

    With --follow until the run has ended, and how; of a group, how its runs begin and end.
    """
    from mgpu_slurm import api
    from mgpu_slurm.core import records
    from mgpu_slurm.registry import logs as launch_logs

    if launch:
        for path in launch_logs.of_launch(lookup.find(name)):
            print(path.read_text(errors="replace"), end="")
        return
    handle = api.find(name) if follow else api.find_run(name)
    if isinstance(handle, api.Group):
        _follow(handle)
        return
    folder = handle.files
    ranks = records.read_state(folder)["ranks"]
    # a resumed run may have had more
    if not 0 <= rank < ranks and not handle.logs(rank):
        raise UserError(f"--rank {rank}: run {folder.run} has ranks 0 to {ranks - 1}")
    if follow:
        _follow(handle, rank)
        return
    from mgpu_slurm.reports.run_summary import rank_warnings, warning_lines

    print(handle.logs(rank), end="")
    # beside the log, which stays what the rank has printed
    newest = records.attempts_started(folder)
    found = [each for each in rank_warnings(folder) if each.rank != rank and each.attempt == newest]
    for line in warning_lines(found):
        print(f"-- warning: {line}", file=sys.stderr)


@cli.command()
@click.argument("name", metavar="RUN")
@json_flag
def why(name: str, as_json: bool) -> None:
    """Show why a run has failed, in plain words, and what to do.

    Of a group, and of a sweep's workers, each that did not complete.
    """
    from mgpu_slurm.reports import diagnosis as reasons

    folder = lookup.find(name)
    runs = list(current_state.current([folder]))
    asked = [(run, state) for run, state in runs if state["state"] != "COMPLETED"] if len(runs) > 1 else runs
    if as_json:
        _print_json([reasons.facts(run, state) for run, state in asked])
        return
    if not asked:
        print(f"{folder.run}: all of its {len(runs)} runs are complete")
    for number, (run, state) in enumerate(asked):
        _print_lines([*([""] if number else []), *reasons.lines(run, state)])


@cli.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN ...")
def cancel(names: tuple[str, ...]) -> None:
    """Ask runs to save their work and end."""
    from mgpu_slurm import api

    for found in [api.find(name) for name in names]:
        if found.cancel():
            asked = "asked to end" if found.is_command else "asked to save and end"
            print(f"{found.name}: {asked}; `{program()} resume {found.name}` starts it again")
        else:
            print(f"{found.name}: had ended already ({found.state})")


@cli.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN ...")
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after so long.")
@json_flag
def wait(names: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Block until runs have ended.

    Exit code 1 unless all of them completed, 124 where --timeout came first.
    """
    from mgpu_slurm import api
    from mgpu_slurm.core import states
    from mgpu_slurm.reports import status as statuses

    found = [api.find(name) for name in names]
    give_up = None if timeout is None else time.monotonic() + timeout
    try:
        ended = [each.wait(None if give_up is None else give_up - time.monotonic(), _note) for each in found]
    except TimeoutError:
        ended = [each.state for each in found]
        alive = [each.name for each, state in zip(found, ended, strict=True) if states.is_alive(state)]
        if alive:
            _fail(f"--timeout {timeout:g}: still alive: {', '.join(alive)}: wait longer, or cancel", STILL_ALIVE)
    if as_json:
        pairs = [pair for each in found for pair in current_state.current([each.files])]
        _print_json([statuses.facts(state) for state in statuses.as_one(pairs, [each.files for each in found])])
    else:
        for each in found:
            _print_ending(each)
    if any(state != "COMPLETED" for state in ended):
        sys.exit(1)


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[key=value ...]")
@click.option("--executor", default="auto", metavar="NAME", help="As for submit.  [default: auto]")
@click.option("--cluster", metavar="NAME", help="One of the clusters in mgpu.yaml.")
@click.option("--around", metavar="STUDY", help="Search a grid around the best trials of an earlier study.")
@code_flag
@click.option("--follow/--no-follow", default=None, help="Show trials as they end.  [default: not on slurm]")
@click.option("--dry-run", is_flag=True, help="Print what would be searched and submitted, and start nothing.")
@json_flag
def sweep(
    file: Path,
    words: tuple[str, ...],
    executor: str,
    cluster: str | None,
    around: str | None,
    code: str,
    follow: bool | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Search for a job's best parameters, as FILE says.

    Workers, a job array on SLURM, take one trial after the other out of one study. Called again with the same FILE it
    adds what FILE has more: trials, workers, budget; the study keeps the code that it began with, unless --code says
    otherwise. key=value changes FILE's values: trials=100, budget.hours=4.
    """
    from mgpu_slurm import api
    from mgpu_slurm.request import config as configs
    from mgpu_slurm.sweeps import launch

    options = launch.Options(executor, cluster, dry_run, around, new_code=code == "new")
    started = launch.start(configs.read_yaml(file), configs.parse_overrides(words), str(file), options, _note)
    name, place = started.folder.run, str(started.folder.path)
    if as_json:
        facts = {"run": name, "folder": str(started.folder.path), "job_id": started.job_id}
        _print_json(facts | {"executor": started.executor})
        if not follow:
            return
    else:
        _print_lines(started.lines)
    if dry_run:
        return
    if not started.is_alive:
        if not as_json:
            _print_ending(api.find(place))
        return
    if started.executor != "slurm" if follow is None else follow:
        _follow_to_the_end(place, quiet=as_json, without=started.ended)
    elif not as_json:
        _print_lines([f"job       {started.job_id}"] if started.job_id is not None else [])
        print(f"look at it with: {program()} status {name} --watch")


@cli.command()
@click.argument("name", metavar="RUN")
@click.argument("words", nargs=-1, metavar="")
@resource_flags
@again_flags(of_new_runs=False)
@code_flag
@click.option("--follow/--no-follow", default=None, help="Show rank 0's log until the end.  [default: not on slurm]")
@json_flag
def resume(
    name: str,
    words: tuple[str, ...],
    code: str,
    follow: bool | None,
    as_json: bool,
    extra: tuple[str, ...],
    signal: str | None,
    max_requeues: int | None,
    retries: int | None,
    stuck_after: float | None,
    **flags: Any,
) -> None:
    """Start again a run that has ended.

    It goes on from its newest checkpoint, with what is given here in the place of what it had. Of a group, the runs
    that did not complete; of a sweep, workers for the trials that are left.
    """
    from mgpu_slurm import api
    from mgpu_slurm.request.spec import read_spec
    from mgpu_slurm.submission.resume_overrides import Again, Change

    if words:
        raise UserError(f"{words[0]}: a run keeps its config; submit a new one to train with another")
    found = api.find(name)
    attempts = max(facts["attempts"] for facts in found.all_facts)
    again = Again(signal, max_requeues, retries, stuck_after)
    job_id = found.resume(Change(_resources(flags, extra), again, new_code=code == "new"), _note)
    executor = read_spec(found.files).executor
    if as_json:
        _print_json({"run": found.name, "folder": str(found.folder), "job_id": job_id, "executor": executor})
        return
    print(f"run {found.name} goes on as job {job_id}", flush=True)
    if executor != "slurm" if follow is None else follow:
        _follow_to_the_end(found.name, after_attempt=attempts)
    else:
        print(_how_to_follow(found.name))


@cli.command()
@click.argument("name", metavar="STUDY")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print its whole config, as `submit --config` takes it.")
@json_flag
def best(name: str, as_yaml: bool, as_json: bool) -> None:
    """Show the best trial of a sweep, and how to train it again."""
    from dataclasses import asdict

    from mgpu_slurm.request import config as configs
    from mgpu_slurm.sweeps.study import best_trial

    found = best_trial.best(lookup.find(name))
    if as_json:
        _print_json(asdict(found))
    elif as_yaml:
        print(configs.dump_yaml(found.config), end="")
    else:
        _print_lines(found.lines())


@cli.command()
@click.argument("name", metavar="STUDY")
def repair(name: str) -> None:
    """Write what can be kept of a sweep's damaged journal into a new file, next to it."""
    from mgpu_slurm.sweeps.study import journal_repair

    _print_lines(journal_repair.repair(lookup.find(name)))


@cli.command()
@click.argument("name", metavar="RUN [-- COMMAND ...]")
@click.option("--node", metavar="NAME", help="One of the run's nodes.  [default: its first]")
@click.pass_obj
def shell(command: tuple[str, ...], /, name: str, node: str | None) -> None:
    """Open a shell beside a run, on one of its nodes.

    Or run one command there, such as nvidia-smi, py-spy or df.
    """
    from mgpu_slurm import api
    from mgpu_slurm.registry import shell as shells
    from mgpu_slurm.slurm import commands

    handle = api.find_run(name)
    words = shells.words(handle.files, handle.facts, node, command, terminal=sys.stdin.isatty())
    os.chdir(shells.place(handle.files))
    os.execvpe(words[0], words, commands.scrubbed_environment(os.environ))


@cli.command()
@click.argument("names", nargs=-1, metavar="[RUN ...]")
@click.option("--checkpoints", is_flag=True, help="Delete only the checkpoints of the named runs.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean(names: tuple[str, ...], checkpoints: bool, yes: bool) -> None:
    """Show what runs take on disk; delete those that are named."""
    from mgpu_slurm import api
    from mgpu_slurm.registry.disk_usage import usage_table

    chosen = [api.find(name) for name in names] or api.submitted()
    for name, handle in zip(names, chosen, strict=False):
        handle.check_deletable()
        if yes and handle.name.startswith(name) and handle.name != name:
            raise UserError(f"--yes: {name!r} is only the beginning of {handle.name}: give the whole name")
    if not chosen:
        print("no runs, nothing to clean")
        return
    print(usage_table([handle.files for handle in chosen]))
    if not names:
        print(f"\nnothing was deleted; name runs to delete them: {program()} clean RUN ...")
        return
    what = "the checkpoints of " if checkpoints else ""
    if not yes and not click.confirm(f"delete {what}{counted(len(chosen), 'run')}?"):
        return
    for handle in chosen:
        handle.delete(only_checkpoints=checkpoints)
        print(f"deleted {what}{handle.name}")


@cli.command()
@click.argument("words", nargs=-1, metavar="[RUN|GROUP|SWEEP|PATH ...]")
@click.option("--by", metavar="KEY[,KEY]", help="Group runs by these config values only.  [default: all but seeds]")
@click.option(
    "--on", type=click.Choice(["step", "progress"]), default="step", show_default=True, help="What runs are aligned by."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="[default: aggregate-NAME]")
@click.option("--parquet/--no-parquet", default=None, help="Write Parquet too.  [default: where pyarrow is installed]")
@json_flag
def aggregate(
    words: tuple[str, ...], by: str | None, on: Any, out: Path | None, parquet: bool | None, as_json: bool
) -> None:
    """Take the curves of several runs together.

    Mean, standard deviation, min, max, median and a 95% interval of the mean, step by step, over runs that differ in
    their seed only: as CSV, Parquet and runs for TensorBoard. PATH is a folder: each one below it with event files is a
    run, such as those of Lightning. Without any, the newest group.

    \b
      mgpu-slurm aggregate                        # the newest group
      mgpu-slurm aggregate GROUP GROUP --by lr    # one curve for each lr
      mgpu-slurm aggregate lightning_logs
    """
    from mgpu_slurm.reports import aggregate as aggregates
    from mgpu_slurm.reports import aggregate_files

    aggregate_files.check(out, parquet)
    keys = [key for key in (by or "").split(",") if key]
    if by is not None and not keys:
        raise UserError("--by: it takes names of config values, such as --by lr,width")
    found = aggregates.aggregate(words, on, keys, _note)
    out = out or aggregate_files.default_folder(found)
    written = aggregate_files.write(found, out, parquet)
    if as_json:
        _print_json({"folder": str(out.absolute()), "files": written, **found.facts})
        return
    print(aggregates.table(found))
    for note in found.notes:
        print(f"note      {note}")
    print(f"written   {out}/: {' '.join(written)}")
    if parquet is None and not aggregate_files.has_parquet():
        print(f"          no Parquet: {aggregate_files.NO_PARQUET}")
    print(f"curves    {program()} tensorboard {out}")


@cli.command()
@click.argument("words", nargs=-1, metavar="[RUN|GROUP|SWEEP|PATH ...]")
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="[default: a free one]")
@json_flag
def tensorboard(words: tuple[str, ...], port: int | None, as_json: bool) -> None:
    """Show runs in TensorBoard, until Ctrl-C.

    Exactly those that are named, or the newest 20 runs and groups; those of a group and the trials of a sweep appear as
    they start. It listens on this machine only, where everybody who is logged in can reach it.
    """
    from mgpu_slurm.reports import tensorboard_server

    chosen = tensorboard_server.choose(words, _note)

    def say(server: tensorboard_server.Server) -> None:
        if as_json:
            runs = [source.name for source in chosen.runs]
            _print_json({"address": server.address, "port": server.port, "tunnel": server.tunnel, "runs": runs})
        else:
            _print_lines(tensorboard_server.lines(server))

    if not as_json:
        _print_lines([f"runs      {tensorboard_server.described(chosen)}", "-- starting TensorBoard"])
    tensorboard_server.serve(chosen, port, say)


@cli.command()
@click.option("--submit", "submits", is_flag=True, help="Look at nodes too, by a job of two nodes and ten minutes.")
@resource_flags
@click.option("--executor", default="auto", metavar="NAME", help="As for submit.  [default: auto]")
@click.option("--cluster", metavar="NAME", help="One of the clusters in mgpu.yaml.")
@json_flag
def doctor(
    submits: bool, executor: str, cluster: str | None, as_json: bool, extra: tuple[str, ...], **flags: Any
) -> None:
    """Check this machine and its cluster.

    With --submit also the nodes and what lies between them, by a job on two of them.

    All flags but --json are for the job of --submit. Exit code 1 when something failed.
    """
    from mgpu_slurm import doctor as doctors
    from mgpu_slurm.doctor import job_checks
    from mgpu_slurm.doctor.check_results import Finding, has_failed

    resources = _resources(flags, extra)
    given = [f"--{name}" for name, value in resources.items() if value is not None]
    if given and not submits:
        raise UserError(f"{given[0]}: it is for the job of --submit: add that")
    found: list[Finding] = []
    terminal = _terminal()
    width = terminal.columns if terminal else sys.maxsize

    def show(findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            if not as_json:
                _print_lines(finding.lines(width))

    show(doctors.look_here(Path.cwd(), _note, will_be_proven=submits))
    if submits and not any(map(doctors.is_silence, found)):
        show(job_checks.findings_of_job(resources, executor, cluster, _note))
    if as_json:
        _print_json([finding.plain for finding in found])
    if has_failed(found):
        sys.exit(1)


@cli.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path, file_okay=False))
def init(folder: Path) -> None:
    """Write a starter project: a job, a sweep, and a commented cluster file."""
    from mgpu_slurm.submission import starter_project as starter

    for path in starter.write(folder):
        print(f"wrote {path}")
    where = "" if folder == Path() else f"cd {folder} && "
    print(f"try it: {where}{program()} submit --nodes 2")
    print(f"then:   {program()} sweep sweep.yaml")


def _terminal() -> os.terminal_size | None:
    """The room there is where somebody reads the output."""
    import shutil

    return shutil.get_terminal_size() if sys.stdout.isatty() else None


def _note(text: str) -> None:
    """Says what the program is waiting for, where no answer is spoiled by it."""
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    from mgpu_slurm.core.files import without_nan

    print(json.dumps(without_nan(value), indent=2), flush=True)


def _print_lines(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)
