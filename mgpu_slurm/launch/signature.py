"""A job's config class as plain data.

The class itself comes only with the job's module, and that with torch: seconds on a login node. Its description is kept
beside the code that it was read from (see `checked`), and values can be checked against a class that is made from it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import operator
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from mgpu_slurm import config as configs

_PLAIN_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "path": Path,
    "none": type(None),
    "any": Any,
}
_PLAIN_NAMES = {kind: name for name, kind in _PLAIN_TYPES.items()}
_GENERICS: dict[str, Any] = {"list": list, "dict": dict, "tuple": tuple}
_GENERIC_NAMES = {kind: name for name, kind in _GENERICS.items()}

Description = Any


class _Indescribable(Exception):
    """The class checks more than a description can say."""


def describe(cls: Any, code: Path) -> Description | None:
    """Fields, types and defaults of a dataclass that is defined in the folder `code`.

    None where values have to be checked by the class itself: because it runs code of its own (`__post_init__`, pydantic
    validators), has types of its own, or is defined outside of what the snapshot holds.
    """
    try:
        return _describe_class(cls, code)
    except _Indescribable:
        return None


def _describe_class(cls: Any, code: Path) -> Description:
    own_code = hasattr(cls, "__post_init__") or hasattr(cls, "__pydantic_validator__") or cls.__bases__ != (object,)
    if own_code or not Path(inspect.getfile(cls)).is_relative_to(code) or not _has_written_defaults(cls):
        raise _Indescribable
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = []
    for field in dataclasses.fields(cls):
        default = _default(field)
        fields.append([field.name, _describe_type(hints[field.name], code), *default])
        if not field.init:
            raise _Indescribable
    return {"class": cls.__name__, "fields": fields}


def _has_written_defaults(cls: Any) -> bool:
    """Whether each default stands in the source as it is: one that is computed may be another one tomorrow."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    values = [node.value for node in definition.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    return all(_is_written(value) for value in values)


def _is_written(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        try:
            ast.literal_eval(value)
        except ValueError:
            return False
        return True
    if not isinstance(value.func, ast.Name):
        return False
    if value.func.id == "Path":
        return all(isinstance(argument, ast.Constant) for argument in value.args)
    return value.func.id == "field" and not value.args and all(_is_default(keyword) for keyword in value.keywords)


def _is_default(keyword: ast.keyword) -> bool:
    """`default=3`, `default_factory=list` or that of a nested class, `default_factory=lambda: [1, 2]`."""
    if keyword.arg != "default_factory":
        return _is_written(keyword.value)
    if isinstance(keyword.value, ast.Lambda):
        return _is_written(keyword.value.body)
    # a nested dataclass is looked at as the type of its field; any other callable has no type that is described
    return isinstance(keyword.value, ast.Name) and (keyword.value.id in _GENERICS or keyword.value.id[0].isupper())


def _default(field: dataclasses.Field[Any]) -> list[Any]:
    """The default as a plain value, in a list that is empty where there is none."""
    if field.default is not dataclasses.MISSING:
        return [configs.to_plain(field.default)]
    if field.default_factory is not dataclasses.MISSING:
        return [configs.to_plain(field.default_factory())]
    return []


def _describe_type(kind: Any, code: Path) -> Description:
    if dataclasses.is_dataclass(kind):
        return _describe_class(kind, code)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ["literal", *(_plain_literal(value) for value in arguments)]
    if origin in (Union, types.UnionType):
        return ["union", *(_describe_type(argument, code) for argument in arguments)]
    if origin in _GENERIC_NAMES and Ellipsis not in arguments:
        return [_GENERIC_NAMES[origin], *(_describe_type(argument, code) for argument in arguments)]
    if isinstance(kind, typing.Hashable) and kind in _PLAIN_NAMES:
        return _PLAIN_NAMES[kind]
    raise _Indescribable


def _plain_literal(value: Any) -> Any:
    if not isinstance(value, (str, int, type(None))):
        raise _Indescribable
    return value


def rebuild(description: Description) -> Any:
    """A dataclass that takes and refuses the same values as the described one."""
    from pydantic import TypeAdapter

    fields: list[Any] = []
    for name, described, *default in description["fields"]:
        kind = _rebuild_type(described)
        if default:
            make_default = functools.partial(TypeAdapter(kind).validate_python, default[0])
            fields.append((name, kind, dataclasses.field(default_factory=make_default)))
        else:
            fields.append((name, kind))
    return dataclasses.make_dataclass(description["class"], fields, kw_only=True)


def _rebuild_type(described: Description) -> Any:
    if isinstance(described, str):
        return _PLAIN_TYPES[described]
    if isinstance(described, dict):
        return rebuild(described)
    form, *arguments = described
    if form == "literal":
        return Literal[tuple(arguments)]
    parts = tuple(_rebuild_type(argument) for argument in arguments)
    return functools.reduce(operator.or_, parts) if form == "union" else _GENERICS[form][parts]
