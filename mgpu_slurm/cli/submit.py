"""Start runs: `submit`, `resume` and `scaling`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mgpu_slurm.cli.options import (
    code_flag,
    container_flags,
    json_flag,
    parallelism_flags,
    profile_flag,
    resource_flags,
    resource_flags_of_a_node,
    resource_values,
    restart_flags,
    run_names,
    sink_flag,
    stage_flag,
)
from mgpu_slurm.cli.output import INTERRUPTED, follow_to_the_end, how_to_follow, print_json, print_lines, print_note
from mgpu_slurm.core.errors import UserError

_config_option = click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="YAML file with values for the job's config."
)
_executor_option = click.option(
    "--executor",
    default="auto",
    metavar="NAME",
    help="auto, slurm, allocation (your current salloc) or local; auto is slurm if there is an sbatch, else local."
    "  [default: auto]",
)
_cluster_option = click.option("--cluster", metavar="NAME", help="One of the clusters in mgpu.yaml.")


class _JobCommand(click.Command):
    """A command whose `--help` also shows the config of a job that is named before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = list(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        options, _, _ = self.make_parser(ctx).parse_args(ctx.meta[__name__])
        words = options.get("words")
        targets = [word for word in words if "=" not in word] if isinstance(words, (list, tuple)) else []
        if targets:
            from mgpu_slurm.submission.project import config_help

            title, rows = config_help.rows(targets[0], Path.cwd())
            with formatter.section(title):
                formatter.write_dl(rows)


@click.command(cls=_JobCommand)
@click.argument("words", nargs=-1, metavar="[TARGET] [key=value ...] | -- COMMAND ...")
@_config_option
@resource_flags
@_executor_option
@_cluster_option
@click.option("--name", metavar="NAME", help="First part of the run's name.  [default: the target's]")
@restart_flags(of_new_runs=True)
@parallelism_flags
@profile_flag
@stage_flag
@container_flags
@sink_flag
@click.option("--seeds", metavar="N[%M]", help="N runs, one per seed, as one job array; at most M at a time.")
@click.option(
    "--after", multiple=True, metavar="RUN", shell_complete=run_names, help="Start once RUN has completed; repeatable."
)
@click.option(
    "--after-any",
    multiple=True,
    metavar="RUN",
    shell_complete=run_names,
    help="Start once RUN has ended, whatever its outcome; repeatable.",
)
@click.option("--notify", metavar="URL", help="Web hook that gets a JSON POST when the run has ended.")
@click.option("--follow/--no-follow", default=None, help="Show rank 0's log until the end.  [default: not on slurm]")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and start nothing.")
@click.option("--check", is_flag=True, help="With --dry-run: import the job, and ask SLURM when it would start.")
@click.option("--fit", is_flag=True, help="With --dry-run: find the memory that the job takes on each GPU.")
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
    fit: bool,
    as_json: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Run a training function or a script on SLURM, or on this machine.

    TARGET is package.module, package.module:function or path/to/file.py:function; `train` if no function is named.
    It defaults to `job:` in mgpu.yaml, else jobs/digits.py if it exists. key=value sets the job's config (nested:
    model.width=32). Put a command, such as a torchrun script, after --.

    By default: one node, all of its GPUs, one rank per GPU. `submit TARGET --help` also shows the job's config.

    \b
      mgpu-slurm submit --nodes 2
      mgpu-slurm submit train.py:train --nodes 2 --gpus-per-node 4 --time 4:00:00 lr=0.1
      mgpu-slurm submit --nodes 2 -- python train.py --lr 0.1
    """
    from mgpu_slurm.submission import memory_fit
    from mgpu_slurm.submission import submit as submitting

    for option, is_given in (("--check", check), ("--fit", fit)):
        if is_given and not dry_run:
            raise UserError(f"{option} only works with --dry-run")
    request = _request(command, words, config_file, extra, dry_run, check=check, **options)
    if dry_run and fit:
        _show_rehearsal(*memory_fit.rehearse(request, print_note), check=check, as_json=as_json)
        return
    if dry_run:
        _show_rehearsal(submitting.rehearse(request, print_note), None, check, as_json)
        return
    submission = submitting.submit(request, print_note)
    plan = submission.plan
    if as_json:
        facts = {
            "run": plan.spec.run,
            "folder": str(plan.folder.path),
            "job_id": submission.job_id,
            "executor": plan.spec.executor,
        }
        print_json(facts)
        if not follow:
            return
    else:
        print_lines(plan.lines())
    if not plan.spec.is_queued if follow is None else follow:
        follow_to_the_end(plan.spec.run, quiet=as_json)
    else:
        print_lines([f"job       {submission.job_id}", how_to_follow(plan.spec.run)])


def _request(
    command: tuple[str, ...],
    words: tuple[str, ...],
    config_file: Path | None,
    extra: tuple[str, ...],
    dry_run: bool,
    **options: Any,
) -> Any:
    from mgpu_slurm.request.parallelism import Parallelism
    from mgpu_slurm.request.resources import RESOURCE_FLAGS
    from mgpu_slurm.request.spec import RestartPolicy
    from mgpu_slurm.submission.plan import Request

    target, values = _target_and_values(words, config_file)
    flags = resource_values({name: options.pop(name) for name in RESOURCE_FLAGS}, extra)
    restart = RestartPolicy.taken_from(options)
    parallelism = Parallelism.taken_from(options)
    return Request(
        target=target,
        command=command,
        values=values,
        flags=flags,
        restart=restart,
        parallelism=parallelism,
        dry_run=dry_run,
        **options,
    )


def _target_and_values(
    words: tuple[str, ...], config_file: Path | None, or_else: str = "; put a command after `--`"
) -> tuple[str | None, dict[str, object]]:
    from mgpu_slurm.request import config as configs

    targets = [word for word in words if "=" not in word]
    if len(targets) > 1:
        first, second = targets[:2]
        if or_else and _is_program(first):
            import shlex

            raise UserError(f"{first!r} is a command, which goes after `--`: submit -- {shlex.join(targets)}")
        raise UserError(f"got two targets, {first!r} and {second!r}: set a config value as {second}=VALUE{or_else}")
    values = configs.read_yaml(config_file) if config_file is not None else {}
    values = configs.merge(values, configs.parse_overrides([word for word in words if "=" in word]))
    return targets[0] if targets else None, values


def _is_program(word: str) -> bool:
    """Return whether a word that should name a job function names a program instead."""
    import os
    import shutil

    if ":" in word or word.endswith(".py"):
        return False
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which(word, path=places) is not None


def _show_rehearsal(plan: Any, fit: Any, check: bool, as_json: bool) -> None:
    from mgpu_slurm.executors import slurm_queue
    from mgpu_slurm.request import config as configs

    script = plan.script if plan.spec.is_queued else None
    if as_json:
        facts = {"spec": configs.to_plain(plan.spec), "folder": str(plan.folder.path), "script": script}
        if check:
            facts["check"] = configs.to_plain(slurm_queue.check(plan.spec, plan.folder))
        if fit is not None:
            facts["memory"] = fit.to_json()
        print_json(facts)
        return
    print_lines([*plan.lines(), "nothing was started (--dry-run)"])
    if fit is not None:
        print_lines(["", *fit.lines()])
    if script is not None:
        print(f"\n{script}", end="", flush=True)
    if check:
        start = slurm_queue.check(plan.spec, plan.folder)
        found = f"the {plan.spec.executor} executor starts jobs immediately" if start is None else start.sentence
        print(f"\n{found}")


@click.command()
@click.argument("name", metavar="RUN", shell_complete=run_names)
@click.argument("words", nargs=-1, metavar="")
@resource_flags
@restart_flags(of_new_runs=False)
@parallelism_flags
@profile_flag
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
    profile: str | None,
    **flags: Any,
) -> None:
    """Resume a run that has ended.

    It continues from its newest checkpoint; options given here override the old ones. For a group: the runs that
    did not complete; for a sweep: workers for the remaining trials.
    """
    from mgpu_slurm import api
    from mgpu_slurm.registry.sweep_state import summary_of
    from mgpu_slurm.request.parallelism import Parallelism
    from mgpu_slurm.request.spec import RestartPolicy, read_spec
    from mgpu_slurm.submission.resume_overrides import Change

    if words:
        raise UserError(f"{words[0]}: a run keeps its config; submit a new run, which can load its weights (`export`)")
    found = api.find(name)
    attempts = max(state.attempts for state in found.all_current)
    restart, parallelism = RestartPolicy.taken_from(flags), Parallelism.taken_from(flags)
    change = Change(resource_values(flags, extra), restart, parallelism, profile, new_code=code == "new")
    before = read_spec(found.files)
    ended = [trial.number for trial in summary_of(found.files).recent] if isinstance(found, api.Study) else []
    job_id = found.resume(change, print_note)
    spec = read_spec(found.files)
    if as_json:
        print_json({"run": found.name, "folder": str(found.folder), "job_id": job_id, "executor": spec.executor})
        return
    if spec.resources.ranks != before.resources.ranks:
        print(f"ranks     {spec.resources.ranks} (was {before.resources.ranks})")
    if spec.parallelism != before.parallelism:
        print(f"strategy  {spec.parallelism.words} (was {before.parallelism.words})")
    print(f"resumed run {found.name} as job {job_id}", flush=True)
    if not spec.is_queued if follow is None else follow:
        follow_to_the_end(found.name, after_attempt=attempts, without=ended)
    else:
        print(how_to_follow(found.name))


@click.command(cls=_JobCommand)
@click.argument("words", nargs=-1, metavar="[TARGET] [key=value ...]")
@_config_option
@click.option("--nodes", "sizes", required=True, metavar="N,N,...", help="Numbers of nodes, such as 1,2,4.")
@resource_flags_of_a_node
@_executor_option
@_cluster_option
@click.option("--name", metavar="NAME", help="First part of the runs' names.  [default: the target's]")
@parallelism_flags
@container_flags
@click.option("--scale", metavar="KEY", help="Let this config value, such as batch_size, grow with the nodes.")
@click.option("--steps", default=20, metavar="N", show_default=True, help="Optimizer steps to measure.")
@click.option("--warm-up", default=5, metavar="N", show_default=True, help="Optimizer steps before them.")
@json_flag
@click.pass_obj
def scaling(
    command: tuple[str, ...],
    /,
    words: tuple[str, ...],
    config_file: Path | None,
    sizes: str,
    scale: str | None,
    extra: tuple[str, ...],
    steps: int,
    warm_up: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Show how the speed of a job grows with its nodes.

    It runs the job on each number of nodes, for a few optimizer steps and without saving anything, and shows the
    speed, and where the rest of the time goes. In a queue all sizes start together, elsewhere one after the other.

    By default, all sizes divide the same batch (strong scaling). With --scale, the batch grows with the nodes (weak
    scaling): the value that you give, or the job's default, is that of the smallest size.

    \b
      mgpu-slurm scaling train.py:train --nodes 1,2,4 --gpus-per-node 4 --time 10
      mgpu-slurm scaling train.py:train --nodes 1,2,4 --scale batch_size batch_size=256
    """
    from mgpu_slurm.request.parallelism import Parallelism
    from mgpu_slurm.request.resources import RESOURCE_FLAGS
    from mgpu_slurm.request.spec import Measurement, RestartPolicy
    from mgpu_slurm.submission import scaling_runs
    from mgpu_slurm.submission.plan import Request

    if command:
        raise UserError(f"scaling measures a job function, not the command {command[0]!r}: name a function")
    target, values = _target_and_values(words, config_file, or_else="")
    flags = resource_values({name: options.pop(name) for name in RESOURCE_FLAGS if name in options}, extra)
    parallelism, measurement = Parallelism.taken_from(options), Measurement(steps, warm_up)
    # a run that was requeued would measure anew
    restart = RestartPolicy(max_requeues=0)
    request = Request(
        target, (), values, flags, restart=restart, parallelism=parallelism, measurement=measurement, **options
    )
    runs = scaling_runs.planned(request, scaling_runs.sizes_from(sizes), scale, print_note)
    is_interrupted = False
    try:
        scaling_runs.run_all(runs, print_note)
    except KeyboardInterrupt:
        is_interrupted = True
        for name in scaling_runs.cancel(runs):
            print_note(f"cancelled {name}")
    is_complete = _show_scaling(runs, warm_up, scale, as_json)
    if is_interrupted or not is_complete:
        sys.exit(INTERRUPTED if is_interrupted else 1)


def _show_scaling(runs: Sequence[Any], warm_up: int, scale: str | None, as_json: bool) -> bool:
    """Print what runs have measured; return whether all of them have."""
    from mgpu_slurm.reports import scaling as reports

    submitted = [run.plan for run in runs if run.folder is not None]
    if not submitted:
        # the same mistake in all sizes, which is not a result
        raise runs[0].error or KeyboardInterrupt
    found = reports.Scaling(submitted[0].spec.target.label, warm_up, scale, reports.sizes_of(runs))
    if as_json:
        print_json(found.to_json())
    else:
        print_lines(found.lines())
    return found.is_complete
