"""Fingerprint of a model without its weights: the part of a key that says 'the same model'.

It covers the module tree with its hyperparameters, and the code of the user's own classes. Not
comments, formatting, docstrings and the file: a class is the same wherever it is defined.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import linecache
import logging
import re
import secrets
import sys
import sysconfig
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from advisor.cache.key import fingerprint
from advisor.tuners.torch_facts import torch

_log = logging.getLogger("advisor")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
MOST_PIECES = 2_000
"""Classes and functions that are parsed for one digest, at about a millisecond each. For any more,
the digest of the whole file counts."""
NOT_COMPUTED = {"annotation", "returns", "ctx", "type_comment", "type_params", "kind"}
"""Fields of syntax trees that compute nothing, or differ between versions of Python."""


def of_model(model: torch.nn.Module) -> str:
    """Digest of the module tree, class names, hyperparameters, parameter and buffer types, and the
    user's own code. It raises nothing."""
    model, lazy = unwrapped(model), torch.nn.parameter.is_lazy
    modules = [[name, type(one).__qualname__, _stated(one)] for name, one in model.named_modules()]
    tensors = [
        # A lazy parameter has no shape before the first forward.
        [name, [] if lazy(tensor) else list(tensor.shape), str(tensor.dtype)]
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    ]
    kinds = dict.fromkeys(type(module) for module in model.modules())
    patched = [vars(module).get("forward") for module in model.modules()]  # set on the instance
    functions = [f for f in patched if isinstance(f, types.FunctionType | types.MethodType)]
    return fingerprint([modules, tensors, _code([*kinds, *functions])])


def of_hooks(make_batch: Callable[..., Any] | None, loss: Callable[..., Any] | None) -> str:
    """Digest of the code behind a target's hooks, '' where it has none. It raises nothing."""
    if make_batch is None and loss is None:
        return ""
    return fingerprint([_hook(make_batch), _hook(loss)])


def _hook(hook: Any) -> list[Any]:
    if hook is None:
        return []
    if isinstance(hook, torch.nn.Module):
        # A loss of torch.nn states its settings nowhere but in its attributes.
        settings = [[n, _value(v)] for n, v in sorted(vars(hook).items()) if _is_plain(v)]
        return ["module", of_model(hook), settings]
    if isinstance(hook, functools.partial):
        return ["partial", _hook(hook.func), _value([hook.args, hook.keywords])]
    known = isinstance(hook, type | types.FunctionType | types.MethodType)
    code = hook if known or inspect.isbuiltin(hook) else type(hook)
    return [str(getattr(code, "__qualname__", "")), _code([code])]


def _stated(module: torch.nn.Module) -> str:
    try:  # extra_repr() is where a module states its hyperparameters; addresses differ by run
        return _ADDRESS.sub("0x", module.extra_repr())
    except Exception:  # the user's extra_repr() failed: its attributes hold the same facts
        held = {name: value for name, value in vars(module).items() if name != "training"}
        return str([[name, _value(value)] for name, value in held.items() if _is_plain(value)])


def _code(pieces: list[Any]) -> list[str]:
    """Digests of the user's own classes and functions among these, and of those they refer to."""
    seen: dict[int, Any] = {}
    found: set[str] = set()
    waiting = list(pieces)
    while waiting:
        piece = waiting.pop()
        if id(piece) in seen:
            continue
        seen[id(piece)] = piece
        try:
            if not _is_own(piece):
                continue
            if len(found) >= MOST_PIECES:
                found.add(_whole_file(piece))
                continue
            text, referred = _of_piece(inspect.unwrap(getattr(piece, "__func__", piece)))
            found.add(text)
            waiting += referred
        except Exception:  # the user's metaclasses and decorators may do anything
            found.add(_whole_file(piece))
    return sorted(found)


