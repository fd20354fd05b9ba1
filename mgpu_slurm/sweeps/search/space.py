"""The search space of a sweep, as its file says it: ranges, choices, and what each of them depends on."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.request import config as configs

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

_SOMEWHERE = 0.381966
"""Between the ends of a range, as a share of it."""

LARGEST_INT = 2**53
"""What a float holds exactly, as which Optuna keeps whole numbers."""

LARGEST_GRID = 100_000
"""Points: beyond that it is a mistake in the file, and no study would hold it."""

Values: TypeAlias = dict[str, Any]
"""Parameters by name; one whose condition does not hold is missing."""


@dataclass(frozen=True)
class Parameter(ABC):
    """One parameter. It is there where each of those that its condition names has one of these values."""

    name: str
    when: Mapping[str, tuple[Any, ...]]

    @abstractmethod
    def suggest(self, trial: BaseTrial) -> Any:
        """A value by the study's sampler."""

    @abstractmethod
    def takes(self, value: Any) -> bool:
        """Whether it may have this value."""

    def restored(self, kept: Any) -> Any:
        """The value, from what the study keeps of it."""
        return kept

    @abstractmethod
    def points(self) -> Sequence[Any]:
        """All values, for a grid.

        Raises:
            UserError: there is no end of them.
        """

    @abstractmethod
    def ends(self) -> Sequence[Any]:
        """The least and the greatest of a range, or all choices."""

    def probes(self) -> Sequence[Any]:
        """Values that the job's config has to take, if it takes any."""
        return self.ends()

    @property
    @abstractmethod
    def words(self) -> str:
        """The range, for people."""

    def is_active(self, values: Values) -> bool:
        return all(name in values and values[name] in allowed for name, allowed in self.when.items())


@dataclass(frozen=True)
class Float(Parameter):
    """Numbers from `low` to `high`, both of them included."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def suggest(self, trial: BaseTrial) -> float:
        return trial.suggest_float(self.name, self.low, self.high, log=self.log, step=self.step)

    def points(self) -> Sequence[float]:
        if self.step is None:
            raise UserError(
                f"space {self.name}: a grid needs to know which values: give `step: ...` to"
                f" `float: [{self.low:g}, {self.high:g}]`, or write `choice: [...]`"
            )
        return [_at(self.low, place, self.step) for place in range(_steps(self.low, self.high, self.step) + 1)]

    def ends(self) -> Sequence[float]:
        return (float(self.low), float(self.high))

    def probes(self) -> Sequence[float]:
        """Also one between the ends, which no config takes for a whole number."""
        between = self.low + (self.high - self.low) * _SOMEWHERE if self.step is None else self.low + self.step
        return (*self.ends(), float(min(between, self.high)))

    def takes(self, value: Any) -> bool:
        return _is_number(value, (int, float)) and self.low <= value <= self.high

    @property
    def words(self) -> str:
        return f"float {self.low:g} to {self.high:g}{_how(self.log, self.step)}"


@dataclass(frozen=True)
class Int(Parameter):
    """Whole numbers from `low` to `high`, both of them included."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def suggest(self, trial: BaseTrial) -> int:
        return trial.suggest_int(self.name, self.low, self.high, log=self.log, step=self.step)

    def points(self) -> Sequence[int]:
        return range(self.low, self.high + 1, self.step)

    def ends(self) -> Sequence[int]:
        return (self.low, self.high)

    def takes(self, value: Any) -> bool:
        return _is_number(value, int) and self.low <= value <= self.high and (value - self.low) % self.step == 0

    @property
    def words(self) -> str:
        return f"int {self.low} to {self.high}{_how(self.log, self.step if self.step > 1 else None)}"


@dataclass(frozen=True)
class Choice(Parameter):
    """One of some values, of any kind that YAML can say."""

    values: tuple[Any, ...]

    def suggest(self, trial: BaseTrial) -> Any:
        return self.restored(trial.suggest_categorical(self.name, [label(value) for value in self.values]))

    def restored(self, kept: Any) -> Any:
        return next(value for value in self.values if label(value) == kept)

    def points(self) -> Sequence[Any]:
        return self.values

    def ends(self) -> Sequence[Any]:
        return self.values

    def takes(self, value: Any) -> bool:
        return value in self.values

    @property
    def words(self) -> str:
        return f"one of {', '.join(json.dumps(value) for value in self.values)}"


