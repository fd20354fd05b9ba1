"""The command of a sweep whose job is a script: a template with placeholders such as `{lr}` for parameters."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.config import Config
from mgpu_slurm.sweeps.search.parameters import Values

# a shell variable is not a parameter
_PLACE = re.compile(r"(?<!\$)\{([A-Za-z_][\w.-]*)\}")


def parse_command(job: str | Config) -> tuple[str, ...]:
    """Return the words of a command; empty for a job function."""
    if isinstance(job, str):
        return ()
    command = job.get("command")
    if list(job) != ["command"] or not isinstance(command, (str, list)):
        raise UserError(f"job {job!r}: expected a job function, or {{command: python train.py --lr {{lr}}}}")
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if not words:
        raise UserError("job: command: it is empty")
    return tuple(words)


def check_takes(command: Sequence[str], names: Iterable[str]) -> None:
    """Check that these parameters have a placeholder in the command.

    Raises:
        UserError: one has none.
    """
    places = places_in(command)
    for name in names:
        if name not in places:
            raise UserError(f"{name}: the command does not take it: write {{{name}}} where it belongs")


def places_in(command: Sequence[str]) -> set[str]:
    """Return the names of the parameters with a placeholder in the command."""
    return {name for word in command for name in _PLACE.findall(word)}


def words_of(command: Sequence[str], values: Values) -> tuple[str, ...]:
    """Return the words of a trial's command, without those of inactive parameters.

    The whole word is left out, and also the option before it: `--momentum {momentum}`.
    """
    found: list[str] = []
    for word in command:
        names = _PLACE.findall(word)
        if all(name in values for name in names):
            found.append(_PLACE.sub(lambda match: _text(values[match[1]]), word))
        elif found and word == f"{{{names[0]}}}" and found[-1].startswith("-"):
            found.pop()
    return tuple(found)


def _text(value: object) -> str:
    """Return a value as text for a command line."""
    return value if isinstance(value, str) else json.dumps(value)
