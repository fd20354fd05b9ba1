"""Show runs as a page or as curves: `report`, `aggregate` and `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mgpu_slurm.cli.options import json_flag, names_with_trials
from mgpu_slurm.cli.output import print_json, print_lines, print_note
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted, human_size, program

if TYPE_CHECKING:
    from mgpu_slurm.reports.facts.report_facts import Facts


@click.command()
@click.argument("words", nargs=-1, metavar="[RUN|GROUP|SWEEP|PATH ...]", shell_complete=names_with_trials)
@click.option("-o", "out", metavar="FILE", help="The page; - for standard output.  [default: report.html]")
@click.option("--title", metavar="TEXT", help="[default: the names]")
@click.option("--metric", metavar="NAME", help="The metric that comes first.  [default: the sweep's]")
@click.option("--minimize/--maximize", default=None, help="Which values of it are better.  [default: by its name]")
@click.option(
    "--svg", "folder", type=click.Path(path_type=Path), metavar="FOLDER", help="Write each chart as a file, too."
)
@click.option("--no-points", is_flag=True, help="Leave the points of curves out: a small page without controls.")
@click.option(
    "--refresh", type=click.IntRange(1), metavar="SECONDS", help="Write it again and again until all has ended."
)
@click.option("--open", "opens", is_flag=True, help="Show it in a browser.")
@json_flag
def report(
    words: tuple[str, ...],
    out: str | None,
    title: str | None,
    metric: str | None,
    minimize: bool | None,
    folder: Path | None,
    no_points: bool,
    refresh: int | None,
    opens: bool,
    as_json: bool,
) -> None:
    """Make a page of runs: one HTML file without network.

    Results, curves, what sweeps have found, what ended each attempt, where the time went, and what was asked for and
    used. Default: the newest 20 runs, groups and sweeps.

    \b
      mgpu-slurm report                              # report.html
      mgpu-slurm report SWEEP -o sweep.html --svg figures
      mgpu-slurm report GROUP --refresh 30 --open    # a live page
      mgpu-slurm report GROUP --json                 # its facts, and no page
    """
    from mgpu_slurm.reports.facts.gather import ReportOptions, gather
    from mgpu_slurm.reports.page import make_report

    direction = None if minimize is None else "minimize" if minimize else "maximize"
    options = ReportOptions(title, metric, direction)
    if as_json:
        if folder is not None or refresh or opens or out is not None:
            raise UserError("--json prints facts and makes no page: leave -o, --svg, --refresh and --open out")
        print_json(gather(words, options, print_note).to_json())
        return
    path = None if out == "-" else Path(out or "report.html")
    make_report.check_output(path, folder)
    if path is None and (refresh or opens):
        raise UserError("-o -: --refresh and --open need a file: name one")
    is_shown = False

    def say(facts: Facts, size: int) -> None:
        nonlocal is_shown
        if path is None:
            return
        if not is_shown:
            print_lines([f"written   {path}: {counted(len(facts.runs), 'run')}, {human_size(size)}"])
            for warning in facts.warnings[:5]:
                print_lines([f"note      {warning}"])
            if opens:
                click.launch(str(path))
        is_shown = True

    facts = make_report.make(words, options, path, refresh, not no_points, print_note, say)
    if folder is not None:
        names = make_report.write_charts(facts, folder)
        written = f"charts    {folder}/: {counted(len(names), 'file')}"
        print_note(written) if path is None else print_lines([written])


@click.command()
@click.argument("words", nargs=-1, metavar="[RUN|GROUP|SWEEP|PATH ...]", shell_complete=names_with_trials)
@click.option("--by", metavar="KEY[,KEY]", help="Group runs by these config values only.  [default: all but seeds]")
@click.option(
    "--on",
    type=click.Choice(["step", "progress"]),
    default="step",
    show_default=True,
    help="Align runs by step or by progress (epoch).",
)
@click.option(
    "--interval",
    type=click.Choice(["t", "bootstrap"]),
    help="Interval of means: Student's t or a bootstrap.  [default: t below 10 runs]",
)
@click.option("--compare", is_flag=True, help="Show how two groups differ, by runs with the same seed; writes nothing.")
@click.option("--together", is_flag=True, help="Average all runs of a PATH that have no config.")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER", help="[default: aggregate-NAME]")
@click.option("--parquet/--no-parquet", default=None, help="Write Parquet too.  [default: if pyarrow is installed]")
@json_flag
def aggregate(
    words: tuple[str, ...],
    by: str | None,
    on: Any,
    interval: Any,
    compare: bool,
    together: bool,
    out: Path | None,
    parquet: bool | None,
    as_json: bool,
) -> None:
    """Average the curves of several runs.

    Mean, standard deviation, min, max, median and a 95% interval of the mean, step by step, over runs that differ
    only in their seed: as CSV, Parquet and runs for TensorBoard. The table shows the last step that all runs have, the
    end of each run if they differ, and the best of each. If PATH is a folder, each folder below it with event
    files is a run, such as those of Lightning; folders inside of a run, such as Keras' train and validation, are parts
    of it. Default: the newest group or sweep.

    \b
      mgpu-slurm aggregate                        # the newest group or sweep
      mgpu-slurm aggregate GROUP GROUP --by lr    # one curve for each lr
      mgpu-slurm aggregate GROUP GROUP --compare  # which one is better?
      mgpu-slurm aggregate lightning_logs
    """
    from mgpu_slurm.reports.aggregation import aggregate as aggregates
    from mgpu_slurm.reports.aggregation import aggregate_files, aggregate_table, comparison

    aggregate_files.check(out, parquet)
    keys = [key for key in (by or "").split(",") if key]
    if by is not None and not keys:
        raise UserError("--by: expected names of config values, such as --by lr,width")
    if compare:
        if out is not None or parquet:
            raise UserError("--compare writes nothing: leave --out and --parquet out")
        compared = comparison.compare(words, on, keys, print_note)
        print_json(compared.facts) if as_json else print_lines(compared.lines())
        return
    found = aggregates.aggregate(words, on, keys, print_note, together, interval)
    out = out or aggregate_files.default_folder(found)
    written = aggregate_files.write(found, out, parquet)
    if as_json:
        print_json({"folder": str(out.absolute()), "files": written, **found.facts})
        return
    print(aggregate_table.table(found))
    for note in found.notes:
        print(f"note      {note}")
    print(f"written   {out}/: {' '.join(written)}")
    if parquet is None and not aggregate_files.has_parquet():
        print(f"          no Parquet: {aggregate_files.NO_PARQUET}")
    print(f"curves    {program()} tensorboard {out}")


@click.command()
@click.argument("words", nargs=-1, metavar="[RUN|GROUP|SWEEP|PATH ...]", shell_complete=names_with_trials)
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="[default: a free one]")
@json_flag
def tensorboard(words: tuple[str, ...], port: int | None, as_json: bool) -> None:
    """Show runs in TensorBoard, until Ctrl-C.

    Shows those you name, or the newest 20 runs and groups; runs of a group and trials of a sweep appear as they start.
    It listens on this machine only, where everyone who is logged in can reach it.
    """
    from mgpu_slurm.reports import tensorboard_server

    chosen = tensorboard_server.choose(words, print_note)

    def say(server: tensorboard_server.Server) -> None:
        if as_json:
            runs = [source.name for source in chosen.runs]
            print_json({"address": server.address, "port": server.port, "tunnel": server.tunnel, "runs": runs})
        else:
            print_lines(tensorboard_server.lines(server))

    if not as_json:
        print_lines([f"runs      {tensorboard_server.described(chosen)}", "-- starting TensorBoard"])
    tensorboard_server.serve(chosen, port, say)
