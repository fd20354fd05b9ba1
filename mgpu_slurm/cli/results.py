"""Show what runs came to: `why`, `diff`, `efficiency`, `profile` and `export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mgpu_slurm.cli.options import json_flag, names_with_trials, run_names
from mgpu_slurm.cli.output import print_json, print_lines, print_note, terminal_size
from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.core.formatting import counted, human_size, program


@click.command()
@click.argument("name", metavar="RUN", shell_complete=run_names)
@json_flag
def why(name: str, as_json: bool) -> None:
    """Explain why a run failed or waits, and what helps.

    For a group or a sweep: each run or worker that did not complete.
    """
    from mgpu_slurm.registry import current_state, lookup, sweep_state
    from mgpu_slurm.reports import diagnosis as reasons

    folder = lookup.find(name)
    runs = list(current_state.current([folder]))
    is_single = len(runs) == 1 and not sweep_state.is_sweep(folder)
    asked = runs if is_single else [(run, state) for run, state in runs if state.state != "COMPLETED"]
    if as_json:
        print_json([reasons.facts(run, state) for run, state in asked])
        return
    if not asked:
        print_lines([*reasons.lines_of_complete(folder, [state for _, state in runs])])
    for number, (run, state) in enumerate(asked):
        print_lines([*([""] if number else []), *reasons.lines(run, state)])


@click.command()
@click.argument("first", metavar="RUN", shell_complete=run_names)
@click.argument("second", metavar="RUN", shell_complete=run_names)
@click.option("--code", "as_patch", is_flag=True, help="Print a unified diff of their code instead.")
@json_flag
def diff(first: str, second: str, as_patch: bool, as_json: bool) -> None:
    """Show what differs between two runs: config, request, code, environment and result."""
    from mgpu_slurm.registry import lookup
    from mgpu_slurm.reports import run_diff

    folders = lookup.find(first), lookup.find(second)
    if as_patch:
        if as_json:
            raise UserError("--code and --json cannot be combined: --json has the number of changed lines")
        print_lines([*run_diff.patch(*folders)] or ["no difference"])
        return
    found = run_diff.compare(*folders)
    if as_json:
        print_json(found.to_json())
    else:
        room = terminal_size()
        print_lines(run_diff.lines(found, room and room.columns))


@click.command()
@click.argument("name", metavar="RUN", shell_complete=run_names)
@click.option("--attempt", type=int, metavar="N", help="[default: the last one with recorded steps]")
@json_flag
def profile(name: str, attempt: int | None, as_json: bool) -> None:
    """Show where the time of recorded steps went.

    For each rank: computation, communication, and idle time; and the operators that take the most. Record steps with
    `submit --profile 10-13`.
    """
    from mgpu_slurm.registry import lookup
    from mgpu_slurm.reports import profile_summary

    found = profile_summary.profile_of(lookup.find(name), attempt)
    if as_json:
        print_json(found.to_json())
        return
    print_lines(found.lines())


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN|GROUP|SWEEP ...]", shell_complete=run_names)
@json_flag
def efficiency(names: tuple[str, ...], as_json: bool) -> None:
    """Show what runs used of what they asked for.

    Where their time went: training, starting, saving, and work that was repeated after a restart or came to nothing;
    what they used of cores, memory and GPUs; and the flags to ask for next time. It needs no accounting of SLURM, but
    asks it once about each run that has ended. Default: the newest 20 runs, groups and sweeps.
    """
    from mgpu_slurm.reports.usage import efficiency as uses
    from mgpu_slurm.reports.usage import efficiency_table

    found = uses.gather(uses.chosen(names, print_note), asks=True)
    if as_json:
        print_json(found.to_json())
        return
    room = terminal_size()
    print_lines(efficiency_table.lines(found, room and room.columns))


@click.command()
@click.argument("name", metavar="RUN|GROUP|SWEEP|TRIAL", shell_complete=names_with_trials)
@click.option(
    "--to",
    "form",
    metavar="FORM",
    help="safetensors, onnx, csv, parquet, mlflow[=URI] or wandb[=PROJECT].  [default: by the name of FILE]",
)
@click.option(
    "--checkpoint",
    metavar="newest|best|STEP",
    help="With safetensors and onnx: which checkpoint.  [default: newest; onnx: best]",
)
@click.option(
    "--object",
    "which",
    metavar="NAME",
    help="With safetensors and onnx: its name in run.restore.  [default: the only nn.Module]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="- for standard output.  [default: NAME.csv or .parquet]",
)
@json_flag
def export(
    name: str, form: str | None, checkpoint: str | None, which: str | None, output: Path | None, as_json: bool
) -> None:
    """Write a run's weights to a file, or what runs have reported to a table or a tracker.

    The file of weights has the model's own names, whichever ranks saved the checkpoint, and whatever the model was
    wrapped in. A table has a row for each report; a tracker gets the reports that it does not have yet. A TRIAL is
    SWEEP/trials/NUMBER.

    \b
      mgpu-slurm export RUN -o model.safetensors
      mgpu-slurm export SWEEP --to csv
      mgpu-slurm export GROUP --to mlflow=sqlite:///mlflow.db
    """
    from mgpu_slurm.trackers.destinations import TRACKERS
    from mgpu_slurm.trackers.tables import TABLES

    form = form or _form_of(output)
    if form == "safetensors":
        _export_weights(name, checkpoint or "newest", which, output, as_json)
        return
    if form == "onnx":
        _export_onnx(name, checkpoint, which, output, as_json)
        return
    for option, value in (("--checkpoint", checkpoint), ("--object", which)):
        if value is not None:
            raise UserError(f"{option} {value}: it only applies to weights: remove it, or use --to safetensors or onnx")
    if form in TABLES:
        _export_table(name, form, output, as_json)
    elif form.partition("=")[0] in TRACKERS:
        if output is not None:
            raise UserError(f"-o {output}: --to {form} writes no file: remove -o")
        _export_to_tracker(name, form, as_json)
    else:
        known = ["safetensors", "onnx", *TABLES, *TRACKERS]
        raise UserError(f"--to {form}: there is no such form{nearest(form, known)}")


def _form_of(output: Path | None) -> str:
    """Return the form that a file's name stands for."""
    from mgpu_slurm.trackers.tables import TABLES

    forms = ("safetensors", "onnx", *TABLES)
    if output is None:
        raise UserError("export: name a file with -o, such as -o model.safetensors, or a form with --to, such as csv")
    form = output.suffix.removeprefix(".")
    if form not in forms:
        endings = ", ".join(f".{each}" for each in forms)
        raise UserError(f"-o {output}: the ending tells what to write ({endings}): use one of them, or --to")
    return form


