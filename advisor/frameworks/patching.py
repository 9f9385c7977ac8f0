"""`advisor patch`: the advice of `advisor run` as a unified diff of the script.

Text is inserted at places of the syntax tree. An edit without exactly one place is left.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.cache.record import PILOT, Record
from advisor.cache.shown import times
from advisor.cache.stores.filesystem import read_regular
from advisor.errors import NoRecord, UsageError, reason
from advisor.frameworks import tables
from advisor.frameworks.framework import DATALOADER, Setup
from advisor.frameworks.places import Places
from advisor.frameworks.text import keywords, template
from advisor.tuners.act.pilot.script_facts import micro_batches
from advisor.tuners.decisions import LARGE_BYTES
from advisor.tuners.knobs import GRAPHED_MODES, TORCH, described
from advisor.tuners.source import MAX_SOURCE_BYTES

_MAKERS = (  # of a framework's settings
    (tables.hf, ("transformers.TrainingArguments",)),
    (tables.hf, ("transformers.HfArgumentParser",)),  # takes them from the command
    (tables.lightning, ("lightning.Trainer", "lightning.pytorch.Trainer")),
)
_ENDS = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)  # no imports follow these


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
            self._text = text = read_regular(file, MAX_SOURCE_BYTES).decode()
        except (OSError, ValueError) as exc:
            raise UsageError(f"script {self._file!r}: {reason(exc)}") from exc
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
        models = {one for call in calls for one in places.variables(call.func)} or places.modules()
        through = own and bool(settings or setup.model)
        placed = through and len(calls) == len(models) == 1 and self._call_through(calls[0])
        self._add_top(self._block(setup, [*filter(self._is_unset, setup.flags)], called=placed))
        if through and not placed:
            code = "\n".join(self._block(setup, [], called=True))
            why = f"forward: no single call of a model stands next to backward ({len(calls)} found)"
            self.left.append(f"{why}; train through advised_call(model, inputs), with\n{code}")
        elif not own and "HfArgumentParser" in places.full_name(makers[0].func):
            self.arguments = [f"--{name}={value}" for name, value in settings.items()]
        elif settings and not own:
            self._add_keywords(framework.title, makers, settings)
        created = [(one.name, at) for one in models for at in places.created(one)] if own else []
        for line in setup.model:
            written = [re.sub(r"\bmodel\b", name, line) for name, _at in created]
            if len(created) != 1 or not self._add_lines(created[0][1], written):
                why = f"model: no single place makes it ({len(created)} found)"
                self.left.append(f"{why}; once it is made, add: {line}")
        self.left += [f"flags: add just before training starts: {line}" for line in setup.after]
        if setup.optimizer:
            name = f"torch.optim.{task.optimizer}"
            ours = [one for one in places.calls if places.full_name(one.func).lower() == name]
            self._add_keywords(f"optimizer {task.optimizer}", ours, setup.optimizer)
        if setup.loader:
            self._add_keywords("training DataLoader", places.loaders(), setup.loader)
        for name, value in setup.unsupported.items():
            self.left.append(f"{name}: no known edit sets {name}={value} in {framework.title}")

    def _block(self, setup: Setup, flags: list[str], *, called: bool) -> list[str]:
        """The lines for the top of the script; `called`: with the function that calls the model."""
        settings = {"autocast": "", "compile": {}, "dynamic": False} | setup.settings
        again = micro_batches(setup.task) > 1 or "set_to_none=False" in self._text
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

    def _add_top(self, lines: list[str]) -> None:
        head = itertools.takewhile(lambda one: not isinstance(one, _ENDS), self._places.tree.body)
        imports = [one for one in head if isinstance(one, ast.Import | ast.ImportFrom)]
        if lines and not (imports and self._add_lines(imports[-1], ["", *lines])):
            self.left.append("\n".join(["flags: add at the top of the script", *lines]))

    def _add_keywords(self, what: str, calls: list[ast.Call], given: Mapping[str, Any]) -> None:
        """Add keyword arguments to the only call, after its last argument."""
        found: list[ast.expr | ast.keyword] = [*calls[0].args, *calls[0].keywords] if calls else []
        there = {one.arg or "**" for one in found if isinstance(one, ast.keyword)}
        barred = there & {*given, "**", "foreach", "differentiable"}  # the last two exclude fused
        why = f"no single place makes it ({len(calls)} found)"
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
        after = self._text[end + 1 :]
        comma = "" if after.lstrip().startswith(")") else "," if after[:1].isspace() else ", "
        edits = [(start, start, "advised_call("), (end, end + 1, comma)]
        self._edits += edits if self._text[end] == "(" else []
        return self._text[end] == "("

    def _add_lines(self, place: ast.AST, lines: list[str]) -> bool:
        """Add lines after a statement; False if its line has other code."""
        assert isinstance(place, ast.stmt)
        start, end = self._span(place)
        indent = self._text[self._starts[place.lineno - 1] : start]
        rest = self._text[end:].partition("\n")[0].rstrip("\r")
        if indent.strip() or rest.partition("#")[0].strip():
            return False
        written = (self._newline + (indent + one if one else "") for one in lines)
        self._edits.append((end + len(rest), end + len(rest), "".join(written)))
        return True

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
        after = io.StringIO(new, newline="").readlines()
        lines = difflib.unified_diff(self._lines, after, f"a/{name}", f"b/{name}")
        ends = "\n\\ No newline at end of file\n"
        return "".join(one if one.endswith("\n") else one + ends for one in lines)
