"""Search for parameters: `sweep`, `best` and `repair`."""

from __future__ import annotations

from pathlib import Path

import click

from mgpu_slurm.cli.options import code_flag, json_flag
from mgpu_slurm.cli.output import follow_to_the_end, print_ending, print_json, print_lines, print_note
from mgpu_slurm.core.formatting import program


@click.command()
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
    """Run the hyperparameter search described in FILE.

    Workers, a job array on SLURM, take one trial after another from one study. Called again with the same FILE, it adds
    the new trials, workers or budget; the study keeps its code unless --code new is given. key=value changes FILE's
    values: trials=100, budget.hours=4.
    """
    from mgpu_slurm import api
    from mgpu_slurm.executors.selection import EXECUTORS
    from mgpu_slurm.request import config as configs
    from mgpu_slurm.sweeps import launch

    options = launch.Options(executor, cluster, dry_run, around, new_code=code == "new")
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
@click.argument("name", metavar="STUDY")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print its full config as YAML for `submit --config`.")
@json_flag
def best(name: str, as_yaml: bool, as_json: bool) -> None:
    """Show the best trial of a sweep, and how to train it again."""
    from dataclasses import asdict

    from mgpu_slurm.registry import lookup
    from mgpu_slurm.request import config as configs
    from mgpu_slurm.sweeps.study import best_trial

    found = best_trial.best(lookup.find(name))
    if as_json:
        print_json(asdict(found))
    elif as_yaml:
        print(configs.dump_yaml(found.config), end="")
    else:
        print_lines(found.lines())


@click.command()
@click.argument("name", metavar="STUDY")
def repair(name: str) -> None:
    """Recover a sweep's damaged journal into a new file next to it."""
    from mgpu_slurm.registry import lookup
    from mgpu_slurm.sweeps.study import journal_repair

    print_lines(journal_repair.repair(lookup.find(name)))