def _whole_file(piece: Any) -> str:
    """Digest of the file of a class or function; without a file, a digest that no record has."""
    name = str(inspect.getattr_static(piece, "__module__", ""))
    try:
        file = Path(str(vars(sys.modules[name])["__file__"]))
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, KeyError):
        return _unlike_any(name)


@functools.cache
def _unlike_any(name: str) -> str:
    _log.warning("the code of module %r cannot be read: no record fits its models", name)
    return secrets.token_hex(32)


_PIECES: weakref.WeakKeyDictionary[Any, tuple[str, tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def _of_piece(piece: Any) -> tuple[str, tuple[Any, ...]]:
    """(Digest of one class or function, the classes and functions that it refers to)."""
    if known := _PIECES.get(piece):
        return known
    functions = list(_functions(piece))
    codes = [code for function in functions for code in codes_in(function.__code__)]
    compiled = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
    try:
        tree = _tree(piece)
        used = references(tree)
        names = {word.partition(".")[0] for word in used} & compiled
        changed = {name for n in ast.walk(tree) if isinstance(n, ast.Global) for name in n.names}
        text: object = plain(tree)
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, as in an interpreter
        names, used, changed = compiled, set(), set()
        text = [_compiled(code) for code in codes]
    referred: list[Any] = list(piece.__mro__[1:]) if isinstance(piece, type) else []
    values = []
    for scope in _scopes(functions):
        for name in sorted(names & scope.keys()):
            value = scope[name]
            if isinstance(value, type | types.FunctionType):
                referred.append(value)
            elif isinstance(value, types.ModuleType):
                parts = [word.partition(".")[2] for word in used if word.startswith(f"{name}.")]
                inside = (getattr(value, part, None) for part in parts)
                referred += [x for x in inside if isinstance(x, type | types.FunctionType)]
            elif _is_plain(value) and name not in changed and not name.startswith("__"):
                values.append([name, _value(value)])
    _PIECES[piece] = fingerprint([piece.__qualname__, text, values]), tuple(referred)
    return _PIECES[piece]


def _tree(piece: Any) -> ast.Module:
    """The syntax tree of a class or function. For a class, `inspect` would parse its whole file."""
    if not isinstance(piece, type):
        return ast.parse(textwrap.dedent(inspect.getsource(piece)))
    file = inspect.getsourcefile(piece) or ""
    linecache.checkcache(file)
    lines = linecache.getlines(file, vars(sys.modules[piece.__module__]))
    if (found := _classes("".join(lines)).get(piece.__qualname__)) is None:
        raise OSError("a class without source")
    return ast.Module([found], [])


@functools.lru_cache(maxsize=64)
def _classes(source: str) -> dict[str, ast.ClassDef]:
    """The classes of a file by their qualified names; of equal names the first."""
    found: dict[str, ast.ClassDef] = {}
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while waiting:
        node, within = waiting.pop()
        for child in ast.iter_child_nodes(node):
            inside = within
            if isinstance(child, ast.ClassDef):
                found.setdefault(within + child.name, child)
                inside = f"{within}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{within}{child.name}.<locals>."
            if not isinstance(child, ast.expr):
                waiting.append((child, inside))
    return found


def _functions(piece: Any) -> Iterator[types.FunctionType]:
    held = list(vars(piece).values()) if isinstance(piece, type) else [piece]
    for one in held:
        for function in (one, *(getattr(one, n, None) for n in ("__func__", "fget", "fset"))):
            if isinstance(function, types.FunctionType):
                yield inspect.unwrap(function)


def _scopes(functions: list[types.FunctionType]) -> Iterator[dict[str, Any]]:
    """Yields the global variables of some functions, then the closure variables of each."""
    yield from {id(f.__globals__): f.__globals__ for f in functions}.values()
    for f in functions:
        held = {}
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not bound yet
                held[name] = cell.cell_contents
        yield held


def plain(node: object) -> object:
    """A syntax tree as nested lists: no positions, docstrings, annotations or empty fields."""
    if isinstance(node, list):
        return [plain(part) for part in node]
    if not isinstance(node, ast.AST):
        return _value(node)
    found: list[object] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = [part for part in value if not is_idle(part)]
        if name not in NOT_COMPUTED and value is not None and value != []:
            found.append([name, plain(value)])
    return found


def is_idle(node: ast.AST) -> bool:
    """Whether a statement computes nothing, as a docstring."""
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, without annotations."""
    waiting: list[object] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, ast.AST):
            yield node
            waiting += [getattr(node, f, None) for f in node._fields if f not in NOT_COMPUTED]


def references(tree: ast.AST) -> set[str]:
    """The names that code uses, with one attribute at most: `a.b.c` gives 'a.b', `a` gives 'a'."""
    attributes = {
        node.value: f"{node.value.id}.{node.attr}"
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return {attributes.get(node, node.id) for node in nodes(tree) if isinstance(node, ast.Name)}


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object, and those of the functions and classes inside."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from codes_in(one)


def _compiled(code: types.CodeType) -> list[Any]:
    """A code object as plain data, without lines, file and docstring (its first constant)."""
    constants = [_value(one) for one in code.co_consts[1:] if not isinstance(one, types.CodeType)]
    return [code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | bytes)


def _value(value: Any) -> str:
    fixed = sorted(map(repr, value)) if isinstance(value, frozenset) else value  # in any process
    return _ADDRESS.sub("0x", repr(fixed))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders of Python's own modules, of torch, and of advisor."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    places += [str(Path(torch.__file__).parent), str(Path(__file__).resolve().parent)]
    return tuple(f"{Path(place).resolve()}/" for place in places if place)


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file is Python's, torch's, an installed library's or advisor's. A library that is
    installed in editable mode is the user's: its version says nothing of its code."""
    if not file or file.startswith("<frozen"):
        return True
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return str(path.resolve()).startswith(_libraries())


def _is_own(piece: Any) -> bool:
    name = str(getattr(piece, "__module__", ""))
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:  # executed without a module
        file = next((one.__code__.co_filename for one in _functions(piece)), "")
    return not is_library(file)


def family(model: torch.nn.Module) -> str:
    """12 hex characters over the classes of a model's modules: ResNet-18's equal ResNet-50's."""
    model = unwrapped(model)
    leaves = {type(m).__qualname__ for m in model.modules() if not any(True for _ in m.children())}
    return fingerprint([type(model).__qualname__, sorted(leaves)])[:12]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside torch.compile's wrapper and those of `wrapped`."""
    inner = wrapped(model, "_orig_mod")
    return model if inner is None else unwrapped(inner)


def wrapped(model: torch.nn.Module, *others: str) -> torch.nn.Module | None:
    """The module that (Distributed)DataParallel or Lightning's Fabric wraps, or that has one of the
    `others` as its name; None if there is none. Calls no `__getattr__` of the model."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    names = ("module" if isinstance(model, parallel) else "_forward_module", *others)
    return next((model._modules[name] for name in names if name in model._modules), None)


def size(model: torch.nn.Module) -> tuple[int, int]:
    """(Number of modules, number of parameters), to show a person how a model has changed."""
    model = unwrapped(model)
    lazy = torch.nn.parameter.is_lazy
    counts = (0 if lazy(one) else one.numel() for one in model.parameters())
    return sum(1 for _ in model.modules()), sum(counts)


def libraries(model: torch.nn.Module) -> tuple[str, ...]:
    tops = {type(module).__module__.partition(".")[0] for module in model.modules()}
    names = {name for top in tops - {"torch", "__main__"} for name in _distributions().get(top, ())}
    return tuple(sorted(f"{name}=={importlib.metadata.version(name)}" for name in names))


_distributions = functools.cache(importlib.metadata.packages_distributions)
"""Package names by top-level module. The call reads the files of all installed packages."""
