"""What a framework's file says: a row a knob, from the knob's value to the framework's words.

A knob that has no row there is never dropped: where its value is not torch's own, no config with
it is served to that framework, and `advisor emit` names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from advisor.cache.config import Config, Value
from advisor.cache.record import Record
from advisor.cache.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a config is followed.

    Attributes:
        config: all of it.
        default: what torch does by itself on the device that it was measured on.
        task: what was tuned.
        device: 'cuda' or 'cpu'.
        batch: that the user trains with: kept by accumulation where `config` has a smaller one.
        torch: the version that it was measured with.
    """

    config: Config
    default: Config
    task: Task
    device: str
    batch: int
    torch: str

    @classmethod
    def of(cls, record: Record, config: Config, batch: int | None = None) -> Scene:
        """`batch`: the user's, where it is not the record's."""
        from advisor.tuners.knobs import TORCH

        return cls(
            config=config,
            # As in a lookup: what the task itself asks for, as determinism, is no default.
            default=Config(record.baseline.config | TORCH),
            task=record.key.task,
            device=record.key.environment.device.kind,
            batch=batch or record.batch,
            torch=record.key.environment.software.torch,
        )

    @property
    def processes(self) -> int:
        """That share a batch: those of a run, whose batch is of all of them."""
        return self.task.processes if self.task.command else 1

    @property
    def size(self) -> int:
        """Samples that the model is called with, in one process; 0 where they are not alike."""
        whole, calls = self.config.batch or self.batch, self.processes * self._micro_batches
        return 0 if whole % calls else whole // calls

    @property
    def accumulated(self) -> int:
        """Batches of this size, in each process, that make one of the user's; 0 as of `parts`."""
        return self.parts * self._micro_batches

    @property
    def _micro_batches(self) -> int:
        from advisor.tuners.act.pilot.script_facts import micro_batches

        return micro_batches(self.task)

    @property
    def parts(self) -> int:
        """Batches of the config that make one of the user's; 0 where no number of them does."""
        smaller = self.config.batch or self.batch
        if smaller >= self.batch:
            return 1
        return 0 if self.batch % smaller else self.batch // smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A framework's object among its settings, made where it is wanted: the framework is loaded
    then."""

    module: str
    name: str
    keywords: Mapping[str, object]

    def __call__(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(**self.keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How something is said to a framework, and in the script beside it.

    Attributes:
        settings: the framework's own, by name.
        flags: lines of Python at the start of the script, each a switch of the process.
        model: lines of Python on `model`, before the framework has it.
        after: lines of Python once the framework's own object is made.
        optimizer: keyword arguments of the user's optimizer.
        loader: keyword arguments of the user's DataLoader.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    optimizer: Mapping[str, object] = field(default_factory=dict)
    loader: Mapping[str, object] = field(default_factory=dict)

    def __add__(self, other: Words) -> Words:
        return Words(
            settings={**self.settings, **other.settings},
            flags=(*self.flags, *other.flags),
            model=(*self.model, *other.model),
            after=(*self.after, *other.after),
            optimizer={**self.optimizer, **other.optimizer},
            loader={**self.loader, **other.loader},
        )


NOTHING = Words()

NOWHERE = Config(precision="fp8")
"""What no framework has a word for: which layers are in it is advisor's choice."""

Row = Callable[[Value, Scene], Words | None]
"""How a value is said; None where it cannot be. It is asked for torch's own values too, since a
framework may do otherwise by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework.

    Attributes:
        title: what takes the settings, 'transformers.TrainingArguments'.
        rows: by knob.
        devices: what it must be told of a kind of device.
        itself: what it switches by itself for a config said so, a line each.
        write: the settings and the flags as text in its own form, ending with a line break.
        loads: whether it makes the loader, of the batch that it is told.
    """

    title: str
    rows: Mapping[str, Row]
    devices: Mapping[str, Mapping[str, object]]
    itself: Callable[[Scene, Words], list[str]]
    write: Callable[[Words], str]
    loads: bool = False

    def say(self, scene: Scene) -> tuple[Words, Config]:
        """How a config is said, and the values of it that cannot be."""
        words, unsaid = Words(settings=self.devices[scene.device]), {}
        for name, value in scene.config.items():
            row = self.rows.get(name)
            if row is not None:
                said = None if value == NOWHERE.get(name) else row(value, scene)
            else:
                said = None if scene.default.get(name) != value else NOTHING
            if said is None:
                unsaid[name] = value
            else:
                words += said
        return words, Config(unsaid)
