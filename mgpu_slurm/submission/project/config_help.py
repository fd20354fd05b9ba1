"""The config of a job for `submit TARGET --help`: its values with their types, defaults and comments."""

from __future__ import annotations

import ast
import dataclasses
import io
import tokenize
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config as configs
from mgpu_slurm.request import target as targets
from mgpu_slurm.submission.project import job_source

REQUIRED = "required"
_UNKNOWN = "its source does not show the config: `--dry-run --check` imports it"


def rows(target: str, workdir: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return a title, and for each value of a job's config its name and a description. The job is not imported.

    Raises:
        UserError: there is no such job.
    """
    module, function = targets.split(target)
    if module.endswith(".py") and not (workdir / module).is_file():
        raise UserError(f"target {target!r}: there is no file {module!r} here")
    title = f"Config of {module}:{function}, as key=value"
    reading = job_source.read(f"{module}:{function}", workdir)
    kind: Any = None if reading is None else reading.job.config_class
    if reading is None or not _is_dataclass(kind):
        is_mapping = reading is not None and reading.is_whole
        return title, [(target, "any values" if is_mapping else _UNKNOWN)]
    path = job_source.file_of(module, workdir)
    comments = {} if path is None else _comments(path)
    owner = function if reading.job.by_name else kind.__name__
    found = [*_rows(kind, owner, comments, "")]
    return title, [*found, *([] if reading.is_whole else [("...", _UNKNOWN)])]


def _rows(kind: Any, owner: str, comments: Mapping[tuple[str, str], str], prefix: str) -> Iterator[tuple[str, str]]:
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        each: Any = types[field.name]
        if _is_dataclass(each):
            yield from _rows(each, each.__name__, comments, f"{prefix}{field.name}.")
            continue
        told = comments.get((owner, field.name), "")
        yield f"{prefix}{field.name}", f"{_type(each)}, {_default(field)}{'  # ' if told else ''}{told}"


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _type(kind: Any) -> str:
    # `list[int]` is a type too for Python 3.10
    is_plain = isinstance(kind, type) and not typing.get_args(kind)
    return kind.__name__ if is_plain else str(kind).replace("typing.", "")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return REQUIRED
    try:
        return f"default {configs.to_plain(value)!r}"
    except UserError:
        return f"default {value!r}"


def _comments(path: Path) -> dict[tuple[str, str], str]:
    """Return what the source says of each field of a class, or parameter of a function, by the names of both."""
    source = path.read_text()
    behind = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for owner in ast.walk(ast.parse(source)):
        if isinstance(owner, ast.ClassDef):
            for node, after in zip(owner.body, [*owner.body[1:], None], strict=True):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found[owner.name, node.target.id] = behind.get(node.end_lineno or 0, "") or _text(after)
        elif isinstance(owner, ast.FunctionDef):
            # the first one is the run
            arguments = [*owner.args.posonlyargs, *owner.args.args, *owner.args.kwonlyargs][1:]
            lines = [argument.lineno for argument in arguments]
            for argument in arguments:
                # a comment behind several belongs to none of them
                is_alone = lines.count(argument.lineno) == 1
                found[owner.name, argument.arg] = behind.get(argument.lineno, "") if is_alone else ""
    return found


def _text(node: ast.stmt | None) -> str:
    """Return the first line of a documentation string."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return node.value.value.strip().splitlines()[0] if is_text else ""  # type: ignore[union-attr]
