"""Read YAML files and `key=value` overrides, and validate them into dataclasses.

Used for a job's config, the cluster file and `spec.yaml`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mgpu_slurm.core.errors import UserError, nearest

T = TypeVar("T")

Config: TypeAlias = dict[str, object]
"""Values of a job's config by key, or of another YAML file before `fill` checks them.

A value is what YAML can hold: a text, a number, true, false, null, a list, or a mapping with values of its own.
"""

Annotations: TypeAlias = dict[str, object]
"""The types of a class's fields, or of a function's parameters, by name."""

# YAML 1.1 reads 1e-3 as a string; users mean a number.
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def _loader() -> Any:
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        """A safe loader that reads 1e-3 as a number and refuses duplicate keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    mark = key_node.start_mark
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", mark)
                seen.add(key)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            # YAML 1.1 reads the time 4:00:00 as 14400, in base 60
            return node.value if ":" in node.value else super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^{_FLOAT.pattern}$"), list("-+0123456789."))
    return Loader


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        UserError: the text is not valid YAML; names file, line and column.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise UserError(f"{place}: {error.problem}: fix the YAML there") from None
    except yaml.YAMLError as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"{source}: {first_line}: fix the YAML there") from None


def read_yaml(path: Path) -> Config:
    """Return the mapping in a YAML file; an empty one for an empty file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r} ({error.strerror}): check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{str(path)!r} is not a text file in UTF-8: save it as UTF-8") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected `key: value` lines, found a {type(value).__name__}")
    return value


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML text, with keys in their order."""
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return text


def parse_overrides(items: typing.Sequence[str]) -> Config:
    """Return `["lr=0.1", "model.width=32"]` as a nested mapping; values are read as YAML."""
    values: Config = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", key):
            raise UserError(f"{item!r} is not key=value: put the key before the =, with dots if it is nested")
        put(values, key, _parse_value(item, text), item)
    return values


def put(values: Config, key: str, value: object, what: str) -> None:
    """Set a value by its dotted name: `model.width` inside `model`.

    Args:
        what: names the value in errors.

    Raises:
        UserError: a parent of the key was already set as a whole.
    """
    *parents, last = key.split(".")
    place = values
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UserError(f"{what!r} sets a key inside {parent!r}, but another key=value sets all of it")
        place = inner
    place[last] = value


def _parse_value(item: str, text: str) -> Any:
    if not text:
        return ""
    try:
        return parse_yaml(text, item)
    except UserError:
        raise UserError(f"{item!r}: incomplete YAML value: quote it for the shell") from None


def merge(base: Config, over: Config) -> Config:
    """Return `base` updated with `over`, merging mappings key by key; neither argument is changed."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def only(values: Config, wanted: Config) -> Config:
    """Return the values whose keys are in `wanted`, also in nested mappings."""
    kept: Config = {}
    for key, inner in wanted.items():
        value = values[key]
        kept[key] = only(value, inner) if isinstance(value, dict) and isinstance(inner, dict) else value
    return kept


def fill(cls: type[T], values: Config, what: str) -> T:
    """Return an instance of a dataclass from plain values, with all names and types checked.

    Args:
        cls: a dataclass (standard library or pydantic) or a pydantic model; nested ones are filled too.
        values: plain values, as read from YAML or JSON.
        what: names the values in errors, for example ``config of jobs.digits:train``.

    Raises:
        UserError: names the first wrong key (with the nearest right one) or value (with what was expected).
    """
    _refuse_unknown_keys(cls, values, what, prefix="")
    from pydantic import ValidationError

    try:
        # for type checkers not every class is hashable
        wanted: Any = cls
        filled: T = _adapter(wanted).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{what}: {_explain(first)}") from None
    return filled


@functools.lru_cache(maxsize=32)
def _adapter(cls: Any) -> Any:
    """Return what validates values of a class; making it takes 20 ms for a spec, which a report reads for each run."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(cls, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            raise
        return TypeAdapter(cls)


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"]
    if problem["type"] == "missing":
        return f"{key!r} has no default and was not given: add {key}=VALUE"
    message = message.removeprefix("Value error, ").removeprefix("Input ").removeprefix("should be ")
    # it repeats the message
    message = message.partition(", unable to ")[0].replace("a valid boolean", "true or false")
    # pydantic names Python's types, but the values come from YAML
    message = message.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")
    if problem["type"] in ("value_error", "assertion_error"):
        return f"{key}: {message}" if key else message
    return f"{key}={problem['input']!r}: expected {message}"


