"""Define the options that several commands share, and read their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

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
"""Options of `submit`, `resume` and `doctor`, in sbatch's words."""


def resource_flags(command: Any) -> Any:
    """Add the options for nodes, GPUs and all else that sbatch reserves."""
    for flag in reversed(_RESOURCE_FLAGS):
        command = flag(command)
    return command


def again_flags(of_new_runs: bool) -> Callable[[Any], Any]:
    """Return a decorator that adds the options for restarts."""

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


def resource_values(flags: dict[str, Any], extra: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of `resource_flags` by sbatch's long names."""
    from mgpu_slurm.request.spec import sbatch_pairs

    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return named | ({"sbatch": sbatch_pairs(extra)} if extra else {})
