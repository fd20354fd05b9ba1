"""Find the module-level names that a source file binds, and whether it may bind others that its text does not show."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_REBINDING = {"delattr", "exec", "eval", "globals", "locals", "setattr", "vars"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def bindings(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module's own statements bind, once per binding; `*` for unknown names."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            # setting an attribute or item, however deep, changes the name's value
            root: ast.expr = node
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            yield from [root.id] if isinstance(root, ast.Name) else []
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name is not None:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest is not None:
            yield node.rest
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield from inner.names


def rebinds(tree: ast.Module) -> bool:
    """Return whether the module's own statements use something that may bind any name."""
    return any(isinstance(node, ast.Name) and node.id in _REBINDING for node in _own_nodes(tree))


def may_bind(tree: ast.Module, name: str) -> bool:
    """Return whether the file may bind a module-level name that no statement of it binds."""
    # also in functions, which the module may call; a string with the name is mostly something else, such as a split
    return any(map(_reaches_a_module, ast.walk(tree))) or any(
        isinstance(node, ast.Constant) and node.value == name for node in _own_nodes(tree)
    )


def _reaches_a_module(node: ast.AST) -> bool:
    """Return whether this is `globals`, `exec` or `sys.modules`."""
    if isinstance(node, ast.Name):
        return node.id in ("globals", "exec")
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules"


def _own_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of the module's own statements, without functions."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _FUNCTIONS):
            pending += ast.iter_child_nodes(node)
