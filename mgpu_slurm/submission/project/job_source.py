"""Read a job function from its source, since an import may take seconds for torch alone.

Dataclasses, types and the function's parameters are read as far as they are written out in the file. They are executed
in a separate module, without any other code, so that Python itself evaluates them.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import sys
import types
import typing
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.request import config as configs
from mgpu_slurm.request import target as targets
from mgpu_slurm.request.job_function import JobFunction, from_callable
from mgpu_slurm.submission.project.source_bindings import bindings, may_bind, rebinds

_MODULES = {"__future__", "collections.abc", "dataclasses", "enum", "pathlib", "typing"}
"""Modules whose contents are known, and cheap to import."""

_TYPES = {"bool", "bytes", "dict", "float", "frozenset", "int", "list", "object", "set", "str", "tuple"}
_OWN_CONSTRUCTION = {"__init__", "__new__", "__setattr__", "__getattribute__", "__init_subclass__"}
_SPECIAL = re.compile(r"\b(?:ClassVar|InitVar|KW_ONLY)\b")
"""Annotations of names that are not fields, or not ordinary ones."""

_NAME = "_mgpu_slurm_source"
_NO_FIELD = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.Expr, ast.Pass)

_ANY = ast.Attribute(ast.Name("typing", ast.Load()), "Any", ast.Load())
_NONE = ast.Constant(None)


@dataclass(frozen=True)
class Reading:
    """A job function as read from its source."""

    job: JobFunction
    """Refuses values that the real one refuses by name or by a known type; its function does nothing."""
    is_whole: bool
    """Whether it returns the same config as the real one."""


def read(target: str, workdir: Path) -> Reading | None:
    """Read a job function; return None if its parameters are not written out in its file.

    Args:
        target: `package.module:function`, or `path/to/file.py:function`.
        workdir: the job's working directory in the snapshot.

    Raises:
        UserError: there is no such file or function, the file is not Python, or the function is not a job function.
    """
    module, function = targets.split(target)
    path = file_of(module, workdir)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise targets.import_failure(error, module, workdir) from None
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    file = _File(tree)
    if file.is_uncertain:
        return None
    if function not in file.bound:
        if may_bind(tree, function):
            return None
        raise targets.no_function(target, file.functions())
    return file.reading(target, function)


def file_of(module: str, workdir: Path) -> Path | None:
    """Return the module's file in the run's code; None for an installed module.

    Raises:
        UserError: it is neither.
    """
    if module.endswith(".py"):
        return targets.existing_file(workdir / module, module)
    parts = module.split(".")
    for base in (workdir, workdir / "src"):
        place = base.joinpath(*parts)
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    is_own = any((base / parts[0] / "__init__.py").is_file() for base in (workdir, workdir / "src"))
    if is_own or not _is_installed(parts[0]):
        raise targets.not_found(module, workdir)
    return None


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported from outside the working directory, which the job does not see."""
    here = os.path.realpath(os.getcwd())
    places = [place for place in sys.path if place and os.path.realpath(place) != here]
    finders = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]
    found = importlib.machinery.PathFinder.find_spec(package, places)
    return found is not None or any(finder.find_spec(package, None) is not None for finder in finders)


