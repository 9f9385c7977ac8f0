"""`advisor patch`: the advice of `advisor run` as a unified diff of the script.

Text is inserted at places of the syntax tree. An edit without exactly one place is left. Nothing is
imported or run.

A name is followed to the variables that it may stand for: from a parameter to the arguments of the
calls in the same file, and from `self.x` to the names that the class's methods assign to it.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.cache.record import PILOT, Record
from advisor.cache.shown import times
from advisor.cache.stores.filesystem import read_regular
from advisor.errors import NoRecord, UsageError, reason
from advisor.frameworks import tables
from advisor.frameworks.framework import DATALOADER, Setup
from advisor.frameworks.text import keywords, template
from advisor.tuners.act.pilot.parts import micro_batches
from advisor.tuners.decisions import LARGE_BYTES
from advisor.tuners.knobs import GRAPHED_MODES, TORCH, described
from advisor.tuners.script_names import ScopeNode, ScriptNames, Variable, parameters
from advisor.tuners.source import MAX_SOURCE_BYTES

_MAKERS = (  # of a framework's settings
    (tables.hf, ("transformers.TrainingArguments",)),
    (tables.hf, ("transformers.HfArgumentParser",)),  # takes them from the command
    (
        tables.lightning,
        ("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer"),
    ),
)
_ENDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
"""Training may happen in these: an import after one of them comes too late."""
_OF_MODULES = ("train", "eval", "parameters", "named_parameters")  # methods of an nn.Module
_MOVES = ("to", "cuda")
_OFF = re.compile("no_grad|inference_mode")  # turns gradients off
Calls = Sequence[ast.Call]
_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")


class ScriptPatch:
    """The edits of one script that apply a record's config for `advisor run`.

    Attributes:
        config: the advised values; `what`: all of it in words.
        diff: what `patch -p1` and `git apply` take; '' if the script needs no edit.
        arguments: words to add to the command, if a framework's options are set there.
        left: the edits that the user has to make, each as text of one or more lines.

    Raises UsageError if the file is no Python in UTF-8 or has advice, NoRecord without training.
    """

    def __init__(self, record: Record, file: Path) -> None:
        self._file, base, won = str(file), record.baseline.config, record.winner(PILOT)
        if record.key.task.mode != "train":
            raise NoRecord(f"{record.id} was tuned for mode {record.key.task.mode}, not train")
        try:
            read = read_regular(file, MAX_SOURCE_BYTES).decode()
        except (OSError, ValueError) as exc:
            raise UsageError(f"script {self._file!r}: {reason(exc)}") from exc
        self._text = text = read.removeprefix("\ufeff")  # a byte order mark
        self._mark = read.removesuffix(text)
        if done := re.search(r"^# advisor: .*|\badvised_call\b", text, re.MULTILINE):
            raise UsageError(f"script {self._file!r} has advice: {done[0]}; undo that edit first")
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._lines = io.StringIO(text, newline="").readlines()  # as Python counts them
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        self._places = Places(text, self._file)
        self._edits: list[tuple[int, int, str]] = []
        self.arguments: list[str] = []
        self.config, torch = won.config.changed(base), TORCH | DATALOADER
        self.what = f"{described(won.config, base, nothing='nothing')}, {times(won.speedup)}"
        undone = ((n, v) for n, v in self.config.items() if v == torch.get(n))
        self.left = [f"{name}: have the script set it to {value}" for name, value in undone]
        self._edit(record)
        self.diff = self._diff()

    def _edit(self, record: Record) -> None:
        task, places = record.key.task, self._places
        known = ((table, places.named(*names)) for table, names in _MAKERS)
        framework, makers = next((one for one in known if one[1]), (tables.script, []))
        setup = framework.setup(record, self.config)
        own, kind = framework is tables.script, setup.environment.device.kind
        settings = {n: v for n, v in setup.settings.items() if n not in framework.devices[kind]}
        calls = places.model_calls()
        models = {one for call in calls for one in places.variables(call.func)}
        models = models if models == places.trained() else set()  # a teacher has no optimizer
        through = own and bool(settings or setup.model)
        ends = (any(isinstance(n, _ENDS) for n in ast.walk(one)) for one in places.tree.body)
        head = itertools.takewhile(lambda one: not next(ends), places.tree.body)
        imports = [one for one in head if isinstance(one, ast.Import | ast.ImportFrom)]
        here = bool(imports) and self._own_line(imports[-1]) is not None
        called = through and len(calls) == len(models) == 1
        called = called and (not here or self._call_through(calls[0]))
        top = self._block(setup, [*filter(self._is_unset, setup.flags)], called=called)
        if top and not (here and self._add_lines(imports[-1], ["", *top])):
            more = ", and train through advised_call(model, inputs)" * called
            self.left.append("\n".join([f"flags: add at the top of the script{more}", *top]))
        if through and not called:
            code = "\n".join(self._block(setup, [], called=True))
            why = f"forward: which call trains the model is not certain{_lines(calls)}"
            self.left.append(f"{why}; train through advised_call(model, inputs), with\n{code}")
        elif not own and "HfArgumentParser" in places.full_name(makers[0].func):
            self.arguments = [f"--{name}={value}" for name, value in settings.items()]
        elif settings and not own:
            self._give(framework.title, makers, settings)
        created = [(one.name, at) for one in models for at in places.created(one)] if own else []
        for line in setup.model:
            written = [re.sub(r"\bmodel\b", name, line) for name, _at in created]
            if len(created) != 1 or not self._add_lines(created[0][1], written):
                why = f"model: where it is made is not certain{_lines(at for _, at in created)}"
                self.left.append(f"{why}; once it is made, add: {line}")
        self.left += [f"flags: add just before training starts: {line}" for line in setup.after]
        if setup.optimizer:
            name = f"torch.optim.{task.optimizer}"
            alike = [one for one in places.calls if places.full_name(one.func).lower() == name]
            ours = places.sources(places.stepped(), alike)
            self._give(f"optimizer {task.optimizer}", ours, setup.optimizer, alike)
        if setup.loader:
            made = places.named(*_LOADERS)
            ours = places.sources(places.looped(), made)
            self._give("training DataLoader", ours, setup.loader, made)
        for name, value in setup.unsupported.items():
            self.left.append(f"{name}: no known edit sets {name}={value} in {framework.title}")

    def _block(self, setup: Setup, flags: list[str], *, called: bool) -> list[str]:
        """The lines for the top of the script; `called`: with the function that calls the model."""
        settings = {"autocast": "", "compile": {}, "dynamic": False} | setup.settings
        again = micro_batches(setup.task.others) > 1 or "set_to_none=False" in self._text
        given = {"graphed": GRAPHED_MODES, "large": LARGE_BYTES, "accumulates": again}
        given |= {"setup": setup, "what": self.what, "flags": flags, "called": called}
        block = template("patch.txt").render(s=settings, **given)
        return block.splitlines() if flags or called else []

    def _is_unset(self, line: str) -> bool:
        """Whether the script sets a flag to no other value. If it does, the line is left."""
        name, value = re.split(r" = |\(", line.rstrip(")"), maxsplit=1)
        short = re.escape(".".join(name.split(".")[-2:]))
        there = re.search(rf"^.*\b{short}\b(?! *[=(] *{re.escape(value)}).*", self._text, re.M)
        if there:
            self.left.append(f"flags: the script has {there[0].strip()}; there, write {line}")
        return there is None

    def _give(self, what: str, calls: Calls, given: Mapping[str, Any], others: Calls = ()) -> None:
        """Add keyword arguments to the only call, after its last argument; else tell the user the
        lines of `calls`, or of `others`."""
        found: list[ast.expr | ast.keyword] = [*calls[0].args, *calls[0].keywords] if calls else []
        there = {one.arg or "**" for one in found if isinstance(one, ast.keyword)}
        barred = there & {*given, "**", "foreach", "differentiable"}  # the last two exclude fused
        why = f"where it is made is not certain{_lines(calls or others)}"
        if len(calls) == 1 and barred:
            why = f"line {calls[0].lineno} has {', '.join(sorted(barred))}"
        elif len(calls) == 1 and found and not isinstance(found[0], ast.GeneratorExp):
            last = max(found, key=self._span)
            (start, end), line = self._span(last), self._starts[last.lineno - 1]
            row = self._text[line:start]
            if ")" not in self._text[end : self._span(calls[0])[1] - 1]:
                comma = ", " if row.strip() else f",{self._newline}{row}"
                self._edits.append((end, end, comma + keywords(given)))
                return
        self.left.append(f"{what}: {why}; its arguments: {keywords(given)}")

    def _call_through(self, call: ast.Call) -> bool:
        """Have a call of the model go through `advised_call`; False if its text is unusual."""
        start, end = self._span(call.func)
        if self._text[end] != "(" or any(isinstance(one, ast.GeneratorExp) for one in call.args):
            return False
        after = self._text[end + 1 :]
        comma = "" if after.lstrip().startswith(")") else "," if after[:1].isspace() else ", "
        self._edits += [(start, start, "advised_call("), (end, end + 1, comma)]
        return True

    def _add_lines(self, place: ast.AST, lines: list[str]) -> bool:
        """Add lines after a statement; False if its line has other code."""
        if (line := self._own_line(place)) is None:
            return False
        indent, end = line
        written = (self._newline + (indent + one if one else "") for one in lines)
        self._edits.append((end, end, "".join(written)))
        return True

    def _own_line(self, place: ast.AST) -> tuple[str, int] | None:
        """A statement's indent, and where its last line ends; None if there is other code."""
        assert isinstance(place, ast.stmt)
        start, end = self._span(place)
        indent = self._text[self._starts[place.lineno - 1] : start]
        rest = self._text[end:].partition("\n")[0].rstrip("\r")
        alone = not (indent.strip() or rest.partition("#")[0].strip())
        return (indent, end + len(rest)) if alone else None

    def _span(self, node: ast.stmt | ast.expr | ast.keyword) -> tuple[int, int]:
        """Where a node begins and ends in the text. The tree counts bytes of UTF-8."""
        ends = (node.lineno, node.col_offset), (node.end_lineno or 1, node.end_col_offset or 0)
        start, end = (
            self._starts[row - 1] + len(self._lines[row - 1].encode()[:column].decode())
            for row, column in ends
        )
        return start, end

    def _diff(self) -> str:
        new = self._text
        for start, end, text in reversed(sorted(self._edits, key=lambda one: one[:2])):
            new = new[:start] + text + new[end:]
        Places(new, f"{self._file} with the edits")  # it must still be Python
        name = os.path.relpath(self._file).rpartition("../")[2]
        name += "\t" if " " in name else ""
        # For git, only a newline ends a line.
        texts = (io.StringIO(self._mark + one, newline="\n") for one in (self._text, new))
        old, changed = (one.readlines() for one in texts)
        lines = difflib.unified_diff(old, changed, f"a/{name}", f"b/{name}")
        ends = "\n\\ No newline at end of file\n"
        return "".join(one if one.endswith("\n") else one + ends for one in lines)


