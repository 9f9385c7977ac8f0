"""Which config of a record a framework can follow whole, and what it is then told."""

from __future__ import annotations

# First of all: loading torch may bring a pilot, and that must not find half of advisor.
import torch  # noqa: F401  # isort: skip

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config
from advisor.cache.record import LOOP, Choice, Record
from advisor.errors import NoRecord, UsageError
from advisor.frameworks.words import Framework, Made, Scene, Words

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice


def arguments(framework: Framework, target: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `advised` gives where nobody lays out the model; the process's switches are set."""
    return advised(framework, target, asked, on_model=False)[1]


def advised(
    framework: Framework, target: Any, asked: Mapping[str, Any], *, on_model: bool
) -> tuple[Advice, dict[str, Any]]:
    """The advice that a framework can follow whole, its switches set, and the settings.

    Args:
        asked: as `advisor.lookup` takes it.
        on_model: whether somebody lays out and compiles the model.

    Raises:
        UsageError: batch 'free' where the loader is the script's own, or a framework's object
            among the settings cannot be made.
        AdvisorError: with strict=True, why there is no advice.
    """
    from advisor.finding.lookups import lookup_for, named_batch

    free = asked.get("batch") == "free"
    if free and not framework.loads:
        raise UsageError(
            f"batch 'free': {framework.title} leaves the loader to the script; name a batch, or "
            "see advisor emit --batch free"
        )
    batch = named_batch({**asked, "batch": None} if free else asked)

    def fits(record: Record, config: Config) -> bool:
        words, unsaid = framework.say(Scene.of(record, config, batch))
        by_hand = words.optimizer or words.after or (words.model and not on_model)
        return not unsaid and not by_hand

    advice = lookup_for(target, asked, fits=fits)
    advice.hand_over()
    if advice.record is None:
        return advice, {}
    words, _unsaid = framework.say(Scene.of(advice.record, advice.config, batch))
    return advice, {name: _made(value) for name, value in words.settings.items()}


def _made(value: object) -> object:
    if not isinstance(value, Made):
        return value
    try:
        return value()
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"{exc.name} is not installed; run: pip install 'advisor[{exc.name}]'"
        ) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a framework is told of a record.

    Attributes:
        reason: what the config is, '1.50x torch's default at batch 64'.
        beyond: faster choices of the record, by what a report calls them, each with the values of
            it that the framework cannot be told.
        unsaid: what of the config that is told cannot be said, of the input pipeline alone.
    """

    framework: Framework
    record: Record
    scene: Scene
    words: Words
    reason: str
    beyond: Mapping[str, tuple[Choice, Config]]
    unsaid: Config


def told(framework: Framework, record: Record, *, batch: int | None, free: bool) -> Told:
    """The best that was measured of what a framework can be told whole.

    Args:
        batch: another one than the record's.
        free: the best batch that was found; where it is smaller, the record's is kept by gradient
            accumulation.

    Raises:
        NoRecord: the framework cannot be told even what the record was tuned with.
    """
    from advisor.finding.answer import answer
    from advisor.finding.request import Request

    def fits(record: Record, config: Config) -> bool:
        return not framework.say(Scene.of(record, config, batch))[1]

    _refuse_what_cannot_be(framework, record)
    request = Request(
        target=record.target.name,
        given={},
        batch=batch,
        free=free,
        use=LOOP,
        device=record.key.environment.device.kind,
        fits=fits,
    )
    answered = answer(record, request)
    scene = Scene.of(record, answered.config, batch)
    words, unsaid = framework.say(scene)
    return Told(
        framework=framework,
        record=record,
        scene=scene,
        words=words,
        reason=answered.reason,
        beyond=_beyond(framework, record, free=free),
        unsaid=unsaid,
    )


def _refuse_what_cannot_be(framework: Framework, record: Record) -> None:
    task = record.key.task
    if task.mode != "train":
        raise NoRecord(f"{record.id} was tuned for mode {task.mode}: {framework.title} trains")
    _words, unsaid = framework.say(Scene.of(record, record.baseline.config))
    if unsaid:
        listed = ", ".join(f"{name}={value}" for name, value in unsaid.items())
        raise NoRecord(
            f"{framework.title} cannot be told {listed}, with which {record.id} is tuned"
        )


def _beyond(
    framework: Framework, record: Record, *, free: bool
) -> dict[str, tuple[Choice, Config]]:
    """The record's choices that cannot be told, and what of each cannot."""
    found = {}
    for name, choice in record.choices.items():
        if choice.batch != record.batch and not free:
            continue
        _words, unsaid = framework.say(Scene.of(record, choice.config))
        if unsaid:
            found[name] = (choice, unsaid)
    return found
