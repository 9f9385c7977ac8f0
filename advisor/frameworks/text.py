"""`advisor emit`: a record as a framework's own configuration, to copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2

from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.cache.shown import times
from advisor.errors import NoRecord, printable
from advisor.frameworks.framework import Framework, ObjectSetting
from advisor.resolve.answer import answer
from advisor.resolve.request import Request
from advisor.tuners.knobs import SAVING


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
        def require(lacks: Mapping[str, object]) -> None:
            if lacks:
                said = f"{title} has no setting for {keywords(lacks)}, with which {record.id} is"
                raise NoRecord(f"{said} tuned")

        def lacks(config: Config, at: int | None = None) -> dict[str, Any]:
            return framework.setup(record, config, at).unsupported

        task, title = record.key.task, framework.title
        if task.mode != "train":
            raise NoRecord(f"{record.id} was tuned for mode {task.mode}; {title} only trains")
        # The advice may save less memory than the baseline.
        require(lacks(record.baseline.config.without(*SAVING)))
        request = Request(batch=batch, free=free, fits=lambda config: not lacks(config, batch))
        answered = answer(record, request)
        require(lacks(answered.config.only(*SAVING)))
        self.framework, self.reason = framework, answered.reason
        self.setup = framework.setup(record, answered.config, batch)
        self.beyond = {
            name: (choice, lost)
            for name, choice in record.choices.items()
            if (choice.batch == record.batch or free) and (lost := lacks(choice.config))
        }


def text(found: Emitted) -> str:
    """The whole output: settings in the framework's format, and the rest as comments."""
    imports = sorted({line.partition(".")[0] for line in found.setup.flags})
    return template("emit.txt").render(found=found, imports=imports)


def template(name: str) -> jinja2.Template:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("advisor.report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        # A record may contain any text: what it says stays on its line.
        finalize=lambda value: printable(str(value)),
    )
    shown = {"json": json.dumps, "keywords": keywords, "literal": literal, "times": times}
    templates.filters |= shown
    return templates.get_template(name)


def data(found: Emitted) -> dict[str, Any]:
    """The content of `text`, for JSON."""
    setup = found.setup
    lacks = {name: values for name, (_choice, values) in found.beyond.items()}
    if setup.unsupported:
        lacks["input pipeline"] = setup.unsupported
    changes = ("flags", "model", "after", "optimizer", "loader")  # that the script makes itself
    made = {n: literal(v) for n, v in setup.settings.items() if isinstance(v, ObjectSetting)}
    return {
        "framework": found.framework.title,
        "record": setup.record.id,
        "reason": found.reason,
        "config": dict(setup.config),
        "settings": {**setup.settings, **made},
        **{name: getattr(setup, name) for name in changes},
        "by_itself": found.framework.notes(setup),
        "not_expressed": lacks,
    }


def literal(value: object) -> str:
    if isinstance(value, ObjectSetting):
        return f"{value.name}({keywords(value.keywords)})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def keywords(given: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in given.items())