def _refuse_unknown_keys(cls: Any, values: Config, what: str, prefix: str) -> None:
    types_of_fields = field_types(cls)
    if types_of_fields is None:
        return
    for key, value in values.items():
        if key not in types_of_fields:
            raise UserError(f"{what}: unknown key {prefix + str(key)!r}{nearest(str(key), list(types_of_fields))}")
        nested = _dataclass_in(types_of_fields[key])
        if nested is not None and isinstance(value, dict):
            _refuse_unknown_keys(nested, value, what, f"{prefix}{key}.")


def field_types(cls: Any) -> Annotations | None:
    """Return names and types of the fields that can be given; None if the class has no fixed fields."""
    if dataclasses.is_dataclass(cls):
        # for type checkers not every class is hashable
        wanted: Any = cls
        hints = _hints(wanted)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    if hasattr(cls, "model_fields"):
        return {name: field.annotation for name, field in cls.model_fields.items()}
    return None


@functools.lru_cache(maxsize=256)
def _hints(cls: Any) -> Annotations:
    """Return the types of a dataclass; a report asks for those of a spec thousands of times."""
    return typing.get_type_hints(cls, include_extras=True)


def types_in(cls: Any) -> dict[type, Annotations]:
    """Return the field types of a dataclass, its bases and nested ones, for `resolve_classes` in another process."""
    found: dict[type, Annotations] = {}
    waiting = [cls]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or kind in found:
            continue
        found[kind] = typing.get_type_hints(kind, include_extras=True)
        waiting += [*found[kind].values(), *kind.__mro__[1:]]
    return found


def resolve_classes(types_of_fields: dict[type, Annotations]) -> None:
    """Repair dataclasses that were pickled in another process.

    They lack their field types, whose names may be unknown in this process, and the sentinel for a missing default.
    """
    for cls, hints in types_of_fields.items():
        own = inspect.get_annotations(cls)
        cls.__annotations__ = {name: hints[name] for name in own}
        for field in dataclasses.fields(cls):
            field.type = hints[field.name]
            for default in ("default", "default_factory"):
                if isinstance(getattr(field, default), type(dataclasses.MISSING)):
                    setattr(field, default, dataclasses.MISSING)


def _dataclass_in(annotation: Any) -> Any:
    """Return the dataclass in an annotation such as `Model` or `Model | None`, or None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        found = [_dataclass_in(part) for part in typing.get_args(annotation)]
        return next((cls for cls in found if cls is not None), None)
    return annotation if field_types(annotation) is not None else None


def to_plain(value: Any, what: str | None = None) -> Any:
    """Return a config as plain values for YAML and JSON; paths become text, NumPy numbers Python numbers.

    Args:
        what: names the value in errors.

    Raises:
        UserError: a value has no plain form.
    """
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value, inf_nan_mode="constants", fallback=_plain_number)
    except (PydanticSerializationError, TypeError) as error:
        raise UserError(f"{what or f'config {type(value).__name__}'}: {error}: use plain values there") from None


def _plain_number(value: Any) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


def _field_names(value: Any) -> list[str]:
    """Return the field names of an instance of a dataclass or pydantic model; none for anything else."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(getattr(type(value), "model_fields", ()))


def absolute_paths(value: Any, base: Path) -> Any:
    """Return the config with every `Path` made absolute: the job runs in another folder than the submission."""
    if isinstance(value, Path):
        return base / value.expanduser()
    names = _field_names(value)
    for name in names:
        old = getattr(value, name)
        new = absolute_paths(old, base)
        if new is not old:
            # works for frozen ones too, which is safe: nobody else holds this config yet
            object.__setattr__(value, name, new)
    if names:
        return value
    if isinstance(value, (list, set, frozenset)) or type(value) is tuple:
        return type(value)(absolute_paths(item, base) for item in value)
    if isinstance(value, dict):
        return {key: absolute_paths(item, base) for key, item in value.items()}
    return value
