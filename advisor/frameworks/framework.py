"""A framework's table. A row turns a knob's value, if it is not torch's default, into settings.

A knob without a row is never dropped: if its value is not torch's default, the framework does not
get that config, and `advisor emit` names the knob.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from advisor.cache.config import BATCH, Config
from advisor.cache.key import Environment
from advisor.cache.record import Record
from advisor.cache.task import Task
from advisor.tuners.act.pilot.parts import micro_batches
from advisor.tuners.knobs import TORCH


@dataclass(frozen=True, slots=True)
class ObjectSetting:
    """A setting whose value is an object of the framework, which the script makes."""

    module: str
    name: str
    keywords: Mapping[str, object]


@dataclass(slots=True)
class Setup:
    """A config of a record, as settings of a framework and as changes that the script needs.

    Attributes:
        batch: the user's batch size.
        flags: lines of Python at the start of the script; each sets a switch of the process.
        model: lines of Python on `model`, before the framework gets it.
        after: lines of Python once the framework's own object is made.
        optimizer, loader: keyword arguments for the user's optimizer and DataLoader.
        unsupported: the values, by knob, that the framework cannot express.
    """

    record: Record
    config: Config
    batch: int
    settings: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    model: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        return self.record.key.task

    @property
    def environment(self) -> Environment:
        """Where the config was measured."""
        return self.record.key.environment

    @property
    def accumulation(self) -> tuple[int, int] | None:
        """Returns (samples in one call of the model in one process, 0 if unknown; calls in each
        process per batch of the user); None if no number of calls makes up that batch."""
        size, micro = self.config.batch or self.batch, micro_batches(self.task.others)
        parts, rest = divmod(self.batch, size) if size < self.batch else (1, 0)
        if rest:
            return None
        samples, rest = divmod(size, micro * self.task.processes)
        return (0 if rest else samples), parts * micro


DATALOADER = {"num_workers": 0, "prefetch_factor": 2}
Added = Mapping[str, Any]
"""Settings, lines and arguments, by the field of a Setup that they are added to."""
KnobRow = Callable[[Setup, Any], Added | None]
"""What a knob's value adds to a Setup; None if the framework cannot express the value."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework.

    Attributes:
        title: the class or script that takes the settings: 'transformers.TrainingArguments'.
        call: how a script passes the dictionary `arguments`; '' if the settings are a YAML file.
        devices: settings for each kind of device.
        differs: knobs whose default in the framework may differ from torch's: their rows also get
            torch's default.
        notes: lines on what the framework does differently from the measurement.
    """

    title: str
    call: str
    rows: Mapping[str, KnobRow]
    devices: Mapping[str, Mapping[str, object]]
    differs: Collection[str] = ()
    notes: Callable[[Setup], list[str]] = lambda _setup: []

    def setup(self, record: Record, config: Config, batch: int | None = None) -> Setup:
        """A config's Setup; `batch`: the user's batch size, if it is not the record's."""
        device = record.key.environment.device.kind
        setup = Setup(record, config, batch or record.batch, settings={**self.devices[device]})
        # The task's baseline may differ from torch's default, for example by determinism.
        default = record.baseline.config | TORCH | DATALOADER
        for name, value in config.items():
            same = value == default.get(name) and name not in (BATCH, *self.differs)
            if value is None or same:
                continue
            row = self.rows.get(name)
            added = row(setup, value) if row else None
            if added is None:
                setup.unsupported[name] = value
            for where, more in (added or {}).items():
                held = getattr(setup, where)
                held.extend(more) if isinstance(held, list) else held.update(more)
        return setup
