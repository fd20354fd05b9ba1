"""The parameters that a sweep searches: ranges of numbers and choices, and the values that each accepts."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from mgpu_slurm.core.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial

_SOMEWHERE = 0.381966
"""Position of a value between the ends of a range, as a share of it."""

Values: TypeAlias = dict[str, object]
"""Values of a trial's parameters by name (`model.width`), as passed to the job, without inactive ones."""


@dataclass(frozen=True)
class Parameter(ABC):
    """One parameter. It is active if every parameter in `when` has one of the values listed there."""

    name: str
    when: Mapping[str, tuple[Any, ...]]

    @abstractmethod
    def suggest(self, trial: BaseTrial) -> Any:
        """Return a value chosen by the study's sampler."""

    @property
    @abstractmethod
    def distribution(self) -> BaseDistribution:
        """What the study's sampler chooses from: values in their form in the study."""

    @property
    def only_value(self) -> Any:
        """The value, in its form in the study, of a parameter that has only one."""
        return label(self.ends()[0])

    def place(self, kept: Any) -> Any:
        """Return what identifies a value among all values, from its form in the study."""
        return kept

    @abstractmethod
    def takes(self, value: Any) -> bool:
        """Return whether the parameter may have this value."""

    def restored(self, kept: Any) -> Any:
        """Return the value from its form in the study."""
        return kept

    @abstractmethod
    def points(self) -> Sequence[Any]:
        """Return all values, for a grid.

        Raises:
            UserError: there are infinitely many.
        """

    @abstractmethod
    def ends(self) -> Sequence[Any]:
        """Return the lowest and highest value of a range, or all choices."""

    def probes(self) -> Sequence[Any]:
        """Return values that the job's config must accept if it accepts the parameter at all."""
        return self.ends()

    @property
    @abstractmethod
    def words(self) -> str:
        """The range, in words for people."""

    def is_active(self, values: Values) -> bool:
        return all(name in values and values[name] in allowed for name, allowed in self.when.items())


@dataclass(frozen=True)
class Float(Parameter):
    """Numbers from `low` to `high`, inclusive."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def suggest(self, trial: BaseTrial) -> float:
        return trial.suggest_float(self.name, self.low, self.high, log=self.log, step=self.step)

    @property
    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def place(self, kept: float) -> float:
        """Return the number of steps above the lower end, as sums of steps are not exact; without steps, the value."""
        return kept if self.step is None else round((kept - self.low) / self.step)

    def points(self) -> Sequence[float]:
        if self.step is None:
            raise UserError(
                f"space {self.name}: a grid needs to know which values: give `step: ...` to"
                f" `float: [{self.low:g}, {self.high:g}]`, or write `choice: [...]`"
            )
        return [
            number_at(self.low, place, self.step) for place in range(step_count(self.low, self.high, self.step) + 1)
        ]

    def ends(self) -> Sequence[float]:
        return (float(self.low), float(self.high))

    def probes(self) -> Sequence[float]:
        """Return the ends and a value between them, which no config takes for an integer."""
        between = self.low + (self.high - self.low) * _SOMEWHERE if self.step is None else self.low + self.step
        return (*self.ends(), float(min(between, self.high)))

    def takes(self, value: Any) -> bool:
        return is_number(value, (int, float)) and self.low <= value <= self.high

    @property
    def words(self) -> str:
        return f"float {self.low:g} to {self.high:g}{_how(self.log, self.step)}"


@dataclass(frozen=True)
class Int(Parameter):
    """Integers from `low` to `high`, inclusive."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def suggest(self, trial: BaseTrial) -> int:
        return trial.suggest_int(self.name, self.low, self.high, log=self.log, step=self.step)

    @property
    def distribution(self) -> BaseDistribution:
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=self.log, step=self.step)

    def points(self) -> Sequence[int]:
        return range(self.low, self.high + 1, self.step)

    def ends(self) -> Sequence[int]:
        return (self.low, self.high)

    def takes(self, value: Any) -> bool:
        return is_number(value, (int,)) and self.low <= value <= self.high and (value - self.low) % self.step == 0

    @property
    def words(self) -> str:
        return f"int {self.low} to {self.high}{_how(self.log, self.step if self.step > 1 else None)}"


@dataclass(frozen=True)
class Choice(Parameter):
    """One of a list of values, each of any type that YAML supports."""

    values: tuple[Any, ...]

    def suggest(self, trial: BaseTrial) -> Any:
        return self.restored(trial.suggest_categorical(self.name, [label(value) for value in self.values]))

    @property
    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution([label(value) for value in self.values])

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


def share_of_range(parameter: Parameter, value: Any) -> float | None:
    """Return where a value is in a range, from 0 at its lower end to 1; None for a choice, and a range of one value."""
    if not isinstance(parameter, (Float, Int)) or parameter.low == parameter.high:
        return None
    scale = math.log if parameter.log else float
    low, high = scale(parameter.low), scale(parameter.high)
    return (scale(value) - low) / (high - low)


def wider(name: str, end: str) -> str:
    """Return what to do about a range if the best values are at one of its ends, `lower` or `upper`."""
    return f"the best values are at the {end} end of the range of {name}: widen it"


def label(value: Any) -> Any:
    """Return the form of a choice in the study: Optuna stores numbers, strings and null, but no lists or mappings."""
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def kept(values: Values) -> Values:
    """Return values in their form in the study."""
    return {name: label(value) for name, value in values.items()}


def words_of(values: Values) -> str:
    """Return values on one line for people."""
    return "  ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )


def _how(log: bool, step: float | None) -> str:
    return f"{', log' if log else ''}{f', step {step:g}' if step is not None else ''}"


def step_count(low: float, high: float, step: float) -> int:
    """Return how often the step fits, in decimal arithmetic: in binary, 0.9 is less than three times 0.3."""
    return int((Decimal(str(high)) - Decimal(str(low))) // Decimal(str(step)))


def number_at(low: float, place: int, step: float) -> float:
    """Return the number this many steps above `low`, in decimal arithmetic."""
    return float(Decimal(str(low)) + place * Decimal(str(step)))


def is_number(value: object, kinds: tuple[type[float], ...]) -> TypeGuard[float]:
    """Return whether a value is a finite number of one of these types."""
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