def _export_weights(name: str, checkpoint: str, which: str | None, output: Path | None, as_json: bool) -> None:
    from dataclasses import asdict

    from mgpu_slurm import api
    from mgpu_slurm.checkpoints import export as exports
    from mgpu_slurm.registry import lookup

    if output is None:
        raise UserError("export: name the file for the weights with -o, such as -o model.safetensors")
    folder = lookup.single_trial(name) or api.find_run(name).files
    found = exports.export(folder, checkpoint, which, output)
    if as_json:
        print_json({"file": str(output.absolute()), **asdict(found)})
        return
    print(f"written   {output}: {found.object}, {counted(found.tensors, 'tensor')}, {human_size(found.bytes)}")
    print(f"          of {found.checkpoint}")


def _export_onnx(name: str, checkpoint: str | None, which: str | None, output: Path | None, as_json: bool) -> None:
    from mgpu_slurm import api
    from mgpu_slurm.registry import lookup
    from mgpu_slurm.submission import onnx_export

    if output is None:
        raise UserError("export: name the file for the model with -o, such as -o model.onnx")
    if lookup.trial(name) is not None:
        raise UserError(f"{name}: --to onnx takes no trial: train its config as a run first, as `best` says")
    found = onnx_export.export(api.find_run(name).files, checkpoint, which, output)
    if as_json:
        print_json({"file": str(output.absolute()), **found})
        return
    shapes = ", ".join("x".join(map(str, shape)) for shape in found["inputs"])
    only = " and no other number of samples" if found["is_fixed"] else ""
    print(f"written   {output}: {found['object']}, {human_size(found['bytes'])}, inputs as {shapes}{only}")
    print(f"          of {found['checkpoint']}; ONNX Runtime computes the same within {found['difference']:.1g}")


def _own_runs(name: str) -> list[Any]:
    """Return the folders of the runs of this project that a name stands for: of a sweep, its trials."""
    from mgpu_slurm.reports.aggregation import run_sources

    found = run_sources.runs_of(run_sources.sources([name]))
    if not all(source.own for source in found):
        raise UserError(f"{name}: only runs of {program()} can be exported, not event files of other programs")
    return [source.own for source in found]


def _export_table(name: str, form: str, output: Path | None, as_json: bool) -> None:
    from mgpu_slurm.trackers import tables

    output = output or Path(f"{name.strip('/').replace('/', '-')}.{form}")
    if str(output) == "-":
        if form != tables.CSV or as_json:
            raise UserError("-o -: only CSV goes to standard output: name a file, or use --to csv without --json")
        tables.print_csv(_own_runs(name), sys.stdout)
        return
    written = tables.write(_own_runs(name), form, output)
    rows = sum(len(each.reports) for each in written)
    if as_json:
        print_json({"file": str(output.absolute()), "runs": [each.run for each in written], "rows": rows})
        return
    print(f"written   {output}: {counted(rows, 'report')} of {counted(len(written), 'run')}")


def _export_to_tracker(name: str, form: str, as_json: bool) -> None:
    from mgpu_slurm.registry import current_state
    from mgpu_slurm.run_folder import states
    from mgpu_slurm.trackers import past_runs

    runs = _own_runs(name)
    if not runs:
        raise UserError(f"{name}: no trial has begun: there is nothing to send")
    alive = {
        folder
        for folder, state in current_state.current(dict.fromkeys(run.group for run in runs))
        if states.is_alive(state.state)
    }
    groups = {folder.group for folder in alive}
    # a trial may continue as long as any worker of its sweep runs
    ended = [run not in alive if run.task is not None or run.group == run else run.group not in groups for run in runs]
    found = []
    for each in past_runs.send(list(zip(runs, ended, strict=True)), form, Path.cwd()):
        found.append(each)
        if not as_json:
            print(each.line, flush=True)
    if as_json:
        print_json([each.to_json() for each in found])
    if any(each.sent.problem for each in found):
        sys.exit(1)