class _File:
    """The module-level names of a file, and which of them can be evaluated without running it."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self.bound = Counter(bindings(tree))
        self.is_uncertain = "*" in self.bound or "__getattr__" in self.bound or rebinds(tree)
        self._types: set[str] = set()
        """Names of types, or of modules with types."""
        self._modules: set[str] = set()
        self._classes: dict[str, set[str]] = {}
        """Dataclasses, with the names of their fields."""
        self._values: set[str] = set()
        """Names of immutable values."""
        self._inexact: set[str] = set()
        """Classes whose behavior is not fully known."""

    def functions(self) -> list[str]:
        return [node.name for node in self._tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]

    def reading(self, target: str, function: str) -> Reading | None:
        """
        Raises:
            UserError: the function cannot be called with a run and a config.
        """
        written = [node for node in self._tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        if len(written) != 1 or self.bound[function] != 1 or written[0].decorator_list:
            return None
        # typing.Any replaces unknown types
        kept: list[ast.stmt] = [ast.Import([ast.alias("typing")])]
        for node in self._tree.body:
            kept += self._known(node)
        signature = self._signature(written[0])
        if signature is None:
            return None
        reduced, is_exact = signature
        if (namespace := _run([*kept, reduced])) is None:
            return None
        job = from_callable(namespace[function], target)
        used = {cls.__name__ for cls in configs.types_in(job.config_class)}
        return Reading(job, is_exact and not used & self._inexact)

    def _known(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the known part of a statement; empty if nothing is known."""
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in _MODULES:
            names = [alias for alias in node.names if self.bound[alias.asname or alias.name] == 1]
            self._types |= {alias.asname or alias.name for alias in names}
            return [ast.ImportFrom(node.module, names, 0)] if names else []
        if isinstance(node, ast.Import):
            names = [a for a in node.names if a.name in _MODULES and self.bound[a.asname or a.name.split(".")[0]] == 1]
            self._modules |= {alias.asname or alias.name.split(".")[0] for alias in names}
            return [ast.Import(names)] if names else []
        if isinstance(node, ast.ClassDef) and self.bound[node.name] == 1:
            return self._dataclass(node) or self._enum(node)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            return self._assignment(node, node.targets[0].id)
        return []

    def _assignment(self, node: ast.Assign, name: str) -> list[ast.stmt]:
        if self.bound[name] != 1:
            return []
        if _is_literal(node.value, constant=True):
            self._values.add(name)
        elif self._is_type(node.value):
            self._types.add(name)
        else:
            return []
        return [node]

    # -- classes

    def _dataclass(self, node: ast.ClassDef) -> list[ast.stmt]:
        is_known = len(node.decorator_list) == 1 and self._is_dataclass_decorator(node.decorator_list[0])
        bases = [base.id if isinstance(base, ast.Name) else "" for base in node.bases]
        if not is_known or node.keywords or getattr(node, "type_params", None) or set(bases) - set(self._classes):
            return []
        fields = {each.target.id for each in node.body if _is_field(each)}
        fields = fields.union(*(self._classes[base] for base in bases))
        # names that the class binds hide those of the module
        taken = fields | _OWN_CONSTRUCTION | self._values | self._types | self._modules | _TYPES
        body: list[ast.stmt] = [ast.Pass()]
        is_exact = not set(bases) & self._inexact
        for each in node.body:
            names = set(bindings(ast.Module([each], [])))
            if _is_field(each):
                kind, is_known = self._kind(each.annotation)
                if not is_known and _SPECIAL.search(ast.unparse(each.annotation)):
                    return []
                value, is_written = self._default(each.value)
                is_exact = is_exact and is_known and is_written
                body.append(ast.AnnAssign(each.target, kind, value, 1))
            elif names & taken or not isinstance(each, _NO_FIELD):
                return []
            elif "__post_init__" in names:
                is_exact = False
        self._types.add(node.name)
        self._classes[node.name] = fields
        if not is_exact:
            self._inexact.add(node.name)
        return [_class(node, body, node.decorator_list)]

    def _is_dataclass_decorator(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            is_plain = not node.args and all(keyword.arg and _is_literal(keyword.value) for keyword in node.keywords)
            return is_plain and self._is_dataclass_decorator(node.func)
        if isinstance(node, ast.Attribute):
            return node.attr == "dataclass" and isinstance(node.value, ast.Name) and node.value.id in self._modules
        return isinstance(node, ast.Name) and node.id == "dataclass" and node.id in self._types

    def _enum(self, node: ast.ClassDef) -> list[ast.stmt]:
        is_enum = all(isinstance(base, ast.Name) and base.id in self._types | _TYPES for base in node.bases)
        is_plain = all(
            (isinstance(each, ast.Assign) and _is_literal(each.value)) or _is_text(each) for each in node.body
        )
        if not (is_enum and is_plain and node.bases) or node.decorator_list or node.keywords:
            return []
        self._types.add(node.name)
        # its members are values
        self._modules.add(node.name)
        return [_class(node, node.body, [])]

    # -- parameters, types and values

    def _signature(self, node: ast.FunctionDef) -> tuple[ast.stmt, bool] | None:
        """Return the function without its body, and whether its parameters are all known.

        Return None if the type of the config is not.
        """
        written = node.args
        ordered = [*written.posonlyargs, *written.args]
        others = [*ordered[1:], *written.kwonlyargs]
        kinds = {each.arg: self._kind(each.annotation) for each in others if each.annotation is not None}
        if others and not kinds.get(others[0].arg, (None, True))[1]:
            # it decides how the others are passed
            return None
        defaults = [self._default(value) for value in written.defaults]
        named = [self._default(value) for value in written.kw_defaults]

        def reduced(each: ast.arg | None) -> ast.arg | None:
            return None if each is None else ast.arg(each.arg, kinds[each.arg][0] if each.arg in kinds else None)

        arguments = ast.arguments(
            posonlyargs=list(filter(None, map(reduced, written.posonlyargs))),
            args=list(filter(None, map(reduced, written.args))),
            vararg=reduced(written.vararg),
            kwonlyargs=list(filter(None, map(reduced, written.kwonlyargs))),
            kw_defaults=[value for value, _ in named],
            kwarg=reduced(written.kwarg),
            defaults=[value or _NONE for value, _ in defaults],
        )
        function = ast.parse(f"def {node.name}(): pass").body[0]
        assert isinstance(function, ast.FunctionDef)
        function.args = arguments
        return function, all(is_known for _, is_known in [*kinds.values(), *defaults, *named])

    def _kind(self, annotation: ast.expr | None) -> tuple[ast.expr, bool]:
        """Return a type, and whether it is the one in the source."""
        is_known = annotation is not None and self._is_type(annotation)
        return (annotation, True) if annotation is not None and is_known else (_ANY, False)

    def _default(self, value: ast.expr | None) -> tuple[ast.expr | None, bool]:
        """Return a value, and whether it is the one in the source; a placeholder for an unknown default."""
        return (value, True) if value is None or self._is_value(value) else (_NONE, False)

    def _is_type(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._types or (node.id in _TYPES and node.id not in self.bound)
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.value.id in self._modules - self._types
        if isinstance(node, ast.Subscript):
            is_literal = ast.unparse(node.value).rpartition(".")[2] == "Literal"
            return self._is_type(node.value) and (_is_literal(node.slice) if is_literal else self._is_type(node.slice))
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.BitOr) and self._is_type(node.left) and self._is_type(node.right)
        if isinstance(node, (ast.Tuple, ast.List)):
            return all(map(self._is_type, node.elts))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self._is_type(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return False
        return isinstance(node, ast.Constant) and node.value in (None, ...)

    def _is_value(self, node: ast.expr) -> bool:
        """Return whether a default is fixed by the source: a computed one may differ at the next import."""
        if isinstance(node, ast.Name):
            return node.id in self._values
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.value.id in self._modules & self._types
        if not isinstance(node, ast.Call):
            return _is_literal(node)
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == "field" and called in self._types:
            return not node.args and all(map(self._is_option, node.keywords))
        is_known = called in self._classes or (called == "Path" and called in self._types)
        return is_known and all(map(self._is_value, [*node.args, *(keyword.value for keyword in node.keywords)]))

    def _is_option(self, keyword: ast.keyword) -> bool:
        """Return whether an option of `field` is known, such as `default=3` or `default_factory=lambda: [1, 2]`.

        A factory may also be a builtin such as `list`, or a nested class.
        """
        value = keyword.value
        if keyword.arg != "default_factory":
            return self._is_value(value)
        if isinstance(value, ast.Lambda):
            return not ast.unparse(value.args) and self._is_value(value.body)
        is_builtin = isinstance(value, ast.Name) and value.id in _TYPES and value.id not in self.bound
        return is_builtin or (isinstance(value, ast.Name) and value.id in self._classes)


def _is_field(node: ast.stmt) -> typing.TypeGuard[typing.Any]:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _is_literal(node: ast.expr, constant: bool = False) -> bool:
    """
    Args:
        constant: whether the value must be immutable.
    """
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return not constant or isinstance(value, (str, int, float, bool, type(None)))


def _class(node: ast.ClassDef, body: list[ast.stmt], decorators: list[ast.expr]) -> ast.stmt:
    made = ast.parse(f"class {node.name}: pass").body[0]
    assert isinstance(made, ast.ClassDef)
    made.bases, made.body, made.decorator_list = node.bases, body, decorators
    return made


def _run(statements: list[ast.stmt]) -> dict[str, typing.Any] | None:
    """Return the names that known statements define; None if executing them fails."""
    future = [node for node in statements if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    ordered = [*future, *(node for node in statements if node not in future)]
    module = types.ModuleType(_NAME)
    # dataclasses and typing look up names in the module of a class
    sys.modules[_NAME] = module
    try:
        tree = ast.fix_missing_locations(ast.Module(ordered, []))
        exec(compile(tree, _NAME, "exec", dont_inherit=True), vars(module))
        classes = [each for each in vars(module).values() if getattr(each, "__module__", "") == _NAME]
        configs.resolve_classes(
            {cls: typing.get_type_hints(cls, include_extras=True) for cls in classes if configs.field_types(cls)}
        )
    except Exception:
        # the real module will report the error
        return None
    finally:
        del sys.modules[_NAME]
    return vars(module)
