"""What a sweep is after: one or several metrics to maximize or minimize, and constraints on others."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mgpu_slurm.core.errors import UserError

Direction = Literal["maximize", "minimize"]

_IS_AN_ERROR = re.compile(r"loss|err|perplexity|(^|_)(ppl|nll|mse|mae|rmse|bpc|wer|cer)($|_)")
_BOUND = re.compile(r"(<=|>=)\s*(\S+)")


@dataclass(frozen=True)
class Objective:
    """A metric to maximize or to minimize."""

    metric: str
    direction: Direction

    def loss(self, value: float) -> float:
        """Return the value such that lower is better."""
        return -value if self.direction == "maximize" else value

    def __str__(self) -> str:
        return f"{self.metric} ({self.direction})"


@dataclass(frozen=True)
class Constraint:
    """A bound on a metric that the job reports."""

    metric: str
    is_upper: bool
    bound: float

    def violation(self, value: float) -> float:
        """Return by how much a value is beyond the bound; 0 or less if it is not."""
        if math.isnan(value):
            return math.inf
        return value - self.bound if self.is_upper else self.bound - value

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.is_upper else '>='} {self.bound:g}"


def objectives_of(
    metric: str | None, direction: Direction | None, metrics: Mapping[str, Direction]
) -> tuple[Objective, ...]:
    """Return the objectives that a sweep file names, by one metric or by several.

    Raises:
        UserError: it names none, or both.
    """
    if metrics:
        if metric is not None or direction is not None:
            raise UserError("metrics: it contains metric and direction: remove these")
        return tuple(Objective(name, each) for name, each in metrics.items())
    if metric is None:
        raise UserError("no metric: add `metric: NAME`, or `metrics: {NAME: maximize, OTHER: minimize}`")
    if direction is None and _IS_AN_ERROR.search(metric.lower()):
        raise UserError(f"metric {metric}: add `direction: minimize`; without it a metric is maximized")
    return (Objective(metric, direction or "maximize"),)


def constraints_of(bounds: Mapping[str, object]) -> tuple[Constraint, ...]:
    """Return the constraints of a sweep file: `{memory_gib: "<= 70"}`.

    Raises:
        UserError: a bound is not a number.
    """
    return tuple(_constraint(metric, bound) for metric, bound in bounds.items())


def _constraint(metric: str, text: object) -> Constraint:
    found = _BOUND.fullmatch(str(text).strip())
    try:
        bound = float(found[2]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or not math.isfinite(bound):
        raise UserError(f"constraints: {metric}: {text!r}: expected '<= NUMBER' or '>= NUMBER'")
    return Constraint(metric, found[1] == "<=", bound)
