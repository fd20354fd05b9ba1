"""Look after runs: `status`, `logs`, `wait`, `cancel`, `clean` and `shell`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import click

from mgpu_slurm.cli.options import json_flag, names_with_trials, run_names
from mgpu_slurm.cli.output import (
    STILL_ALIVE,
    fail,
    follow_run,
    print_ending,
    print_json,
    print_lines,
    print_note,
    terminal_size,
)
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted, program

if TYPE_CHECKING:
    from mgpu_slurm.reports.live.log_view import LogView
    from mgpu_slurm.run_folder.layout import RunFolder


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN ...]", shell_complete=run_names)
@click.option("--watch", is_flag=True, help="Refresh until all runs have ended.")
@click.option("--sort", metavar="KEY", help="Sort by a column, metric or config value; -KEY: largest first.")
@click.option("--filter", "filters", multiple=True, metavar="CONDITION", help="Only some runs, as above; repeatable.")
@json_flag
def status(names: tuple[str, ...], watch: bool, sort: str | None, filters: tuple[str, ...], as_json: bool) -> None:
    """List runs with their state, newest first.

    One line per run, group or sweep. Of a group that you name, each of its runs; of a sweep, its trials and workers.

    A CONDITION compares a column, metric or config value, or is a part of a run's name or reason:

    \b
      mgpu-slurm status --filter state:running --sort left
      mgpu-slurm status --filter 'lr<0.01 resnet' --sort -accuracy
    """
    from mgpu_slurm.registry import current_state, lookup
    from mgpu_slurm.reports.live import status as statuses

    asked = [lookup.find(name) for name in names]
    if watch:
        if as_json:
            raise UserError("--watch and --json cannot be combined: call `status --json` again, or `wait`")
        from mgpu_slurm.reports.live.status_screen import show

        show(asked, print_note, filters, sort)
        return
    found = current_state.current(asked, print_note) if names else lookup.all_states(print_note)
    if as_json:
        shown, choice = statuses.as_one(found, asked), statuses.choice_among(found, filters, sort)
        choice.check(shown)
        print_json([statuses.facts(state) for state in choice.of(shown)])
    else:
        print_lines(statuses.lines(found, asked, terminal_size(), filters, sort))


@click.command()
@click.argument("name", metavar="RUN|TRIAL", shell_complete=names_with_trials)
@click.option("--rank", metavar="RANKS", help="Which ranks' logs: 3, 0,4-7 or all.  [default: 0; with --grep, all]")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each rank.")
@click.option("--grep", metavar="REGEX", help="Only lines that match a regular expression.")
@click.option("--follow", is_flag=True, help="Keep printing new output until the run ends.")
@click.option("--launch", is_flag=True, help="Print the log of the batch script or supervisor instead.")
def logs(name: str, rank: str | None, tail: int | None, grep: str | None, follow: bool, launch: bool) -> None:
    """Print a rank's output, over all attempts.

    Lines of several ranks begin with the rank. With --follow, until the run ends; for a group, when its runs start and
    end. A trial of a sweep is named SWEEP/trials/NUMBER.
    """
    from mgpu_slurm import api
    from mgpu_slurm.registry import lookup
    from mgpu_slurm.reports.live import log_view

    pattern = None if grep is None else log_view.pattern_of(grep)
    if launch:
        if rank is not None or follow:
            raise UserError("--launch shows one log as it is now: leave out --rank and --follow")
        view = log_view.LogView(tail=tail, pattern=pattern)
        if not _print_texts(log_view.of_files(lookup.launch_logs(lookup.find(name)), view)):
            print_note(f"nothing in the launch logs of run {name}" + ("" if grep is None else f" matches {grep!r}"))
        return
    choice = rank or ("0" if grep is None else "all")
    if (trial := lookup.single_trial(name)) is not None:
        if follow:
            raise UserError(f"--follow is for runs: follow the sweep with `logs {trial.group.run} --follow`")
        _print_log(trial, log_view.LogView(log_view.ranks_of(choice, trial), tail, pattern), f"trial {trial.run}")
        return
    handle = api.find(name) if follow else api.find_run(name)
    if isinstance(handle, api.Group):
        if (rank, tail, grep) != (None, None, None):
            raise UserError(f"{handle.name} has several runs: --rank, --tail and --grep are for the logs of one")
        follow_run(handle)
        return
    view = log_view.LogView(log_view.ranks_of(choice, handle.files), tail, pattern)
    if follow:
        follow_run(handle, view)
        return
    has_printed = _print_log(handle.files, view, f"run {handle.name}", f"; the run is {handle.state}")
    if not has_printed and grep is None and any(path.stat().st_size for path in lookup.launch_logs(handle.files)):
        print_note(f"its launcher has printed something: {program()} logs {handle.name} --launch")


def _print_log(folder: RunFolder, view: LogView, whose: str, state: str = "") -> bool:
    """Print the logs of ranks and their warnings; return whether the ranks have printed anything."""
    from mgpu_slurm.reports.live import log_view

    has_printed = _print_texts(log_view.shown(folder, view)) or view.tail == 0
    if not has_printed:
        what = "nothing" if view.pattern is None else f"no line that matches {view.pattern.pattern!r}"
        who, verb = (f"rank {view.ranks[0]}", "has") if len(view.ranks) == 1 else (f"{len(view.ranks)} ranks", "have")
        print_note(f"{who} of {whose} {verb} printed {what}{state}")
    _print_warnings(folder, without=view.ranks)
    return has_printed


def _print_texts(texts: Iterable[str]) -> bool:
    """Print pieces of text; return whether there was any."""
    is_empty = True
    for text in texts:
        print(text, end="")
        is_empty = is_empty and not text
    return not is_empty


def _print_warnings(folder: RunFolder, without: Collection[int]) -> None:
    """Print the warnings of other ranks to standard error: standard output stays what the ranks have printed."""
    from mgpu_slurm.run_folder import rank_warnings, records

    newest = rank_warnings.of_attempt(folder, records.attempts_started(folder))
    for line in rank_warnings.lines(each for each in newest if each.rank not in without):
        print(f"-- warning: {line}", file=sys.stderr)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN ...", shell_complete=run_names)
@click.option("--timeout", type=float, metavar="SECONDS", help="Stop waiting after this many seconds.")
@json_flag
def wait(names: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Block until runs have ended.

    Exit code 1 unless all of them completed, 124 if --timeout came first.
    """
    from mgpu_slurm import api
    from mgpu_slurm.registry import current_state
    from mgpu_slurm.reports.live import status as statuses
    from mgpu_slurm.run_folder import states

    found = [api.find(name) for name in names]
    give_up = None if timeout is None else time.monotonic() + timeout
    try:
        ended = [each.wait(None if give_up is None else give_up - time.monotonic(), print_note) for each in found]
    except TimeoutError:
        ended = [each.state for each in found]
        alive = [each.name for each, state in zip(found, ended, strict=True) if states.is_alive(state)]
        if alive:
            fail(f"timed out after {timeout:g} s; still running: {', '.join(alive)}", STILL_ALIVE)
    if as_json:
        pairs = [pair for each in found for pair in current_state.current([each.files])]
        print_json([statuses.facts(state) for state in statuses.as_one(pairs, [each.files for each in found])])
    else:
        for each in found:
            print_ending(each)
    if any(state != "COMPLETED" for state in ended):
        sys.exit(1)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN ...", shell_complete=run_names)
