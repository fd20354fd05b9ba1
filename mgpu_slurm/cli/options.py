"""Define the options that several commands share, and read their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mgpu_slurm.request.resources import Flags

_NODES = click.option("--nodes", type=int, metavar="N", help="Nodes.")
_FLAGS_OF_A_NODE = [
    click.option("--ntasks-per-node", type=int, metavar="N", help="Ranks per node."),
    click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs per node, as 4 or a100:2; 0 for none."),
    click.option("--cpus-per-task", type=int, metavar="N", help="CPU cores per rank."),
    click.option("--mem", metavar="SIZE", help="Memory per node in sbatch's format, e.g. 64G."),
    click.option("--time", metavar="TIME", help="Time limit in sbatch's format: minutes, M:S, H:M:S, D-H."),
    click.option("--partition", metavar="NAME"),
    click.option("--account", metavar="NAME"),
    click.option("--qos", metavar="NAME"),
    click.option("--constraint", metavar="FEATURES"),
    click.option("--exclude", metavar="NODES"),
    click.option("--nodelist", metavar="NODES"),
    click.option("--reservation", metavar="NAME"),
    click.option("--sbatch", "extra", multiple=True, metavar="KEY=VALUE", help="Any other sbatch option; repeatable."),
]
"""Options of `submit`, `resume`, `scaling` and `doctor`, in sbatch's words."""


def resource_flags(command: Any) -> Any:
    """Add the options for nodes, GPUs and other resources that sbatch reserves."""
    return _NODES(resource_flags_of_a_node(command))


def resource_flags_of_a_node(command: Any) -> Any:
    """Add these options without the number of nodes."""
    for flag in reversed(_FLAGS_OF_A_NODE):
        command = flag(command)
    return command


def restart_flags(of_new_runs: bool) -> Callable[[Any], Any]:
    """Return a decorator that adds the options for restarts."""

    def default(words: str) -> str:
        return f"  [default: {words if of_new_runs else 'as before'}]"

    flags = [
        click.option(
            "--signal",
            metavar="SIGNAL[@SECONDS]",
            help="Signal to send, and how many seconds before the time limit."
            + default("USR2@120, or a fifth of a short limit"),
        ),
        click.option(
            "--max-requeues",
            type=int,
            metavar="N",
            help="Maximum number of requeues at the time limit." + default("20"),
        ),
        click.option(
            "--retries",
            type=int,
            metavar="N",
            help="Maximum consecutive restarts after failures of any kind." + default("3 if the cluster failed"),
        ),
        click.option(
            "--stuck-after",
            type=float,
            metavar="MINUTES",
            help="Restart after this many minutes without progress; 0 = never." + default("30"),
        ),
    ]
    return lambda command: functools.reduce(lambda inner, flag: flag(inner), reversed(flags), command)


_PARALLELISM_FLAGS = [
    click.option(
        "--strategy",
        metavar="NAME",
        help="How the ranks share the model: ddp (a copy on each rank), fsdp, zero2 or hsdp (sharded); single or dp for"
        " one rank with several GPUs.",
    ),
    click.option(
        "--shard",
        type=int,
        metavar="N",
        help="Ranks that hold one copy of a sharded model; by default all, with hsdp those of a node.",
    ),
    click.option(
        "--tensor",
        type=int,
        metavar="N",
        help="Ranks that compute each layer together, for a job with run.wrap(plan=...).",
    ),
    click.option(
        "--pipeline",
        type=int,
        metavar="N",
        help="Stages that hold consecutive layers, for a job with run.pipeline.",
    ),
    click.option(
        "--precision",
        metavar="NAME",
        help="Precision in which models compute: fp32, tf32, bf16, fp16 or fp8; parameters stay in fp32.",
    ),
    click.option(
        "--compile/--no-compile",
        default=None,
        help="Compile models by torch.compile: each block of run.wrap(blocks=...), or the whole model.",
    ),
]


def parallelism_flags(command: Any) -> Any:
    """Add the options for sharing a model over ranks."""
    for flag in reversed(_PARALLELISM_FLAGS):
        command = flag(command)
    return command


profile_flag = click.option(
    "--profile",
    metavar="STEPS[@RANKS]",
    help="Record steps with torch's profiler, such as 10-13, 10-13@0,8 or 10-13@all; by default on the first node.",
)
stage_flag = click.option(
    "--stage",
    multiple=True,
    metavar="PATH",
    help="Copy a data set to the disk of each node before the ranks start; repeatable.",
)
sink_flag = click.option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="mlflow[=URI]|wandb[=PROJECT]",
    help="Send reports to a tracker once a checkpoint has them; repeatable, or none.  [default: as in mgpu.yaml]",
)
_CONTAINER_FLAGS = [
    click.option(
        "--container",
        metavar="IMAGE",
        help="Run the ranks in a container: a file, folder or name for Apptainer, Charliecloud or Pyxis; or none."
        "  [default: as in mgpu.yaml]",
    ),
    click.option(
        "--mount",
        "mounts",
        multiple=True,
        metavar="SOURCE[:TARGET][:ro]",
        help="Folder that the container sees, besides the project and the runs; repeatable.",
    ),
]


def container_flags(command: Any) -> Any:
    """Add the options for the container of the ranks."""
    for flag in reversed(_CONTAINER_FLAGS):
        command = flag(command)
    return command


json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
code_flag = click.option(
    "--code",
    type=click.Choice(["same", "new"]),
    default="same",
    show_default=True,
    help="Use the run's own code, or the project's current code.",
)


def run_names(_context: Any, _parameter: Any, begun: str) -> list[Any]:
    """Return what a shell may complete the name of a run to; a path, if no name begins like this."""
    return _completed(begun, trials=False)


def names_with_trials(_context: Any, _parameter: Any, begun: str) -> list[Any]:
    """Return what a shell may complete the name of a run or trial to, as `run_names`."""
    return _completed(begun, trials=True)


def study_names(_context: Any, _parameter: Any, begun: str) -> list[str]:
    """Return the names of sweeps that a shell may complete."""
    from mgpu_slurm.registry.run_names import completions

    return completions(begun, only_sweeps=True)


def _completed(begun: str, trials: bool) -> list[Any]:
    from click.shell_completion import CompletionItem

    from mgpu_slurm.registry.run_names import completions

    return [CompletionItem(name) for name in completions(begun, trials=trials)] or [CompletionItem(begun, type="file")]


def resource_values(flags: Flags, extra: tuple[str, ...]) -> Flags:
    """Return the values of `resource_flags` by sbatch's long names."""
    from mgpu_slurm.request.resources import sbatch_pairs

    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return named | ({"sbatch": sbatch_pairs(extra)} if extra else {})
