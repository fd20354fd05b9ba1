"""The values of a copy in population based training: those of the trial that is copied, with some of them changed."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import optuna

from mgpu_slurm.sweeps.search.parameters import Choice, Float, Int, Parameter, Values, label
from mgpu_slurm.sweeps.search.space import Space

FACTORS = (0.8, 1.2)
"""A value is multiplied by one of them (Jaderberg et al. 2017)."""

DRAWN_ANEW = 0.25
"""Probability with which a value is drawn at random instead."""


def perturbed(space: Space, params: Values, names: Collection[str], draw: random.Random) -> Values:
    """Return changed values, both in the study's form.

    Args:
        names: the parameters to change; others keep their value. One that becomes active by a change is drawn.
    """
    found: Values = {}
    active: Values = {}
    for parameter in space.parameters:
        name = parameter.name
        if not parameter.is_active(active):
            continue
        # a factor does not change 0
        is_stuck = name in names and isinstance(parameter, Float) and params.get(name) == 0
        if name not in params or is_stuck or (name in names and draw.random() < DRAWN_ANEW):
            found[name] = _drawn(parameter, draw)
        else:
            found[name] = _changed(parameter, params[name], draw) if name in names else params[name]
        active[name] = parameter.restored(found[name])
    return found


def _drawn(parameter: Parameter, draw: random.Random) -> Any:
    sampler = optuna.samplers.RandomSampler(seed=draw.randrange(2**32))
    trial = optuna.create_study(sampler=sampler).ask({parameter.name: parameter.distribution})
    return trial.params[parameter.name]


def _changed(parameter: Parameter, kept: Any, draw: random.Random) -> Any:
    if isinstance(parameter, Choice):
        # the next choice in the file, up or down
        values = [label(value) for value in parameter.values]
        place = values.index(kept) + draw.choice((-1, 1))
        return values[min(max(place, 0), len(values) - 1)]
    assert isinstance(parameter, (Float, Int))
    factor = draw.choice(FACTORS)
    value = min(max(kept * factor, parameter.low), parameter.high)
    if parameter.step is None:
        return value
    places = int((parameter.high - parameter.low) / parameter.step + 1e-9)
    place = round((value - parameter.low) / parameter.step)
    if place == round((kept - parameter.low) / parameter.step):
        # a small change would be lost
        place += 1 if factor > 1 else -1
    return type(kept)(parameter.low + min(max(place, 0), places) * parameter.step)
