"""The variables that the names in a script stand for. It reads text and imports nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ScopeNode = ast.Module | ast.ClassDef | FunctionNode


class Variable(NamedTuple):
    """A variable of a function or a file; 'self.model' is one of a class."""

    scope: ast.AST
    name: str


class ScriptNames:
    """The scopes of a syntax tree."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree, self.nodes = tree, list(ast.walk(tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (found := self.parents.get(node)) is not None:
            yield (node := found)

    def variable(self, node: ast.AST) -> Variable | None:
        """The variable that a name, or an attribute of `self`, is where it stands."""
        scopes = [one for one in self.above(node) if isinstance(one, ScopeNode)]
        if isinstance(node, ast.Name):
            inner = (s for s in scopes if isinstance(s, FunctionNode) and node.id in bound_by(s))
            return Variable(next(inner, self.tree), node.id)
        holder = next((one for one in scopes if isinstance(one, ast.ClassDef)), None)
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        return Variable(holder, text) if holder and text.startswith("self.") else None


def parameters(function: FunctionNode) -> list[str]:
    """Names of parameters; those that may be given by position come first, in their order."""
    given = function.args
    more = (given.vararg, *given.kwonlyargs, given.kwarg)
    return [one.arg for one in (*given.posonlyargs, *given.args, *more) if one is not None]


@cache
def bound_by(function: FunctionNode) -> set[str]:
    """The names that a function binds: its parameters, and what its own statements assign."""
    found, shared, waiting = {*parameters(function)}, set[str](), [*ast.iter_child_nodes(function)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        shared.update(node.names if isinstance(node, ast.Global | ast.Nonlocal) else ())
        waiting += ast.iter_child_nodes(node) if not isinstance(node, ScopeNode) else ()
    return found - shared
