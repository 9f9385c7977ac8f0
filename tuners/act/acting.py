"""What a config comes to through the rows of the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from advisor.cache.config import BATCH, Config, Value
from advisor.tuners.knobs import KNOBS, WORKERS, Knob

DYNAMIC_SHAPES = "dynamic_shapes"


def rows_of(config: Config, default: Config) -> tuple[Knob, ...]:
    """The rows whose value in `config` is not torch's own already; True and 1 differ."""
    changed = {*config.changed(default)}
    if config.batch and config.batch != default.batch:
        changed.add(BATCH)
    return tuple(knob for knob in KNOBS if knob.name in changed)


class Acting:
    """The rows through which a config acts on a device, and what they make of a step.

    Attributes:
        rows: those whose value is not torch's own, with it.
        layouts: what lays a batch out, each with its value.
        autocast: the number format of the forward pass; None if it is not changed.
        scaled: whether the loss is.
        non_blocking: whether batches are copied beside the host's work.
        graphs: whether the forward pass replays CUDA graphs.
        captured: whether the whole step is to be captured.
        compiles: whether the model is compiled; `any_size`: for inputs of any size at once.
        undoes_autocast, undoes_compile: the script's own is off, which is measured and never
            advised.
    """

    def __init__(self, config: Config, default: Config, device: torch.device) -> None:
        self.rows = rows = tuple((knob, config[knob.name]) for knob in rows_of(config, default))
        self.layouts = [(k.layout, value) for k, value in rows if k.layout and value]
        formats = (k.autocast[value] for k, value in rows if value in k.autocast)
        self.autocast = getattr(torch, name) if (name := next(formats, "")) else None
        self.scaled = any(value in k.scaled for k, value in rows)
        beside = any(value in k.non_blocking for k, value in rows)
        self.non_blocking = device.type == "cuda" and beside
        self.graphs = any(value in k.graphs for k, value in rows)
        self.captured = any(value in k.captured for k, value in rows)
        self.compiles = any(k.model and not k.layout for k, _value in rows)
        undone = [(k, default[k.name]) for k, v in rows if k.name in default and v == k.default]
        self.undoes_autocast = any(own in k.autocast for k, own in undone)
        self.undoes_compile = any(k.dear and own != k.default for k, own in undone)
        self.any_size = any(k.name == DYNAMIC_SHAPES and value for k, value in rows)

    @property
    def advised(self) -> Iterator[tuple[Knob, Value]]:
        """The rows that differ from torch's own wherever that is known beforehand."""
        return ((knob, value) for knob, value in self.rows if value != knob.default)

    def optimizer(self) -> dict[str, Any]:
        """Keyword arguments for torch.optim's optimizers."""
        return {"fused": True} if any(k.optimizer and value for k, value in self.rows) else {}

    def loader(self) -> dict[str, Any]:
        """Keyword arguments for torch.utils.data.DataLoader."""
        found: dict[str, Any] = {knob.name: value for knob, value in self.rows if knob.loader}
        if found.get(WORKERS) == 0:
            found.pop("prefetch_factor", None)  # which a DataLoader without workers refuses
        return found
