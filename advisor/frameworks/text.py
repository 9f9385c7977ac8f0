"""What a framework is told, as text to copy: code in its own form, all else in comments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from advisor.cache.shown import times
from advisor.errors import printable
from advisor.frameworks.following import Told
from advisor.frameworks.python import keywords, literal


def text(told: Told) -> str:
    """The whole, ending with a line break."""
    above = "".join(_comment(line) for line in _head(told))
    below = "".join(_comment(line) for line in (*_beside(told), *_left(told)))
    return f"{above}\n{told.framework.write(told.words)}{below and chr(10)}{below}"


def data(told: Told) -> dict[str, Any]:
    """The same for JSON."""
    words = told.words
    return {
        "framework": told.framework.title,
        "record": told.record.id,
        "reason": told.reason,
        "config": dict(told.scene.config),
        "settings": {
            name: value if isinstance(value, bool | int | str | list | dict) else literal(value)
            for name, value in words.settings.items()
        },
        "flags": list(words.flags),
        "model": list(words.model),
        "after": list(words.after),
        "optimizer": dict(words.optimizer),
        "loader": dict(words.loader),
        "by_itself": told.framework.itself(told.scene, words),
        "not_expressed": {name: dict(unsaid) for name, (_one, unsaid) in told.beyond.items()}
        | ({"input pipeline": dict(told.unsaid)} if told.unsaid else {}),
    }


def _comment(line: str) -> str:
    # A record may name anything; a comment is one line.
    return f"# {printable(line)}\n"


def _head(told: Told) -> Iterator[str]:
    record, scene = told.record, told.scene
    task, device = record.key.task, record.key.environment.device.name
    yield f"{record.id}: {record.target.name}, {task.inputs}, batch {record.batch}, on {device}"
    yield f"{told.reason}; measured as one: leave nothing out"
    if record.stale:
        yield f"marked stale by advisor verify: {record.stale}"
    if scene.size and scene.accumulated > 1:
        each = f" in each of {scene.processes} processes" * (scene.processes > 1)
        yield (
            f"{scene.accumulated} batches of {scene.size}{each} make one of {scene.batch}, by "
            "gradient accumulation"
        )


def _beside(told: Told) -> Iterator[str]:
    """What the user adds in the script."""
    words, title = told.words, told.framework.title
    for where, lines in (
        (f"Add on the model, before {title} has it", words.model),
        (f"Add once {title} and what it trains with are made", words.after),
    ):
        if lines:
            yield f"{where}:"
            yield from (f"    {line}" for line in lines)
    for where, given in (("optimizer", words.optimizer), ("DataLoader", words.loader)):
        if given:
            yield f"Add to the arguments of your {where}: {keywords(given)}"


def _left(told: Told) -> Iterator[str]:
    """What the framework does by itself, and what it cannot be told."""
    for line in told.framework.itself(told.scene, told.words):
        yield f"By itself it {line}."
    lost = [
        f"    {name}, {times(choice.speedup)}: {_values(unsaid)}"
        for name, (choice, unsaid) in told.beyond.items()
    ]
    if told.unsaid:
        lost.append(f"    input pipeline: {_values(told.unsaid)}")
    if lost:
        yield "Cannot be expressed here:"
        yield from lost


def _values(config: Any) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in config.items())
