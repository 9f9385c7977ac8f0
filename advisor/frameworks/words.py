"""A framework's table: for each knob a row that turns its value into the framework's settings.

A knob without a row is never dropped: if its value is not torch's own, the framework is not given
that config, and `advisor emit` names the knob.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config, Value
from advisor.cache.record import Record
from advisor.cache.task import Task
from advisor.errors import UsageError

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice

UNSUPPORTED = Config(precision="fp8")
"""No framework has a setting for these: advisor chooses the layers that are in fp8."""


@dataclass(frozen=True, slots=True)
class ConfigContext:
    """A config of a record, and the batch that the user trains with; None for the record's."""

    record: Record
    config: Config
    asked_batch: int | None = None

    @property
    def batch(self) -> int:
        return self.asked_batch or self.record.batch

    @property
    def task(self) -> Task:
        return self.record.key.task

    @property
    def device(self) -> str:
        """'cuda' or 'cpu'."""
        return self.record.key.environment.device.kind

    @property
    def torch(self) -> str:
        """The version that the config was measured with."""
        return self.record.key.environment.software.torch

    @property
    def default(self) -> Config:
        """What torch does by itself; the task may ask for something else, as determinism."""
        from advisor.tuners.knobs import TORCH

        return Config(self.record.baseline.config | TORCH)

    @property
    def processes(self) -> int:
        """Those that share a batch."""
        return self.task.processes if self.task.command else 1

    @property
    def accumulation(self) -> tuple[int, int] | None:
        """(Samples in one call of the model in one process, 0 if not known; calls of each process
        for one of the user's batches); None if such calls cannot make up that batch."""
        from advisor.tuners.act.pilot.script_facts import micro_batches

        size, micro = self.config.batch or self.batch, micro_batches(self.task)
        parts, rest = divmod(self.batch, size) if size < self.batch else (1, 0)
        if rest:
            return None
        samples, rest = divmod(size, micro * self.processes)
        return (0 if rest else samples), parts * micro


@dataclass(frozen=True, slots=True)
class LazyObject:
    """An object of the framework among its settings; a call loads the framework and makes it."""

    module: str
    name: str
    keywords: Mapping[str, object]

    def __call__(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(**self.keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a config needs of a framework, and of the script beside it.

    Attributes:
        flags: lines of Python at the start of the script; each sets a switch of the process.
        model: lines of Python on `model`, before the framework gets it.
        after: lines of Python once the framework's own object is made.
        optimizer, loader: keyword arguments of the user's own.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    optimizer: Mapping[str, object] = field(default_factory=dict)
    loader: Mapping[str, object] = field(default_factory=dict)

    def __add__(self, other: Setup) -> Setup:
        return Setup(
            settings={**self.settings, **other.settings},
            flags=self.flags + other.flags,
            model=self.model + other.model,
            after=self.after + other.after,
            optimizer={**self.optimizer, **other.optimizer},
            loader={**self.loader, **other.loader},
        )


Row = Callable[[Value, ConfigContext], Setup | None]
"""What a value needs; None if the framework cannot express it. A row also gets torch's own values,
because the framework may have other defaults."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework.

    Attributes:
        title: what takes the settings, as 'transformers.TrainingArguments'.
        call: how a script passes the dictionary `arguments`; '' if the settings are a YAML file.
        devices: settings for each kind of device.
        notes: what the framework does otherwise than was measured, a line each.
        makes_loader: whether it makes the DataLoader, with the batch size that it is given.
    """

    title: str
    call: str
    rows: Mapping[str, Row]
    devices: Mapping[str, Mapping[str, object]]
    notes: Callable[[ConfigContext, Setup], list[str]] = lambda _context, _setup: []
    makes_loader: bool = False

    def setup(self, context: ConfigContext) -> tuple[Setup, Config]:
        """(What a config needs, its values that this framework cannot express)."""
        whole, unsupported = Setup(settings=self.devices[context.device]), {}
        for name, value in context.config.items():
            row = self.rows.get(name) or only(context.default.get(name))
            needs = None if value == UNSUPPORTED.get(name) else row(value, context)
            if needs is None:
                unsupported[name] = value
            else:
                whole += needs
        return whole, Config(unsupported)

    def arguments(self, target: Any = None, **asked: Any) -> dict[str, Any]:
        """Return keyword arguments for the framework, and set the process's switches.

            TrainingArguments(output_dir="out", **advisor.hf.arguments("model.py:Net"))
            Trainer(max_epochs=3, **advisor.lightning.arguments("model.py:Net"))
            Accelerator(**advisor.accelerate.arguments("model.py:Net"))

        Takes the arguments of `advisor.lookup` but `capture`. Serves the best config that these
        arguments express; without one they are empty, and one AdvisorWarning says why. With
        `batch="free"`, for transformers alone, gradient accumulation keeps your batch.
        """
        return self._advised(target, asked)[1]

    def _advised(
        self, target: Any, asked: Mapping[str, Any], *, on_model: bool = False
    ) -> tuple[Advice, dict[str, Any]]:
        """The advice and the settings; `on_model`: the caller lays out and compiles the model."""
        # First of all: loading torch may bring a pilot, and that must not find half of advisor.
        import torch  # noqa: F401

        from advisor.resolve.lookups import lookup_for, named_batch

        free = asked.get("batch") == "free"
        if free and not self.makes_loader:
            raise UsageError(
                f"batch 'free': {self.title} leaves the loader to the script; name a batch, or "
                "see advisor emit --batch free"
            )
        batch = named_batch({**asked, "batch": None} if free else asked)

        def fits(record: Record, config: Config) -> bool:
            needs, unsupported = self.setup(ConfigContext(record, config, batch))
            by_hand = needs.optimizer or needs.after or (needs.model and not on_model)
            return not unsupported and not by_hand

        advice = lookup_for(target, asked, fits=fits)
        advice.hand_over()
        if advice.record is None:
            return advice, {}
        settings = self.setup(ConfigContext(advice.record, advice.config, batch))[0].settings
        with installed():
            return advice, {n: v() if isinstance(v, LazyObject) else v for n, v in settings.items()}


def only(*values: Value | None) -> Row:
    """The row of a knob without a setting: these values are what the framework does anyway."""
    return lambda value, _context: Setup() if value in values else None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Raise UsageError if a framework that is imported within is not installed."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"{exc.name} is not installed; run: pip install 'advisor[{exc.name}]'"
        ) from exc
