"""Define the command `mgpu-slurm`: its group of commands, its errors and its exit codes.

Each command parses, calls one function and prints. What it needs is imported inside it, so that `--help` and `status`
start at once.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from mgpu_slurm.cli import manage, results, setup, submit, sweeps, views
from mgpu_slurm.cli.output import INTERRUPTED, PROGRAM, fail
from mgpu_slurm.core.errors import MgpuError, UserError, closest

COMMANDS = [
    *(setup.init, setup.completion, setup.doctor),
    *(submit.submit, submit.resume, submit.scaling),
    *(manage.status, manage.logs, manage.wait, manage.cancel, manage.clean, manage.shell),
    *(sweeps.sweep, sweeps.best, sweeps.trials, sweeps.importance, sweeps.repair),
    *(results.why, results.diff, results.efficiency, results.profile, results.export),
    *(views.report, views.aggregate, views.tensorboard),
]


_TAKE_VALUES = ("submit", "scaling")
"""Commands that take the job's config values, which other programs take as options."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the program and exit: 0 done, 1 the run failed, 2 the call or a file was wrong, 3 the cluster refused, 124
    waited for too long, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    words, command = _split_command(words)
    debug = "--debug" in words
    try:
        cli.main(args=words, prog_name=PROGRAM, standalone_mode=False, obj=command)
    except click.exceptions.Exit as stopped:
        sys.exit(stopped.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        told = None
        if isinstance(error, click.NoSuchOption) and words[0] in _TAKE_VALUES:
            told = _no_option(error, has_commands=words[0] == "submit")
        elif isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument):
            told = _no_argument(error.param)
        fix = f": see `{context.command_path} --help`" if context else ""
        fail((told or error.format_message().rstrip(".")) + fix, UserError.exit_code)
    except MgpuError as error:
        if debug:
            raise
        fail(str(error), error.exit_code)
    except BrokenPipeError:
        # the reader, such as `head`, has seen enough
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if debug:
            raise
        fail(f"{error}: fix that and try again", MgpuError.exit_code)
    sys.exit(0)


def _no_option(error: click.NoSuchOption, has_commands: bool) -> str:
    name = error.option_name.lstrip("-")
    # without the dashes, which all of them have
    close = closest(name, [option.lstrip("-") for option in error.possibilities or ()])
    meant = "" if close is None else f" (did you mean '--{close}'?)"
    command = ", and a command goes after `--`" if has_commands else ""
    value = f"a config value is {name.replace('-', '_')}=VALUE, without dashes"
    return f"no such option {error.option_name!r}{meant}: {value}{command}"


def _no_argument(missing: click.Argument) -> str | None:
    """Return what is missing, with an example; None for one of a few choices, which click lists itself."""
    if isinstance(missing.type, click.Choice):
        return None
    # without what may follow it
    name = missing.human_readable_name.partition(" ")[0]
    return f"missing {name}{', such as @last' if name.startswith('RUN') else ''}"


def _split_command(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Separate the command to run, all words behind the first `--`, from the program's own words."""
    if "--" not in words:
        return words, ()
    place = words.index("--")
    return words[:place], tuple(words[place + 1 :])


@click.group(commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mgpu-slurm", prog_name=PROGRAM)
@click.option("--debug", is_flag=True, help="Show a traceback with errors.")
def cli(debug: bool) -> None:
    """Multi-node, multi-GPU training as SLURM batch jobs, and the same on a laptop."""
