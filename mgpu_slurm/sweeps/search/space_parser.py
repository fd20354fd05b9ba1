"""Parser of the search space, the `space:` key of a sweep file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.request.config import Config
from mgpu_slurm.sweeps.search.parameters import Choice, Float, Int, Parameter, is_number, label, number_at, step_count
from mgpu_slurm.sweeps.search.space import Space

LARGEST_INT = 2**53
"""Largest integer up to which a float is exact; Optuna stores integers as floats."""


def parse(given: object, source: str) -> Space:
    """Return the space that a sweep file describes.

    Args:
        given: the value of its `space:`.
        source: names the file in errors.

    Raises:
        UserError: a parameter is invalid; the message names it and the fix.
    """
    if not isinstance(given, dict) or not given:
        raise UserError(f"{source}: space: expected at least one parameter, such as `lr: {{float: [0.001, 0.1]}}`")
    found = {str(name): _parameter(str(name), options, f"{source}: space {name}") for name, options in given.items()}
    for parameter in found.values():
        _check_condition(parameter, found, f"{source}: space {parameter.name}")
    return Space(tuple(_in_order(found, source)))


_NUMBERS = {"float": (int, float), "int": (int,)}
_OPTIONS = {"float": ("log", "step"), "int": ("log", "step"), "choice": ()}


def _parameter(name: str, options: object, what: str) -> Parameter:
    if not isinstance(options, dict):
        raise UserError(f"{what}: expected a mapping such as {{float: [0.001, 0.1]}}; put a constant into `fixed:`")
    kinds = [kind for kind in _OPTIONS if kind in options]
    if not kinds and options:
        unknown = str(next(iter(options)))
        raise UserError(f"{what}: unknown key {unknown!r}{nearest(unknown, [*_OPTIONS, 'log', 'step', 'when'])}")
    if len(kinds) != 1:
        both = " and ".join(kinds)
        raise UserError(f"{what}: {f'both {both}' if both else 'no kind'}: give one of float, int and choice")
    (kind,) = kinds
    known = [kind, *_OPTIONS[kind], "when"]
    for key in options:
        if key not in known:
            raise UserError(f"{what}: unknown key {key!r}{nearest(str(key), known)}")
    when = _when(options.get("when", {}), what)
    if kind == "choice":
        return Choice(name, when, _choices(options["choice"], what))
    return _range(kind, name, when, options, what)


def _when(given: object, what: str) -> dict[str, tuple[Any, ...]]:
    if not isinstance(given, dict):
        raise UserError(f"{what}: when {given!r}: expected a mapping such as {{optimizer: sgd}}")
    return {str(name): tuple(value) if isinstance(value, list) else (value,) for name, value in given.items()}


def _choices(given: object, what: str) -> tuple[Any, ...]:
    if not isinstance(given, list) or not given:
        raise UserError(f"{what}: choice {given!r}: expected a list of at least one value")
    for place, value in enumerate(given):
        # 1, 1.0 and true are equal in Python, and a list is stored as text
        if label(value) in map(label, given[:place]):
            raise UserError(f"{what}: choice {json.dumps(value)} is listed twice: remove one")
    return tuple(given)


def _range(kind: str, name: str, when: Mapping[str, tuple[Any, ...]], options: Config, what: str) -> Parameter:
    ends, log = options[kind], options.get("log", False)
    if not isinstance(ends, list) or len(ends) != 2 or not all(is_number(end, _NUMBERS[kind]) for end in ends):
        numbers = "whole numbers" if kind == "int" else "numbers"
        raise UserError(f"{what}: {kind} {ends!r}: expected two {numbers}: [LOW, HIGH]")
    low, high = ends
    if low > high:
        raise UserError(f"{what}: {kind} [{low:g}, {high:g}]: the lower end comes first: swap them")
    if kind == "int" and max(-low, high) > LARGEST_INT:
        raise UserError(f"{what}: int [{low}, {high}]: Optuna stores whole numbers up to 2^53 exactly: use a choice")
    if not isinstance(log, bool):
        raise UserError(f"{what}: log {log!r}: expected true or false")
    if log and low <= 0:
        raise UserError(f"{what}: {kind} [{low:g}, {high:g}]: log needs both ends above 0")
    step = _step(kind, options.get("step"), what)
    if step is not None and log:
        raise UserError(f"{what}: log and step cannot be combined: remove one")
    if kind == "int":
        whole = int(step or 1)
        # Optuna would lower the upper end itself
        return Int(name, when, low, low + (high - low) // whole * whole, log, whole)
    high = high if step is None else number_at(low, step_count(low, high, step), step)
    return Float(name, when, float(low), float(high), log, None if step is None else float(step))


def _step(kind: str, given: object, what: str) -> float | None:
    if given is None:
        return None
    if not is_number(given, _NUMBERS[kind]) or given <= 0:
        raise UserError(f"{what}: step {given!r}: expected {'a whole' if kind == 'int' else 'a'} number above 0")
    return given


def _check_condition(parameter: Parameter, known: Mapping[str, Parameter], what: str) -> None:
    for name, allowed in parameter.when.items():
        other = known.get(name)
        if other is None:
            raise UserError(f"{what}: when {name}: there is no such parameter{nearest(name, list(known))}")
        if not isinstance(other, (Choice, Int)):
            raise UserError(f"{what}: when {name}: a condition on a range of floats is never met: name a choice")
        possible = other.points()
        for value in allowed:
            if value not in possible:
                raise UserError(f"{what}: when {name} is {value!r}: it never has this value, it is {other.words}")


def _in_order(found: Mapping[str, Parameter], source: str) -> Iterator[Parameter]:
    """Yield each parameter after those that it depends on, otherwise in the order of the file."""
    left = dict(found)
    while left:
        free = next((parameter for parameter in left.values() if not parameter.when.keys() & left.keys()), None)
        if free is None:
            raise UserError(f"{source}: space: {', '.join(left)} depend on each other: remove a `when`")
        yield left.pop(free.name)