def _lines(nodes: Iterable[Any]) -> str:
    """' (perhaps line 3 or 7)'."""
    found = sorted({one.lineno for one in nodes})
    return f" (perhaps line {' or '.join(map(str, found))})" if found else ""


class Places(ScriptNames):
    """The places of a script. Raises UsageError if `text` is not Python; `file`: its name."""

    def __init__(self, text: str, file: str) -> None:
        try:
            # Python shows them when it runs the file.
            with warnings.catch_warnings(action="ignore"):
                super().__init__(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            raise UsageError(f"{file}: expected Python: {exc}") from exc
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self._imports: dict[str, str] = {}
        self._origins: dict[Variable | None, set[Variable]] = {}
        self._values = defaultdict[Variable, list[ast.expr]](list)
        self._parts = defaultdict[Variable, list[tuple[ast.expr, int]]](list)  # whole, index
        self._returns = defaultdict[str, list[ast.expr]](list)  # by the function's name
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self._imports |= {one.asname: one.name for one in node.names if one.asname}
            elif isinstance(node, ast.ImportFrom):
                for one in node.names:
                    self._imports[one.asname or one.name] = f"{node.module}.{one.name}"
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, ast.Return) and node.value is not None:
                scope = next(one for one in self.above(node) if isinstance(one, ScopeNode))
                self._returns[getattr(scope, "name", "")].append(node.value)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple):
            given = value.elts if isinstance(value, ast.Tuple) else []
            for at, part in enumerate(target.elts):
                if len(given) == len(target.elts):
                    self._assign(part, given[at])
                elif (variable := self.variable(part)) and value is not None:
                    # Of `a, b = prepare(a, b)`, each name comes from itself.
                    self._values[variable].append(part)
                    self._parts[variable].append((value, at))
        elif (variable := self.variable(target)) and value is not None:
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

    def _last_name(self, by: ast.AST) -> str:
        return by.attr if isinstance(by, ast.Attribute) else self.full_name(by)

    def _arguments(self, function: ast.FunctionDef, name: str) -> list[ast.expr]:
        """What the calls in this file pass as a function's parameter."""
        holder, names, found = self.parents[function], parameters(function), list[ast.expr]()
        init = isinstance(holder, ast.ClassDef) and function.name == "__init__"
        called = getattr(holder, "name", "") if init else function.name
        index = names.index(name) - isinstance(holder, ast.ClassDef) if name in names else -1
        for call in self.calls:
            if self._last_name(call.func) == called:
                found += [one.value for one in call.keywords if one.arg == name]
                found += call.args[index : index + 1] if index >= 0 else []
        return found

    def modules(self) -> set[Variable]:
        """The variables whose methods show that they hold an nn.Module."""
        return {one for _call, by in self.methods(*_OF_MODULES) for one in self.variables(by)}

    def trained(self) -> set[Variable]:
        """The models whose parameters the script reads, as for an optimizer; none if one of them is
        unknown. `modules` if it reads none."""
        found = []
        for _call, by in self.methods("parameters", "named_parameters"):
            while isinstance(by, ast.Attribute) and not self.variables(by):
                by = by.value  # of a part of the model
            found.append(self.variables(by))
        if not found:
            return self.modules()
        return set().union(*found) if all(found) else set()

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

    def stepped(self) -> list[ast.expr]:
        """The optimizers that the script steps, by themselves or by a GradScaler."""
        return [one for call, by in self.methods("step") for one in (by, *call.args[:1])]

    def looped(self) -> list[ast.expr]:
        """What the loops that call `backward` go over, or else call a function that does."""
        loops, seen = self._loops(), set[str]()
        if len({id(one[0]) for one in loops}) > 1:
            return []  # perhaps one of another model
        around = {*itertools.chain(*loops)}
        while not (found := [one.iter for one in around if isinstance(one, ast.For)]):
            names = {one.name for one in around if isinstance(one, ast.FunctionDef)} - seen
            if not names:
                break
            seen |= names
            calls = (call for call in self.calls if self._last_name(call.func) in names)
            around = {*itertools.chain(*map(self.above, calls))}
        return found

    def sources(self, values: list[ast.expr], made: Calls) -> list[ast.Call]:
        """Those of `made` from which values may come, without those of a comprehension."""
        made = [c for c in made if not any(hasattr(up, "generators") for up in self.above(c))]
        found, seen, waiting = list[ast.Call](), set[Variable](), [*values]
        while waiting:
            for node in ast.walk(waiting.pop()):
                found += [one for one in made if one is node and one not in found]
                waiting += self._returned(node)
                for variable in self.variables(node) - seen:
                    seen.add(variable)
                    waiting += self._values[variable]
                    for whole, at in self._parts[variable]:
                        waiting += self._returned(whole, at)
                    if isinstance(variable.scope, ast.FunctionDef):
                        waiting += self._arguments(variable.scope, variable.name)
        return found

    def _returned(self, call: ast.AST, at: int | None = None) -> list[ast.expr]:
        """What a function of this file returns; `at`: of several values the one at this index."""
        name = self._last_name(call.func) if isinstance(call, ast.Call) else ""
        found = self._returns[name] if name else []
        if at is None:
            return [one for one in found if not isinstance(one, ast.Tuple)]
        return [one.elts[at] for one in found if isinstance(one, ast.Tuple) and len(one.elts) > at]

    def created(self, model: Variable) -> list[ast.AST]:
        """The statements that move a model to its device; else those that create it."""
        made = [value for value in self._values[model] if isinstance(value, ast.Call)]
        moves = [(call, self.parents[call], by) for call, by in self.methods(*_MOVES)]
        alone = [c for c, p, by in moves if isinstance(p, ast.Expr) and self.variable(by) == model]
        found = [*alone, *(c for c, *_ in moves if c in made)] or made
        # Not the tuple of `model, loss = Net(), nn.MSELoss()`.
        return [next(o for o in self.above(c) if isinstance(o, ast.stmt)) for c in found]
