"""Prepare a project, its shell and its cluster: `init`, `completion` and `doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mgpu_slurm.cli.options import container_flags, json_flag, resource_flags_of_a_node, resource_values
from mgpu_slurm.cli.output import INTERRUPTED, PROGRAM, print_json, print_lines, print_note, terminal_size
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import program

if TYPE_CHECKING:
    from mgpu_slurm.request.resources import Flags

ALL_NODES = "all"

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


def _nodes_or_all(_context: click.Context, _option: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == ALL_NODES:
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor {ALL_NODES}") from None


@click.command()
@click.option("--submit", "submits", is_flag=True, help="Also test the nodes, with a ten-minute job on two of them.")
@click.option(
    "--nodes", callback=_nodes_or_all, metavar="N|all", help="Nodes of that job; all checks each node of the partition."
)
@resource_flags_of_a_node
@click.option("--executor", default="auto", metavar="NAME", help="As for submit.  [default: auto]")
@click.option("--cluster", metavar="NAME", help="One of the clusters in mgpu.yaml.")
@container_flags
@json_flag
def doctor(
    submits: bool,
    executor: str,
    cluster: str | None,
    container: str | None,
    mounts: tuple[str, ...],
    as_json: bool,
    extra: tuple[str, ...],
    **flags: Any,
) -> None:
    """Check this machine and its cluster.

    With --submit, also check the nodes and the network between them, by a job on two nodes. With --nodes all, check
    each node of a partition instead, by a job array with a task for each, and name slow and broken ones.

    A container is started on this machine, and with --submit on the nodes too.

    All flags except --json and those of the container apply to these jobs. Exit code 1 if a check failed or a node is
    broken.
    """
    from mgpu_slurm import doctor as doctors
    from mgpu_slurm.doctor import container_checks, job_checks
    from mgpu_slurm.doctor.check_results import Finding, has_failed
    from mgpu_slurm.submission.plan import Request

    resources = resource_values(flags, extra)
    if flags["nodes"] == ALL_NODES:
        if submits:
            raise UserError("--nodes all submits a job array itself: leave --submit out")
        if container is not None:
            raise UserError("--nodes all checks the nodes themselves: leave --container out")
        return _check_nodes(resources, executor, cluster, as_json)
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
    if not any(map(doctors.is_silence, found)):
        request = Request(flags=resources, executor=executor, cluster=cluster, container=container, mounts=mounts)
        here = len(found)
        show(container_checks.container_findings(request, Path.cwd(), print_note))
        # a container that fails here refuses the job with the same words
        if submits and not has_failed(found[here:]):
            show(job_checks.findings_of_job(request, print_note))
    if as_json:
        print_json([finding.plain for finding in found])
    if has_failed(found):
        sys.exit(1)


def _check_nodes(resources: Flags, executor: str, cluster: str | None, as_json: bool) -> None:
    from mgpu_slurm.doctor import node_survey, node_table
    from mgpu_slurm.doctor.node_reports import exclude

    checked = node_survey.check_nodes(resources, executor, cluster, print_note)
    if as_json:
        print_json({"nodes": [each.to_json() for each in checked.reports], "exclude": exclude(checked.reports)})
    else:
        terminal = terminal_size()
        print_lines(node_table.lines(checked.reports, terminal.columns if terminal else sys.maxsize))
    if checked.is_interrupted:
        sys.exit(INTERRUPTED)
    if checked.has_failed:
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
