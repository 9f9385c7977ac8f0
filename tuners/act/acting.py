"""What a config comes to through the rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from advisor.cache.config import BATCH, Config, Value
from advisor.tuners.knobs import KNOBS, WORKERS, Knob

DYNAMIC_SHAPES = "dynamic_shapes"


def rows_of(config: Config, default: Config) -> tuple[Knob, ...]:
    """The rows whose value in `config` is not torch's own already; True and 1 differ."""
    changed = config.changed(default)
    batch = {BATCH} if config.batch and config.batch != default.batch else set()
    return tuple(knob for knob in KNOBS if knob.name in changed or knob.name in batch)


class Acting:
    """The rows through which a config acts on a device, and what they make of a step.

    Attributes:
        rows: those whose value is not torch's own, with it.
        layouts: what lays a batch out, each with its value.
        autocast: the number format of the forward pass; None where it is not changed.
        scaled: whether the loss is.
        non_blocking: whether batches are copied beside the host's work.
        graphs: whether the forward pass replays CUDA graphs.
        captured: whether the whole step is to be captured.
        compiles: whether the model is compiled; `any_size`: for inputs of any size at once.
        undoes_autocast, undoes_compile: the script's own is off, which is measured and never
            advised.
    """

    def __init__(self, config: Config, default: Config, device: torch.device) -> None:
        self.rows = tuple((knob, config[knob.name]) for knob in rows_of(config, default))
        self.layouts = [(knob.layout, value) for knob, value in self.rows if knob.layout and value]
        formats = (k.autocast[value] for k, value in self.rows if value in k.autocast)
        self.autocast = getattr(torch, name) if (name := next(formats, "")) else None
        self.scaled = self._any(lambda knob: knob.scaled)
        self.non_blocking = device.type == "cuda" and self._any(lambda knob: knob.non_blocking)
        self.graphs = self._any(lambda knob: knob.graphs)
        self.captured = self._any(lambda knob: knob.captured)
        self.compiles = any(knob.model and not knob.layout for knob, _value in self.rows)
        known = [(k, v) for k, v in self.rows if k.name in default]
        undone = [(k, default[k.name]) for k, value in known if value == k.default]
        self.undoes_autocast = any(own in k.autocast for k, own in undone)
        self.undoes_compile = any(k.dear and own != k.default for k, own in undone)
        self.any_size = any(knob.name == DYNAMIC_SHAPES and value for knob, value in self.rows)

    def _any(self, column: Callable[[Knob], Callable[[Value], bool] | None]) -> bool:
        return any(says(value) for knob, value in self.rows if (says := column(knob)) is not None)

    @property
    def advised(self) -> Iterator[tuple[Knob, Value]]:
        """The rows that differ from torch's own wherever that is known beforehand."""
        return ((knob, value) for knob, value in self.rows if value != knob.default)

    def optimizer(self) -> dict[str, Any]:
        """Keyword arguments for torch.optim's optimizers."""
        return _merged(k.optimizer(value) for k, value in self.rows if k.optimizer is not None)

    def loader(self) -> dict[str, Any]:
        """Keyword arguments for torch.utils.data.DataLoader."""
        found = _merged(k.loader(value) for k, value in self.rows if k.loader is not None)
        if found.get(WORKERS) == 0:
            found.pop("prefetch_factor", None)  # which a DataLoader without workers refuses
        return found


def _merged(parts: Iterator[dict[str, object]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