def cancel(names: tuple[str, ...]) -> None:
    """Checkpoint and stop runs."""
    from mgpu_slurm import api
    from mgpu_slurm.request.spec import read_spec
    from mgpu_slurm.run_folder import records

    for found in [api.find(name) for name in names]:
        # as recorded: SLURM is asked by the cancel itself, once
        has_started = any(state.attempts for _, state in records.read_states(found.files))
        if found.cancel():
            asked = "asked to end" if read_spec(found.files).target.is_command else "asked to save and end"
            asked = asked if has_started else "cancelled"
            print(f"{found.name}: {asked}; continue later with `{program()} resume {found.name}`")
        else:
            print(f"{found.name}: already ended ({found.state})")


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN ...]", shell_complete=run_names)
@click.option("--checkpoints", is_flag=True, help="Delete only the checkpoints of the named runs.")
@click.option("--yes", is_flag=True, help="Skip the confirmation prompt.")
def clean(names: tuple[str, ...], checkpoints: bool, yes: bool) -> None:
    """Show disk usage of runs; delete the ones you name."""
    from mgpu_slurm import api
    from mgpu_slurm.registry.cleanup import usage_table

    chosen = [api.find(name) for name in names] or api.submitted()
    for name, handle in zip(names, chosen, strict=False):
        handle.check_deletable()
        if yes and (name.startswith("@") or (handle.name.startswith(name) and handle.name != name)):
            raise UserError(f"--yes needs the full name: {handle.name}")
    if not chosen:
        print("no runs, nothing to clean")
        return
    print_lines([usage_table([handle.files for handle in chosen])])
    if not names:
        print(f"\nnothing was deleted; name runs to delete them: {program()} clean RUN ...")
        return
    what = "the checkpoints of " if checkpoints else ""
    if not yes and not click.confirm(f"delete {what}{counted(len(chosen), 'run')}?"):
        return
    for handle in chosen:
        handle.delete(only_checkpoints=checkpoints)
        print(f"deleted {what}{handle.name}")


@click.command()
@click.argument("name", metavar="RUN [-- COMMAND ...]", shell_complete=run_names)
@click.option("--node", metavar="NAME", help="One of the run's nodes.  [default: its first]")
@click.pass_obj
def shell(command: tuple[str, ...], /, name: str, node: str | None) -> None:
    """Open a shell on one of a run's nodes.

    Or run one command there, such as nvidia-smi, py-spy or df.
    """
    from mgpu_slurm import api
    from mgpu_slurm.registry import reach
    from mgpu_slurm.slurm import commands

    handle = api.find_run(name)
    words = reach.words(handle.files, handle.current, node, command, terminal=sys.stdin.isatty())
    os.chdir(reach.place(handle.files))
    os.execvpe(words[0], words, commands.scrubbed_environment(os.environ))
