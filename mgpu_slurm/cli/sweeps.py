"""Search for parameters: `sweep`, `best`, `trials`, `importance` and `repair`."""

from __future__ import annotations

from pathlib import Path

import click

from mgpu_slurm.cli.options import code_flag, json_flag, sink_flag, study_names
from mgpu_slurm.cli.output import follow_to_the_end, print_ending, print_json, print_lines, print_note, terminal_size
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import program


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[key=value ...]")
@click.option("--executor", default="auto", metavar="NAME", help="As for submit.  [default: auto]")
@click.option("--cluster", metavar="NAME", help="One of the clusters in mgpu.yaml.")
@click.option(
    "--around",
    metavar="STUDY",
    shell_complete=study_names,
    help="Search a grid around the best trials of an earlier study.",
)
@code_flag
@sink_flag
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
    sinks: tuple[str, ...],
    follow: bool | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the hyperparameter search described in FILE.

    Workers, a job array on SLURM, take one trial after another from one study. Called again with the same FILE, it adds
    the new trials, workers or budget; the study keeps its code unless --code new is given. key=value changes FILE's
    values: trials=100, budget.hours=4.
    """
    from mgpu_slurm import api
    from mgpu_slurm.executors.selection import EXECUTORS
    from mgpu_slurm.request import config as configs
    from mgpu_slurm.sweeps import launch

    options = launch.Options(executor, cluster, dry_run, around, new_code=code == "new", sinks=sinks)
    started = launch.start(configs.read_yaml(file), configs.parse_overrides(words), str(file), options, print_note)
    name, place = started.folder.run, str(started.folder.path)
    if as_json:
        facts = {"run": name, "folder": str(started.folder.path), "job_id": started.job_id}
        print_json(facts | {"executor": started.executor})
        if not follow:
            return
    else:
        print_lines(started.lines)
    if dry_run:
        return
    if not started.is_alive:
        if not as_json:
            print_ending(api.find(place))
        return
    if not EXECUTORS[started.executor].is_queued if follow is None else follow:
        follow_to_the_end(place, quiet=as_json, without=started.ended)
    elif not as_json:
        print_lines([f"job       {started.job_id}"] if started.job_id is not None else [])
        print(f"watch it: {program()} status {name} --watch")


@click.command()
@click.argument("name", metavar="STUDY", shell_complete=study_names)
@click.option("--yaml", "as_yaml", is_flag=True, help="Print its full config as YAML for `submit --config`.")
@click.option("--top", type=click.IntRange(min=1), metavar="K", help="List the best K complete trials.")
@click.option("--trial", type=click.IntRange(min=0), metavar="N", help="Show trial N instead.")
@json_flag
def best(name: str, as_yaml: bool, top: int | None, trial: int | None, as_json: bool) -> None:
    """Show the best trial of a sweep, and how to train it again.

    With several metrics, list the Pareto front: the trials that no other trial beats in all of them. If the best trials
    are trained again (`confirm:`), show which differences are real.
    """
    from dataclasses import asdict

    from mgpu_slurm.registry import lookup
    from mgpu_slurm.request import config as configs
    from mgpu_slurm.sweeps.analysis import best_trial

    if top is not None:
        if as_yaml or trial is not None:
            raise UserError(f"--top: {'--yaml' if as_yaml else '--trial'} is about one trial: remove one of them")
        _list_trials(name, top, as_json=as_json)
        return
    folder = lookup.find(name)
    front = None if trial is not None else best_trial.front(folder)
    if front is not None and as_yaml:
        if len(front.trials) > 1:
            raise UserError(f"--yaml: study {name} has {len(front.trials)} best trials: add --trial N")
    elif front is not None:
        if as_json:
            print_json(front.to_json())
        else:
            print_lines(front.lines())
        return
    found = best_trial.best(folder, trial)
    if as_yaml:
        print(configs.dump_yaml(found.config), end="")
        return
    confirmation = None if trial is not None else best_trial.confirmation(folder)
    if as_json:
        told = {} if confirmation is None else {"confirmation": confirmation.to_json()}
        print_json(asdict(found) | {"schedule": [part.to_json() for part in found.schedule]} | told)
    else:
        print_lines([*found.lines(), *(["", *confirmation.lines()] if confirmation is not None else [])])


@click.command()
@click.argument("name", metavar="STUDY", shell_complete=study_names)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with a column for each parameter and rung.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write to FILE: CSV if its name ends in .csv, else JSON.",
)
@json_flag
def trials(name: str, as_csv: bool, output: Path | None, as_json: bool) -> None:
    """List all trials of a sweep."""
    if as_csv and as_json:
        raise UserError("--csv and --json: choose one of them")
    _list_trials(name, as_json=as_json, as_csv=as_csv, output=output)


def _list_trials(
    name: str, top: int | None = None, as_json: bool = False, as_csv: bool = False, output: Path | None = None
) -> None:
    """Print the trials of a sweep, or the best of them, or write them to a file."""
    import json

    from mgpu_slurm.core.files import without_nan, write_whole
    from mgpu_slurm.sweeps import warm_start
    from mgpu_slurm.sweeps.analysis import trial_table

    if output is not None and not trial_table.may_be_replaced(output):
        raise UserError(f"-o {output}: the file exists and is no table of trials: delete it, or name another")
    folder, sweep, study = warm_start.find(name)
    found = trial_table.rows(study, sweep, folder, top)
    if as_csv or (output is not None and output.suffix == ".csv" and not as_json):
        text = trial_table.as_csv(found)
    elif as_json or output is not None:
        text = json.dumps(without_nan(trial_table.as_json(found)), indent=2) + "\n"
    else:
        room = terminal_size()
        text = "\n".join(trial_table.lines(found, sweep, room and room.columns)) + "\n"
    if output is None:
        print(text, end="", flush=True)
    else:
        write_whole(output, text)
        print(f"written   {output}: {len(found)} trials")


@click.command()
@click.argument("name", metavar="STUDY", shell_complete=study_names)
@json_flag
def importance(name: str, as_json: bool) -> None:
    """Show which parameters of a sweep matter, and what to change in its next one."""
    from dataclasses import asdict

    from mgpu_slurm.sweeps import warm_start
    from mgpu_slurm.sweeps.analysis import hints
    from mgpu_slurm.sweeps.analysis import importance as importances

    _, sweep, study = warm_start.find(name)
    found = importances.importance(study, sweep)
    advice = hints.hints(study, sweep)
    if as_json:
        print_json(asdict(found) | {"hints": advice})
        return
    print_lines([*found.lines(), *([""] if advice else []), *advice])


@click.command()
@click.argument("name", metavar="STUDY", shell_complete=study_names)
def repair(name: str) -> None:
    """Recover a sweep's damaged journal into a new file next to it."""
    from mgpu_slurm.registry import lookup
    from mgpu_slurm.sweeps.study import journal_repair

    print_lines(journal_repair.repair(lookup.find(name)))
