"""Scales, ticks and paths, and a chart with axes as SVG, which needs no script and takes its colours from the page."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mgpu_slurm.metrics.event_layout import Floats
from mgpu_slurm.reports.page.markup import Markup, joined, number, tag

COLORS = 8
"""Number of colours; runs of further groups use the first ones again."""

_MANTISSAS = (1, 2, 2.5, 5, 10)

_SMALLEST, _LARGEST = 1e-290, sys.float_info.max
"""Numbers from which and up to which an axis can be divided."""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`, about so many."""
    raw = high / count - low / count
    if not (math.isfinite(low) and math.isfinite(high) and raw > _SMALLEST):
        return [low] if math.isfinite(low) else []
    exponent = math.floor(math.log10(raw))
    step = min((mantissa * 10.0**exponent for mantissa in _MANTISSAS), key=lambda each: abs(each - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # of the digits that a multiple of the step cannot have
    found = [round(place * step, max(0, 1 - exponent)) for place in range(first, last + 1)]
    room = step * 1e-9
    return [each for each in dict.fromkeys(found) if low - room <= each <= high + room]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten from `low` to `high`, with numbers between them if they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    span = last - first
    factors = (1,) if span > 3 else (1, 2, 5) if span > 1 else (1, 2, 3, 5, 7)
    # as text, as a power may be beyond all numbers
    found = [float(f"{f}e{power}") for power in range(first, last + 1, max(1, span // 5)) for f in factors]
    found = [each for each in found if low / 1.001 <= each and each / 1.001 <= high]
    return found if len(found) > 1 else ticks(low, high)


@dataclass(frozen=True)
class Scale:
    """Maps values to positions in pixels."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    @staticmethod
    def over(values: Sequence[Floats], start: float, stop: float, is_log: bool = False, pad: float = 0.04) -> Scale:
        """Return a scale for all finite values of several curves, a little wider than they are."""
        low, high = finite_range(values, is_log)
        if is_log:
            low, high = (low, high) if high / low > 1 + 1e-9 else (low / 1.1, high * 1.1)
        else:
            room = (high - low) * pad
            # rounding errors of a constant are no range
            if high - low <= max(_SMALLEST, 1e-9 * max(abs(low), abs(high))):
                room = abs(low) * 0.05 if abs(low) > _SMALLEST else 0.5
            low, high = low - room, high + room
        return Scale(max(low, -_LARGEST), min(high, _LARGEST), start, stop, is_log)

    def __call__(self, values: Any) -> Any:
        """Return the position of a value, or an array of positions; NaN for what has none."""
        if self.is_log:
            with np.errstate(divide="ignore", invalid="ignore"):
                share = (np.log(np.asarray(values, np.float64)) - math.log(self.low)) / (
                    math.log(self.high) - math.log(self.low)
                )
        else:
            # in halves, as the difference of two large values may be infinite
            share = (np.asarray(values, np.float64) / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        found = self.start + share * (self.stop - self.start)
        return float(found) if np.ndim(found) == 0 else found

    def ticks(self, count: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high, count)


def finite_range(values: Sequence[Floats], is_log: bool = False) -> tuple[float, float]:
    """Return the lowest and highest finite value, of a logarithmic axis only of positive ones; 0 and 1 if none."""
    whole = np.concatenate([np.asarray(each, np.float64) for each in values]) if values else np.empty(0)
    whole = whole[np.isfinite(whole)]
    whole = whole[whole > _SMALLEST] if is_log else whole
    return (float(whole.min()), float(whole.max())) if len(whole) else (0.1 if is_log else 0.0, 1.0)


def path(xs: Floats, ys: Floats) -> str:
    """Return a line through points, in tenths of a pixel, with gaps at what is not finite."""
    found = []
    is_down = False
    before = (0, 0)
    is_known = np.isfinite(xs) & np.isfinite(ys)
    tenths = np.rint(np.clip(np.where(is_known, [xs, ys], 0), -1e4, 1e4) * 10).astype(int).T.tolist()
    for known, (x, y) in zip(is_known.tolist(), tenths, strict=True):
        if not known:
            is_down = False
        elif not is_down:
            found.append(f"M{x / 10:g} {y / 10:g}")
            is_down, before = True, (x, y)
        elif (x, y) != before:
            dy = (y - before[1]) / 10
            found.append(f"l{(x - before[0]) / 10:g}{'' if dy < 0 else ' '}{dy:g}")
            before = (x, y)
    return "".join(found)


@dataclass
class Chart:
    """A drawing with a plot area and axes."""

    ident: str
    """Unique on the page."""
    title: str
    description: str
    """What one sees, for people who do not."""
    width: int = 480
    height: int = 280
    left: int = 52
    right: int = 12
    top: int = 10
    bottom: int = 38
    cls: str = ""
    data: dict[str, object] = field(default_factory=dict)
    """Further attributes."""
    _parts: list[Markup] = field(default_factory=list)

    @property
    def x0(self) -> int:
        return self.left

    @property
    def x1(self) -> int:
        return self.width - self.right

    @property
    def y0(self) -> int:
        """The bottom of the plot area."""
        return self.height - self.bottom

    @property
    def y1(self) -> int:
        return self.top

    def add(self, *parts: Markup) -> None:
        self._parts += parts

    def x_axis(
        self, scale: Scale, label: str, at: Sequence[float] | None = None, words: Callable[[float], str] = number
    ) -> None:
        """Draw the horizontal axis, with ticks at these values."""
        parts = [tag("path", cls="base", d=f"M{self.x0} {self.y0}H{self.x1}")]
        for value in scale.ticks() if at is None else at:
            x = round(scale(value), 1)
            parts.append(tag("path", cls="tick", d=f"M{x} {self.y0}v4"))
            parts.append(tag("text", words(value), x=x, y=self.y0 + 17, text_anchor="middle"))
        middle = (self.x0 + self.x1) / 2
        parts.append(tag("text", label, cls="label", x=middle, y=self.height - 4, text_anchor="middle"))
        self.add(tag("g", *parts, cls="axis"))

    def y_axis(self, scale: Scale, at: Sequence[float] | None = None, words: Callable[[float], str] = number) -> None:
        """Draw lines and numbers for the vertical axis."""
        parts = []
        for value in scale.ticks() if at is None else at:
            y = round(scale(value), 1)
            parts.append(tag("path", cls="grid", d=f"M{self.x0} {y}H{self.x1}"))
            parts.append(tag("text", words(value), x=self.x0 - 6, y=y + 4, text_anchor="end"))
        self.add(tag("g", *parts, cls="axis"))

    def svg(self) -> Markup:
        return tag(
            "svg",
            tag("title", self.title, id=f"{self.ident}-title"),
            tag("desc", self.description, id=f"{self.ident}-desc"),
            joined(*self._parts),
            id=self.ident,
            cls=f"chart {self.cls}".strip(),
            viewBox=f"0 0 {self.width} {self.height}",
            role="img",
            aria_labelledby=f"{self.ident}-title {self.ident}-desc",
            **self.data,
        )


def whole_ticks(scale: Scale, count: int = 5) -> list[float]:
    """Return the ticks of an axis of counts: whole numbers only."""
    return [each for each in scale.ticks(count) if float(each).is_integer()]