def label(value: Any) -> Any:
    """What stands for a choice in the study: Optuna keeps numbers, texts and null, and nothing that has parts."""
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _how(log: bool, step: float | None) -> str:
    return f"{', log' if log else ''}{f', step {step:g}' if step is not None else ''}"


def _steps(low: float, high: float, step: float) -> int:
    """How often the step fits, by the numbers as they are written: in binary, 0.9 is less than three times 0.3."""
    return int((Decimal(str(high)) - Decimal(str(low))) // Decimal(str(step)))


def _at(low: float, place: int, step: float) -> float:
    return float(Decimal(str(low)) + place * Decimal(str(step)))


@dataclass(frozen=True)
class Space:
    """All parameters, each behind those that it depends on."""

    parameters: tuple[Parameter, ...]

    def suggest(self, trial: BaseTrial) -> Values:
        """Values for a trial by the study's sampler."""
        values: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(values):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def takes(self, values: Values) -> bool:
        """Whether a whole trial may have these values, and no others."""
        active: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(active):
                if parameter.name not in values or not parameter.takes(values[parameter.name]):
                    return False
                active[parameter.name] = values[parameter.name]
        return active.keys() == values.keys()

    def restored(self, params: Mapping[str, Any]) -> Values:
        """A trial's parameters as the job gets them, from what the study keeps of them."""
        return {parameter.name: parameter.restored(params[parameter.name]) for parameter in self.parameters
                if parameter.name in params}  # fmt: skip

    def grid(self) -> list[Values]:
        """Every combination, once; the last parameter changes fastest.

        Raises:
            UserError: a range without an end of values, or more combinations than a study holds.
        """
        return self._combinations

    @cached_property
    def _combinations(self) -> list[Values]:
        found: list[Values] = [{}]
        for parameter in self.parameters:
            chosen: list[Values] = [{parameter.name: point} for point in parameter.points()]
            grown: list[Values] = []
            for each in found:
                grown += [each | one for one in chosen] if parameter.is_active(each) else [each]
                if len(grown) > LARGEST_GRID:
                    raise UserError(f"space: a grid of more than {LARGEST_GRID:,} points: take larger steps")
            found = grown
        return found

    def probes(self) -> list[Values]:
        """Values of whole trials in which every end of every parameter is met, for the job's config to be asked."""
        found = []
        for parameter in self.parameters:
            found += [self._with(parameter, value) for value in parameter.probes()]
        return found

    def _with(self, wanted: Parameter, value: Any) -> Values:
        """A trial in which the parameter is there, with this value."""
        named = {parameter.name: parameter for parameter in self.parameters}
        forced: Values = {wanted.name: value}
        waiting = [wanted]
        while waiting:
            for name, allowed in waiting.pop().when.items():
                if name not in forced:
                    forced[name] = allowed[0]
                    waiting.append(named[name])
        values: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(values):
                values[parameter.name] = forced.get(parameter.name, parameter.ends()[0])
        return values

    def lines(self) -> list[str]:
        """For people."""
        width = max((len(parameter.name) for parameter in self.parameters), default=0)
        return [f"{parameter.name:<{width}}  {parameter.words}{_condition(parameter)}" for parameter in self.parameters]


def _condition(parameter: Parameter) -> str:
    if not parameter.when:
        return ""
    told = [f"{name} is {' or '.join(map(json.dumps, allowed))}" for name, allowed in parameter.when.items()]
    return f", when {' and '.join(told)}"


# -- from the file


def parse(given: Mapping[str, Any], source: str) -> Space:
    """The space that a sweep file says.

    Args:
        given: its `space:`.
        source: names the file in errors.

    Raises:
        UserError: what is wrong with which parameter, and the mend.
    """
    if not isinstance(given, dict) or not given:
        raise UserError(f"{source}: space: expected at least one parameter, such as `lr: {{float: [0.001, 0.1]}}`")
    found = {str(name): _parameter(str(name), options, f"{source}: space {name}") for name, options in given.items()}
    for parameter in found.values():
        _check_condition(parameter, found, f"{source}: space {parameter.name}")
    return Space(tuple(_in_order(found, source)))


_OPTIONS = {"float": ("log", "step"), "int": ("log", "step"), "choice": ()}


def _parameter(name: str, options: Any, what: str) -> Parameter:
    if not isinstance(options, dict):
        raise UserError(f"{what}: expected a mapping such as {{float: [0.001, 0.1]}}; a constant belongs into `fixed:`")
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


def _when(given: Any, what: str) -> dict[str, tuple[Any, ...]]:
    if not isinstance(given, dict):
        raise UserError(f"{what}: when {given!r}: expected a mapping such as {{optimizer: sgd}}")
    return {str(name): tuple(value) if isinstance(value, list) else (value,) for name, value in given.items()}


def _choices(given: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(given, list) or not given:
        raise UserError(f"{what}: choice {given!r}: expected a list of at least one value")
    for place, value in enumerate(given):
        # 1, 1.0 and true are one and the same to Python, and a list is kept as its text
        if label(value) in map(label, given[:place]):
            raise UserError(f"{what}: choice {json.dumps(value)} stands twice: leave one out")
    return tuple(given)


def _range(kind: str, name: str, when: Mapping[str, tuple[Any, ...]], options: dict[str, Any], what: str) -> Parameter:
    of_kind = int if kind == "int" else (int, float)
    ends, log, step = options[kind], options.get("log", False), options.get("step")
    if not isinstance(ends, list) or len(ends) != 2 or not all(_is_number(end, of_kind) for end in ends):
        numbers = "whole numbers" if kind == "int" else "numbers"
        raise UserError(f"{what}: {kind} {ends!r}: expected the two {numbers} that it lies between: [LOW, HIGH]")
    low, high = ends
    if low > high:
        raise UserError(f"{what}: {kind} [{low:g}, {high:g}]: nothing lies between them: swap them")
    if kind == "int" and max(-low, high) > LARGEST_INT:
        raise UserError(f"{what}: int [{low}, {high}]: Optuna keeps whole numbers up to 2^53 exactly: use a choice")
    if not isinstance(log, bool):
        raise UserError(f"{what}: log {log!r}: expected true or false")
    if log and low <= 0:
        raise UserError(f"{what}: {kind} [{low:g}, {high:g}]: with log both have to be above 0")
    if step is not None and (not _is_number(step, of_kind) or step <= 0):
        raise UserError(f"{what}: step {step!r}: expected {'a whole' if kind == 'int' else 'a'} number above 0")
    if step is not None and log:
        raise UserError(f"{what}: log and step do not go together: leave one out")
    if kind == "int":
        step = step or 1
        # Optuna would lower the end by itself
        return Int(name, when, low, low + (high - low) // step * step, log, step)
    high = high if step is None else _at(low, _steps(low, high, step), step)
    return Float(name, when, float(low), float(high), log, None if step is None else float(step))


def _is_number(value: Any, of_kind: Any) -> bool:
    return isinstance(value, of_kind) and not isinstance(value, bool) and math.isfinite(value)


def _check_condition(parameter: Parameter, known: Mapping[str, Parameter], what: str) -> None:
    for name, allowed in parameter.when.items():
        other = known.get(name)
        if other is None:
            raise UserError(f"{what}: when {name}: there is no such parameter{nearest(name, list(known))}")
        if not isinstance(other, (Choice, Int)):
            raise UserError(f"{what}: when {name}: it is a range of floats, and no float is ever met: name a choice")
        possible = other.points()
        for value in allowed:
            if value not in possible:
                raise UserError(f"{what}: when {name} is {value!r}: it never is, it is {other.words}")


def _in_order(found: Mapping[str, Parameter], source: str) -> Iterator[Parameter]:
    """Each behind those that it depends on, else as they stand in the file."""
    left = dict(found)
    while left:
        free = next((parameter for parameter in left.values() if not parameter.when.keys() & left.keys()), None)
        if free is None:
            raise UserError(f"{source}: space: {', '.join(left)} wait for each other: take a `when` away")
        yield left.pop(free.name)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"model.width": 32}` as `{"model": {"width": 32}}`, the form of a config."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        configs.put(found, name, value, name)
    return found


def differences(old: Space, new: Space) -> list[str]:
    """In words, what another space has otherwise; empty where trials of the one belong to the other too."""
    before = {parameter.name: parameter for parameter in old.parameters}
    after = {parameter.name: parameter for parameter in new.parameters}
    told = [f"{name} is gone" for name in before if name not in after]
    told += [f"{name} is new" for name in after if name not in before]
    changed = [name for name in before if name in after and before[name] != after[name]]
    told += [f"{name} was {_whole(before[name])} and is {_whole(after[name])}" for name in changed]
    return told


def _whole(parameter: Parameter) -> str:
    return f"{parameter.words}{_condition(parameter)}"
