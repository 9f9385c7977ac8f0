"""`advisor emit`: a record as a framework's own configuration, to copy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from advisor.cache.record import LOOP, Record
from advisor.cache.shown import times
from advisor.errors import NoRecord, printable
from advisor.frameworks.words import ConfigContext, Framework, LazyObject, Setup


class Emitted:
    """The fastest measured config of a record that a framework can express whole.

    Args:
        batch: another one than the record's.
        free: the best batch size that was found; if it is smaller, gradient accumulation keeps the
            record's.

    Attributes:
        reason: what the config is, as '1.50x torch's default at batch 64'.
        beyond: faster choices of the record by their names in a report, each with the values that
            the framework cannot express.
        unsupported: such values of this config: of the input pipeline alone.

    Raises:
        NoRecord: the framework cannot even express what the record was tuned with.
    """

    def __init__(
        self, framework: Framework, record: Record, *, batch: int | None = None, free: bool = False
    ) -> None:
        from advisor.resolve.answer import answer
        from advisor.resolve.request import Request

        task, title = record.key.task, framework.title
        if task.mode != "train":
            raise NoRecord(f"{record.id} was tuned for mode {task.mode}: {title} trains")
        if lacks := framework.setup(ConfigContext(record, record.baseline.config))[1]:
            listed = ", ".join(f"{name}={value}" for name, value in lacks.items())
            raise NoRecord(f"{title} cannot be told {listed}, with which {record.id} is tuned")
        request = Request(
            target=record.target.name,
            given={},
            batch=batch,
            free=free,
            use=LOOP,
            device=record.key.environment.device.kind,
            fits=lambda _record, config: (
                not framework.setup(ConfigContext(record, config, batch))[1]
            ),
        )
        answered = answer(record, request)
        self.framework, self.reason = framework, answered.reason
        self.context = ConfigContext(record, answered.config, batch)
        self.setup, self.unsupported = framework.setup(self.context)
        self.beyond = {
            name: (choice, lacks)
            for name, choice in record.choices.items()
            if choice.batch == record.batch or free
            if (lacks := framework.setup(ConfigContext(record, choice.config))[1])
        }


def text(found: Emitted) -> str:
    """All of it, settings in the framework's own format and the rest in comments."""
    # A record may contain any text; a comment is one line.
    above, below = (
        "".join(f"# {printable(line)}\n" for line in lines)
        for lines in (_head(found), [*_by_hand(found), *_notes(found)])
    )
    call = found.framework.call
    code = _python(found.setup, call) if call else _yaml(found.setup)
    return f"{above}\n{code}{below and chr(10)}{below}"


def data(found: Emitted) -> dict[str, Any]:
    """The same for JSON."""
    setup = found.setup
    lacks = {name: dict(values) for name, (_choice, values) in found.beyond.items()}
    pipeline = {"input pipeline": dict(found.unsupported)} if found.unsupported else {}
    return {
        "framework": found.framework.title,
        "record": found.context.record.id,
        "reason": found.reason,
        "config": dict(found.context.config),
        **{field.name: getattr(setup, field.name) for field in dataclasses.fields(setup)},
        "settings": {
            name: _literal(value) if isinstance(value, LazyObject) else value
            for name, value in setup.settings.items()
        },
        "by_itself": found.framework.notes(found.context, setup),
        "not_expressed": lacks | pipeline,
    }


def _python(setup: Setup, call: str) -> str:
    """The switches, then a dictionary `arguments`; `call`: where it goes."""
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
    context, record = found.context, found.context.record
    task, device = record.key.task, record.key.environment.device.name
    yield f"{record.id}: {record.target.name}, {task.inputs}, batch {record.batch}, on {device}"
    yield f"{found.reason}; measured as one: leave nothing out"
    if record.stale:
        yield f"marked stale by advisor verify: {record.stale}"
    size, calls = context.accumulation or (0, 0)
    if size and calls > 1:
        each = f" in each of {context.processes} processes" * (context.processes > 1)
        made = f"{calls} batches of {size}{each} make one of {context.batch}"
        yield f"{made}, by gradient accumulation"


def _by_hand(found: Emitted) -> Iterator[str]:
    """What the user adds to the script."""
    setup, title = found.setup, found.framework.title
    for where, lines in (
        (f"Add on the model, before {title} has it", setup.model),
        (f"Add once {title} and what it trains with are made, as it switches TF32 on", setup.after),
    ):
        if lines:
            yield f"{where}:"
            yield from (f"    {line}" for line in lines)
    for where, given in (("optimizer", setup.optimizer), ("DataLoader", setup.loader)):
        if given:
            yield f"Add to the arguments of your {where}: {_keywords(given)}"


def _notes(found: Emitted) -> Iterator[str]:
    """What the framework does by itself, and what it cannot express."""
    for line in found.framework.notes(found.context, found.setup):
        yield f"By itself it {line}."
    lost = [
        f"    {name}, {times(choice.speedup)}: {_keywords(lacks)}"
        for name, (choice, lacks) in found.beyond.items()
    ]
    if found.unsupported:
        lost.append(f"    input pipeline: {_keywords(found.unsupported)}")
    if lost:
        yield "Cannot be expressed here:"
        yield from lost
