"""CMA-ES optimizers as text that cannot contain code, unlike a pickle, which may run code when it is loaded.

The text is JSON in base64, since databases may limit an attribute to 2,048 characters after quotes are escaped. Like
cmaes' own pickles it leaves out the random generator, which Optuna seeds before each use.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

_CLASSES = ("CMA", "SepCMA", "CMAwM")
_DTYPES = ("float64", "int64", "bool")


def to_text(optimizer: Any) -> str:
    return base64.b64encode(json.dumps(_encoded(optimizer)).encode()).decode()


def from_text(text: str) -> Any:
    """Return the optimizer; None if the text is not that of an optimizer of the installed version of cmaes."""
    try:
        found = json.loads(base64.b64decode(text, validate=True))
        is_known = any(_form(found) == _form(_encoded(example)) for example in _examples())
        return _decoded(found) if is_known else None
    except Exception:
        # a forged text may fail anywhere
        return None


def _encoded(value: Any) -> Any:
    if type(value).__name__ in _CLASSES:
        # the state that pickle would store
        state = value.__reduce_ex__(2)[2]
        return {"class": type(value).__name__, "state": {name: _encoded(each) for name, each in state.items()}}
    if isinstance(value, (np.ndarray, np.generic)):
        return {"dtype": value.dtype.name, "shape": value.shape, "values": value.ravel().tolist()}
    return value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "class" in value:
        return _made(value["class"], {name: _decoded(each) for name, each in value["state"].items()})
    array = np.array(value["values"], dtype=_one_of(_DTYPES, value["dtype"])).reshape(value["shape"])
    # NumPy scalars compute differently from Python's
    return array if value["shape"] else array[()]


def _made(name: str, state: dict[str, object]) -> Any:
    # the import takes half a second, and few sweeps need it
    import cmaes

    cls = getattr(cmaes, _one_of(_CLASSES, name))
    made = cls.__new__(cls)
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        vars(made).update(state)
    return made


def _one_of(known: tuple[str, ...], name: str) -> str:
    return known[known.index(name)]


def _form(encoded: Any) -> Any:
    """Return the class of an optimizer and the names of its attributes, to any depth."""
    if not isinstance(encoded, dict) or "class" not in encoded:
        return None
    return encoded["class"], {name: _form(each) for name, each in encoded["state"].items()}


def _examples() -> list[Any]:
    import cmaes

    mean, bounds = np.zeros(2), np.array([[-1.0, 1.0]] * 2)
    plain = [cmaes.CMA(mean, 1.0), cmaes.SepCMA(mean, 1.0)]
    return [*plain, *(cmaes.CMAwM(mean, 1.0, bounds, steps) for steps in (np.zeros(2), np.ones(2)))]
