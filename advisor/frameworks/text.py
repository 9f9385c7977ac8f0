"""`advisor emit`: a record as a framework's own configuration, to copy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.cache.shown import times
from advisor.errors import NoRecord, printable
from advisor.frameworks.framework import Framework, LazyObject, Setup
from advisor.resolve.answer import answer
from advisor.resolve.request import Request

_CHANGES = ("flags", "model", "after", "optimizer", "loader")
"""Fields of a Setup with what the script changes itself."""


class Emitted:
    """The fastest measured config of a record that the framework can express completely.

    Args:
        batch: the user's batch size, if it is not the record's.
        free: use the best batch size that was found. If that is smaller, gradient accumulation
            keeps the record's batch.

    Attributes:
        reason: what the config is, as '1.50x torch's default at batch 64'.
        setup: its unsupported values all belong to the input pipeline.
        beyond: faster choices of the record by their names in a report, each with the values that
            the framework cannot express.

    Raises:
        NoRecord: the framework cannot express the record's baseline.
    """

    def __init__(
        self, framework: Framework, record: Record, *, batch: int | None = None, free: bool = False
    ) -> None:
        def lacks(config: Config, at: int | None = None) -> dict[str, Any]:
            return framework.setup(record, config, at).unsupported

        task, title = record.key.task, framework.title
        if task.mode != "train":
            raise NoRecord(f"{record.id} was tuned for mode {task.mode}; {title} only trains")
        if wanting := _keywords(lacks(record.baseline.config)):
            raise NoRecord(f"{title} has no setting for {wanting}, with which {record.id} is tuned")
        request = Request(
            batch=batch, free=free, fits=lambda _record, config: not lacks(config, batch)
        )
        answered = answer(record, request)
        self.framework, self.reason = framework, answered.reason
        self.setup = framework.setup(record, answered.config, batch)
        self.beyond = {
            name: (choice, lost)
            for name, choice in record.choices.items()
            if (choice.batch == record.batch or free) and (lost := lacks(choice.config))
        }


def text(found: Emitted) -> str:
    """The whole output: settings in the framework's format, and the rest as comments."""
    call = found.framework.call
    code = _python(found.setup, call) if call else _yaml(found.setup)
    below = _comments([*_by_hand(found), *_notes(found)])
    return "\n".join(filter(None, [_comments(_head(found)), code, below]))


def _comments(lines: Iterable[str]) -> str:
    """Each line as a comment, without line breaks, because a record may contain any text."""
    return "".join(f"# {printable(line)}\n" for line in lines)


def data(found: Emitted) -> dict[str, Any]:
    """The content of `text`, for JSON."""
    setup = found.setup
    lacks = {name: values for name, (_choice, values) in found.beyond.items()}
    if setup.unsupported:
        lacks["input pipeline"] = setup.unsupported
    made = {n: _literal(v) for n, v in setup.settings.items() if isinstance(v, LazyObject)}
    return {
        "framework": found.framework.title,
        "record": setup.record.id,
        "reason": found.reason,
        "config": dict(setup.config),
        "settings": {**setup.settings, **made},
        **{name: getattr(setup, name) for name in _CHANGES},
        "by_itself": found.framework.notes(setup),
        "not_expressed": lacks,
    }


def _python(setup: Setup, call: str) -> str:
    """Lines for the switches and a dictionary `arguments`; `call`: the call that takes it."""
    used = [n for n in ("os", "torch") if any(line.startswith(f"{n}.") for line in setup.flags)]
    made = [value for value in setup.settings.values() if isinstance(value, LazyObject)]
    imports = [f"import {name}" for name in used]
    imports += [f"from {one.module} import {one.name}" for one in made]
    settings = [f'    "{name}": {_literal(value)},' for name, value in setup.settings.items()]
    body = ["arguments = {", *settings, "}"] if settings else ["arguments = {}"]
    lines = [*imports, *([""] if imports else []), *setup.flags, *body, f"# {call}"]
    return "".join(f"{line}\n" for line in lines)


def _yaml(setup: Setup) -> str:
    # A line of JSON is a line of YAML.
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in setup.settings.items()]
    return "# python train.py -c advised.yaml DATA\n" + "".join(lines)


def _literal(value: object) -> str:
    if isinstance(value, LazyObject):
        return f"{value.name}({_keywords(value.keywords)})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _keywords(given: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in given.items())


def _head(found: Emitted) -> Iterator[str]:
    setup, record = found.setup, found.setup.record
    task, device = record.key.task, record.key.environment.device.name
    yield f"{record.id}: {record.target.name}, {task.inputs}, batch {record.batch}, on {device}"
    yield f"{found.reason}, for all of these settings together"
    if record.stale:
        yield f"marked stale by advisor verify: {record.stale}"
    size, calls = setup.accumulation or (0, 0)
    if size and calls > 1:
        each = f" in each of {task.processes} processes" * (task.processes > 1)
        made = f"{calls} batches of {size}{each} make one of {setup.batch}"
        yield f"{made}, by gradient accumulation"


def _by_hand(found: Emitted) -> Iterator[str]:
    """Yields comments with the lines that the user adds to the script."""
    setup, title = found.setup, found.framework.title
    for where, lines in (
        (f"Add for the model, before {title} gets it", setup.model),
        (f"Add just before training starts, because {title} switches TF32 on", setup.after),
    ):
        if lines:
            yield f"{where}:"
            yield from (f"    {line}" for line in lines)
    for where, given in (("optimizer", setup.optimizer), ("DataLoader", setup.loader)):
        if given:
            yield f"Add to the arguments of your {where}: {_keywords(given)}"


def _notes(found: Emitted) -> Iterator[str]:
    """Yields comments: settings that the framework changes itself, and those that it lacks."""
    for line in found.framework.notes(found.setup):
        yield f"By itself, {found.framework.title} {line}."
    lost = [
        f"    {name}, {times(choice.speedup)}: {_keywords(lacks)}"
        for name, (choice, lacks) in found.beyond.items()
    ]
    if found.setup.unsupported:
        lost.append(f"    input pipeline: {_keywords(found.setup.unsupported)}")
    yield from [f"{found.framework.title} has no setting for:", *lost] if lost else []
