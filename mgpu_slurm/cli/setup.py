"""Prepare a project, its shell and its cluster: `init`, `completion` and `doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from mgpu_slurm.cli.options import json_flag, resource_flags, resource_values
from mgpu_slurm.cli.output import PROGRAM, print_json, print_lines, print_note, terminal_size
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import program

COMPLETION_VARIABLE = "_MGPU_SLURM_COMPLETE"
"""Variable by which click's scripts ask for completions."""


@click.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path, file_okay=False))
def init(folder: Path) -> None:
    """Write a starter project: a job, a sweep, and a commented cluster file."""
    from mgpu_slurm.submission import starter_project as starter

    for path in starter.write(folder):
        print(f"wrote {path}")
    where = "" if folder == Path() else f"cd {folder} && "
    print(f"try it: {where}{program()} submit --nodes 2")
    print(f"then:   {program()} sweep sweep.yaml")


@click.command()
@click.option("--submit", "submits", is_flag=True, help="Also test the nodes, with a ten-minute job on two of them.")
@resource_flags
@click.option("--executor", default="auto", metavar="NAME", help="As for submit.  [default: auto]")
@click.option("--cluster", metavar="NAME", help="One of the clusters in mgpu.yaml.")
@json_flag
def doctor(
    submits: bool, executor: str, cluster: str | None, as_json: bool, extra: tuple[str, ...], **flags: Any
) -> None:
    """Check this machine and its cluster.

    With --submit, also check the nodes and the network between them, by a job on two nodes.

    All flags except --json apply to the --submit job. Exit code 1 if a check failed.
    """
    from mgpu_slurm import doctor as doctors
    from mgpu_slurm.doctor import job_checks
    from mgpu_slurm.doctor.check_results import Finding, has_failed

    resources = resource_values(flags, extra)
    given = [f"--{name}" for name, value in resources.items() if value is not None]
    if given and not submits:
        raise UserError(f"{given[0]} only applies with --submit")
    found: list[Finding] = []
    terminal = terminal_size()
    width = terminal.columns if terminal else sys.maxsize

    def show(findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            if not as_json:
                print_lines(finding.lines(width))

    show(doctors.look_here(Path.cwd(), print_note, will_be_proven=submits))
    if submits and not any(map(doctors.is_silence, found)):
        show(job_checks.findings_of_job(resources, executor, cluster, print_note))
    if as_json:
        print_json([finding.plain for finding in found])
    if has_failed(found):
        sys.exit(1)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands, options and the names of runs.

    \b
      eval "$(mgpu-slurm completion bash)"                          # in ~/.bashrc
      eval "$(mgpu-slurm completion zsh)"                           # in ~/.zshrc, after compinit
      mgpu-slurm completion fish > ~/.config/fish/completions/mgpu-slurm.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    if shell == "bash":
        # otherwise bash takes @last for two words
        print("COMP_WORDBREAKS=${COMP_WORDBREAKS//@/}")
    source = made(context.find_root().command, {}, PROGRAM, COMPLETION_VARIABLE).source()
    # files where nothing else is known, such as those of a command
    print(source.replace("complete -o nosort ", "complete -o nosort -o default "))
