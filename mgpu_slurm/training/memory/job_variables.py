"""Find the variables of a job that hold tensors, without keeping a reference to any of them."""

from __future__ import annotations

import ast
import inspect
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

DEPTH = 4
"""Of containers and objects in each other."""
MOST_OBJECTS = 20_000
"""In one look."""

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_NOT_OF_THE_JOB = (f"{Path(__file__).parents[2]}/", f"{Path(torch.__file__).parent}/", "<")
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_ADDING = {"append", "appendleft", "extend", "add", "update", "insert", "setdefault"}


@dataclass
class Look:
    """A look at the variables, and how long it may take."""

    until: float
    """In seconds of `time.perf_counter`."""
    objects: int = 0
    """Number of objects seen."""
    seen: set[int] = field(default_factory=set)
    """Ids of the values of variables; several variables may have the same value."""

    @property
    def is_over(self) -> bool:
        return self.objects > MOST_OBJECTS or time.perf_counter() > self.until


@dataclass(frozen=True)
class Place:
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Variable:
    """A variable of a function or a module, or an attribute of the object in it."""

    file: str
    first_line: int
    """Of the function; 0 for a variable of a module."""
    path: str
    """Such as `losses` or `self.losses`."""
    is_container: bool

    def place(self) -> Place:
        """Return where the variable gets its value, in a loop if possible."""
        return Place(self.file, _line_of(self.file, self.first_line, self.path) or self.first_line or 1)


def variables_of(frame: FrameType | None, look: Look) -> Iterator[tuple[Variable, list[torch.Tensor]]]:
    """Yield the variables of the job's functions that called this frame, and of their modules, with their tensors."""
    modules = set()
    while frame is not None:
        code = frame.f_code
        if is_of_the_job(code.co_filename):
            if code.co_flags & inspect.CO_OPTIMIZED:
                local = frame.f_locals
                yield from _found(dict(local), code.co_filename, code.co_firstlineno, look)
                if isinstance(local, dict):
                    # before Python 3.13, this copy is kept by the frame
                    local.clear()
            if id(frame.f_globals) not in modules:
                modules.add(id(frame.f_globals))
                yield from _found(dict(frame.f_globals), code.co_filename, 0, look)
        frame = frame.f_back


def place_of_call(frame: FrameType | None) -> Place | None:
    """Return the line of the job that led to a frame."""
    while frame is not None:
        if is_of_the_job(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def is_of_the_job(file: str) -> bool:
    """Return whether a file is not of this package, torch, or Python."""
    if file.startswith(_NOT_OF_THE_JOB):
        return False
    # installed packages may lie in its folder
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file.removeprefix(_STANDARD_LIBRARY)


def _found(
    values: dict[str, Any], file: str, first_line: int, look: Look
) -> Iterator[tuple[Variable, list[torch.Tensor]]]:
    for name, value in values.items():
        for path, part in _parts(name, value):
            if look.is_over:
                return
            if id(part) in look.seen:
                continue
            look.seen.add(id(part))
            tensors = list(_tensors_in(part, DEPTH, look))
            if tensors:
                yield Variable(file, first_line, path, isinstance(part, _CONTAINERS)), tensors


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a variable, or the attributes of an object of the job in it."""
    if isinstance(value, nn.Module):
        for place, module in value.named_modules(prefix=name):
            for own, buffer in module.named_buffers(recurse=False):
                if buffer.grad_fn is not None:
                    yield f"{place}.{own}", buffer
            for own, held in vars(module).items():
                if isinstance(held, (*_CONTAINERS, torch.Tensor)) and not own.startswith("_"):
                    yield f"{place}.{own}", held
    elif isinstance(value, (*_CONTAINERS, torch.Tensor)):
        yield name, value
    elif _is_object_of_the_job(value):
        for own, held in vars(value).items():
            if isinstance(held, (*_CONTAINERS, torch.Tensor, nn.Module)):
                yield from _parts(f"{name}.{own}", held)


def _is_object_of_the_job(value: Any) -> bool:
    if isinstance(value, (type, ModuleType, FunctionType, MethodType)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "mgpu_slurm")


def _tensors_in(value: Any, depth: int, look: Look) -> Iterator[torch.Tensor]:
    look.objects += 1
    if isinstance(value, torch.Tensor):
        # a parameter is no mistake
        if not isinstance(value, nn.Parameter):
            yield value
        return
    if depth == 0 or look.is_over:
        return
    if isinstance(value, Mapping):
        children: Any = list(value.values())
    elif isinstance(value, _CONTAINERS):
        # one of limited length does not grow
        children = () if isinstance(value, deque) and value.maxlen is not None else list(value)
    elif _is_object_of_the_job(value) and not isinstance(value, nn.Module):
        children = list(vars(value).values())
    else:
        return
    for child in children:
        yield from _tensors_in(child, depth - 1, look)


@lru_cache(maxsize=8)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return None


def _line_of(file: str, first_line: int, path: str) -> int | None:
    """Return the line that adds to a variable, or the one that sets it; a line in a loop if there is one."""
    tree = _tree(file)
    if tree is None:
        return None
    is_attribute = "." in path
    name = path.rpartition(".")[2]
    # an attribute may be set in any method, under the name that the object has there
    scope = tree if is_attribute else _scope(tree, first_line)
    loops = [node for node in ast.walk(scope) if isinstance(node, (ast.For, ast.While))]
    lines: Iterator[int] = (
        node.lineno  # type: ignore[attr-defined]
        for adding in (True, False)
        for place in (*loops, scope, tree)
        for node in ast.walk(place)
        if _sets(node, name, is_attribute, adding)
    )
    return next(lines, None)


def _scope(tree: ast.Module, first_line: int) -> ast.AST:
    """Return the function that begins in a line, with its decorators; the whole module if there is none."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            begins = [node, *node.decorator_list]
            if min(each.lineno for each in begins) == first_line:
                return node
    return tree


def _sets(node: ast.AST, name: str, is_attribute: bool, adding: bool) -> bool:
    """Return whether a statement adds to a variable, or sets it."""

    def is_it(target: ast.AST) -> bool:
        if is_attribute:
            return isinstance(target, ast.Attribute) and target.attr == name
        return isinstance(target, ast.Name) and target.id == name

    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return adding and node.func.attr in _ADDING and is_it(node.func.value)
    if isinstance(node, ast.AugAssign):
        return adding and is_it(node.target)
    if isinstance(node, ast.Assign) and adding:
        sets_item = any(isinstance(target, ast.Subscript) and is_it(target.value) for target in node.targets)
        names_itself = any(is_it(each) for each in ast.walk(node.value))
        return sets_item or (names_itself and any(map(is_it, node.targets)))
    # the target of an assignment, a loop or a `with`
    is_target = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
    return is_target and not adding and is_it(node)
