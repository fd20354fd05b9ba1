"""Job functions: find the config that a function takes, and call it.

It is called as `train(run, config)`, or with config values by name, such as `train(run, lr=0.1, epochs=3)`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from inspect import Parameter
from pathlib import Path
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Annotations, Config

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_TYPES_OF_DEFAULTS = (bool, int, float, str, Path, Enum, list, dict, tuple, set)


@dataclasses.dataclass(frozen=True)
class JobFunction:
    """A function that ranks call, and the type of its config."""

    name: str
    """The target's name, for errors."""
    function: Callable[..., Any]
    config_class: Any
    """A dataclass or a pydantic model; None for a function that takes a plain mapping."""
    by_name: bool = False
    """Whether the fields of `config_class` are passed as parameters of the function."""
    beside: tuple[str, ...] = ()
    """Parameters next to the one that takes the whole config; they keep their defaults."""
    untyped: str | None = None
    """The parameter that takes the whole config, if it has neither an annotation nor a default."""

    def fill(self, values: Config, base: Path) -> Any:
        """Return the complete config, with defaults; see `mgpu_slurm.request.config.fill` for what is refused.

        Args:
            base: the folder that relative paths start from.
        """
        what = f"config of {self.name}"
        if self.untyped in values and not isinstance(value := values[self.untyped], (dict, type(None))):
            raise UserError(
                f"{what}: parameter {self.untyped!r} has no annotation, so it takes all values as one mapping:"
                f" annotate it ({self.untyped}: {type(value).__name__}) to pass {value!r}"
            )
        for key in values:
            if key in self.beside and key not in (configs.field_types(self.config_class) or ()):
                raise UserError(
                    f"{what}: {key!r} is a parameter besides the one for all config values: move it into that one"
                )
        if self.config_class is None:
            return values
        return configs.absolute_paths(configs.fill(self.config_class, values, what), base)

    def fill_plain(self, values: Config, base: Path) -> Config:
        """Return the complete config as plain values."""
        plain: Config = configs.to_plain(self.fill(values, base))
        return plain

    def is_resolved(self, config: Config, base: Path) -> bool:
        """Return whether a complete config stays the same when it is filled in again.

        A config that computes values from others, or has values that cannot be given, does not.
        """
        try:
            return self.fill_plain(config, base) == config
        except Exception:
            # the config's own code may raise anything
            return False

    def call(self, run: Any, config: Any) -> Any:
        """Call the function on this rank; return what it returns."""
        if not self.by_name:
            return self.function(run, config)
        return self.function(run, **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def from_callable(function: Any, name: str) -> JobFunction:
    """Return a callable as a job function.

    Raises:
        UserError: it cannot be called with a run and a config, or its config values cannot be determined.
    """
    if not callable(function):
        raise UserError(
            f"target {name!r} is of type {type(function).__name__}, not a function:"
            " name a function such as train(run, config)"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].kind is Parameter.VAR_POSITIONAL:
        # a decorator that hides the signature of what it wraps
        return JobFunction(name, function, None)
    others = parameters[1:]
    if not others or parameters[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        raise UserError(
            f"target {name!r} is {_form(function)}: it must take the run and a config, as in train(run, config) or"
            " train(run, lr=0.1)"
        )
    types_of = _annotations(function, others)
    if _takes_all(others, types_of):
        kind = _without_none(types_of[others[0].name])
        beside = tuple(other.name for other in others[1:] if other.kind not in _VARIADIC)
        untyped = others[0].name if others[0].annotation is others[0].default is Parameter.empty else None
        config_class = kind if configs.field_types(kind) is not None else None
        return JobFunction(name, function, config_class, beside=beside, untyped=untyped)
    _check_can_be_named(function, name, others)
    return JobFunction(name, function, _class_of(others, types_of, name), by_name=True)


def _form(function: Any) -> str:
    return f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}"


def _annotations(function: Any, parameters: Iterable[Parameter]) -> Annotations:
    """Return types by parameter name, with `Any` for a parameter without an annotation."""
    # the types of the run and the result may be importable for type checkers only
    written = {each.name: each.annotation for each in parameters if each.annotation is not Parameter.empty}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    found: Annotations = {}
    for name, annotation in written.items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            found |= typing.get_type_hints(holder, globalns=names, include_extras=True)
        except NameError as error:
            raise UserError(
                f"the annotation of {name!r} in {_called(function)} cannot be resolved: {error}: import that name"
            ) from None
    return {each.name: found.get(each.name, Any) for each in parameters}


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _takes_all(others: list[Parameter], types_of: Annotations) -> bool:
    """Return whether the first of these parameters takes the whole config, and the others keep their defaults."""
    first, *rest = others
    if first.kind is Parameter.VAR_POSITIONAL:
        return True
    if first.kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        return False
    rest = [each for each in rest if each.kind not in _VARIADIC]
    is_only = not rest or (first.default is Parameter.empty and all(each.default is not each.empty for each in rest))
    return is_only and _can_take_all(first, _without_none(types_of[first.name]))


def _can_take_all(parameter: Parameter, kind: Any) -> bool:
    if kind is Any:
        is_empty = parameter.default is None or isinstance(parameter.default, Mapping)
        return parameter.default is Parameter.empty or (parameter.name == "config" and is_empty)
    origin = typing.get_origin(kind) or kind
    return configs.field_types(kind) is not None or (isinstance(origin, type) and issubclass(origin, Mapping))


def _without_none(kind: Any) -> Any:
    """Return `Config` for `Config | None`."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    return parts[0] if len(parts) == 1 else kind


def _check_can_be_named(function: Any, name: str, parameters: Iterable[Parameter]) -> None:
    for each in parameters:
        if each.kind is Parameter.VAR_KEYWORD:
            raise UserError(
                f"target {name!r} is {_form(function)}: the config values that **{each.name} takes are"
                " unknown: name them, such as lr=0.1, or take one mapping: train(run, config)"
            )
        if each.kind is Parameter.POSITIONAL_ONLY:
            raise UserError(
                f"target {name!r} is {_form(function)}: config values are passed by name, but {each.name!r} is"
                " positional-only: remove the /"
            )


def _class_of(parameters: Iterable[Parameter], types_of: Annotations, name: str) -> Any:
    """Return a dataclass with the parameters as its fields."""
    fields: list[Any] = []
    for each in parameters:
        if each.kind is Parameter.VAR_POSITIONAL:
            continue
        kind = types_of[each.name] if each.annotation is not Parameter.empty else _type_of_default(each.default)
        if each.default is Parameter.empty:
            fields.append((each.name, kind))
        elif kind is not None and _is_plain(each.default):
            default = functools.partial(copy.deepcopy, each.default)
            fields.append((each.name, kind, dataclasses.field(default_factory=default)))
    return dataclasses.make_dataclass(name.rpartition(":")[2].rpartition(".")[2], fields, kw_only=True)


def _type_of_default(default: Any) -> Any:
    """Return the type of a parameter without an annotation; None if a config cannot hold its values."""
    if default is Parameter.empty or default is None:
        return Any
    is_known = isinstance(default, _TYPES_OF_DEFAULTS) or dataclasses.is_dataclass(default)
    # a default of PosixPath stands for Path
    return Path if isinstance(default, Path) else type(default) if is_known and not isinstance(default, type) else None


def _is_plain(value: Any) -> bool:
    """Return whether a config file can hold the value; a parameter whose default it cannot hold keeps the default."""
    try:
        configs.to_plain(value)
    except UserError:
        return False
    return True
