"""The known places of a training script, found in its syntax tree. Nothing is imported or run.

A name is followed to the variables that it may stand for: from a parameter to the arguments of the
calls in the same file, and from `self.x` to the names that the class's methods assign to it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict

from advisor.errors import UsageError
from advisor.tuners.script_names import ScopeNode, ScriptNames, Variable, parameters

_OF_MODULES = ("train", "eval", "parameters", "named_parameters")  # methods of an nn.Module
_MOVES = ("to", "cuda")
_OFF = re.compile("no_grad|inference_mode")  # turns gradients off
_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")


class Places(ScriptNames):
    """The places of a script. Raises UsageError if `text` is not Python; `file`: its name."""

    def __init__(self, text: str, file: str) -> None:
        try:
            with warnings.catch_warnings(
                action="ignore"
            ):  # Python shows them when it runs the file
                super().__init__(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            raise UsageError(f"{file}: expected Python: {exc}") from exc
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self._imports: dict[str, str] = {}
        self._origins: dict[Variable | None, set[Variable]] = {}
        self._values: defaultdict[Variable, list[ast.expr]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self._imports |= {one.asname: one.name for one in node.names if one.asname}
            elif isinstance(node, ast.ImportFrom):
                for one in node.names:
                    self._imports[one.asname or one.name] = f"{node.module}.{one.name}"
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                        # Of `a, b = prepare(a, b)`, each name comes from itself.
                        value = node.value if part is target else part
                        if (variable := self.variable(part)) and value is not None:
                            self._values[variable].append(value)

    def full_name(self, node: ast.AST) -> str:
        """'torch.optim.AdamW' for `optim.AdamW`, by the script's imports; '' if it is no name."""
        if isinstance(node, ast.Attribute):
            outer = self.full_name(node.value)
            return outer and f"{outer}.{node.attr}"
        return self._imports.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def named(self, *names: str) -> list[ast.Call]:
        """The calls of functions or classes with these full names."""
        return [call for call in self.calls if self.full_name(call.func) in names]

    def methods(self, *names: str) -> list[tuple[ast.Call, ast.expr]]:
        """(Call, the object) for calls of methods with these names."""
        by = ((call, call.func) for call in self.calls)
        return [(c, f.value) for c, f in by if isinstance(f, ast.Attribute) and f.attr in names]

    def variables(self, node: ast.AST) -> set[Variable]:
        """The variables that an expression may stand for; none if it is no name."""
        found, seen, waiting = set[Variable](), set[Variable](), [node]
        if (start := self.variable(node)) in self._origins:
            return self._origins[start]
        while waiting:
            variable = self.variable(waiting.pop())
            if variable is None or variable in seen:
                continue
            seen.add(variable)
            given, scope = self._values[variable], variable.scope
            if isinstance(scope, ast.FunctionDef) and not given:
                given = [one for one in self._arguments(scope, variable.name) if self.variable(one)]
            elif not isinstance(scope, ast.ClassDef) or any(not self.variable(v) for v in given):
                given = []
            waiting += given
            found |= set() if given else {variable}
        return self._origins.setdefault(start, found)

    def _arguments(self, function: ast.FunctionDef, name: str) -> list[ast.expr]:
        """What the calls in this file pass as a function's parameter."""
        holder, names, found = self.parents[function], parameters(function), list[ast.expr]()
        init = isinstance(holder, ast.ClassDef) and function.name == "__init__"
        called = getattr(holder, "name", "") if init else function.name
        index = names.index(name) - isinstance(holder, ast.ClassDef) if name in names else -1
        for call in self.calls:
            if self.full_name(call.func).rpartition(".")[2] == called:
                found += [one.value for one in call.keywords if one.arg == name]
                found += call.args[index : index + 1] if index >= 0 else []
        return found

    def modules(self) -> set[Variable]:
        """The variables whose methods show that they hold an nn.Module."""
        return {one for _call, by in self.methods(*_OF_MODULES) for one in self.variables(by)}

    def _loops(self) -> list[list[ast.AST]]:
        """The loops and scopes around each call of `backward`, from the inside out."""
        kinds = ast.For | ast.While | ScopeNode
        calls = (call for call, _by in self.methods("backward"))
        return [[one for one in self.above(call) if isinstance(one, kinds)] for call in calls]

    def model_calls(self) -> list[ast.Call]:
        """The calls of a model in the innermost loop, or the function, that calls `backward`."""
        modules, within = self.modules(), [loops[0] for loops in self._loops()]
        around = {c: list(self.above(c)) for c in self.calls if self.variables(c.func) & modules}
        trains = ((c, a) for c, a in around.items() if any(one in within for one in a))
        items = ((c, [i for w in a if isinstance(w, ast.With) for i in w.items]) for c, a in trains)
        return [c for c, held in items if not any(_OFF.search(ast.unparse(one)) for one in held)]

    def loaders(self) -> list[ast.Call]:
        """The DataLoaders from which the loops that call `backward` may take their batches."""
        made, seen = self.named(*_LOADERS), set[Variable]()
        waiting = [one.iter for loops in self._loops() for one in loops if isinstance(one, ast.For)]
        found: list[ast.Call] = []
        while waiting:
            for node in ast.walk(waiting.pop()):
                found += [one for one in made if one is node and one not in found]
                for variable in self.variables(node) - seen:
                    seen.add(variable)
                    waiting += self._values[variable]
        return found or (made if len(made) == 1 else [])

    def created(self, model: Variable) -> list[ast.AST]:
        """The statements that move a model to its device; else those that create it."""
        made = [value for value in self._values[model] if isinstance(value, ast.Call)]
        moves = [(call, self.parents[call], by) for call, by in self.methods(*_MOVES)]
        alone = [c for c, p, by in moves if isinstance(p, ast.Expr) and self.variable(by) == model]
        return [self.parents[c] for c in [*alone, *(c for c, *_ in moves if c in made)] or made]
